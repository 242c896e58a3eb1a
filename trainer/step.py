"""Defines the training and evaluation steps, and makes the state of training."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from layouts.axes import leaf_path
from layouts.layout import Layout
from layouts.mesh import use_mesh
from layouts.padding import without_padding
from layouts.reduction import defer_sum, zero_gradient
from layouts.shards import mesh_axes, spec_of
from models.api import Batch, Model, Params
from models.distillation import DistilledModel
from models.loss import Criterion, LossSums, TokenLosses, token_weights
from models.spec import TransformerSpec
from trainer.model_dir import teacher_spec
from trainer.optimizers.chain import keep_average
from trainer.optimizers.optimizer import OptimizerSpec
from trainer.optimizers.spikes import SkipSpikes
from trainer.run import Run

logger = logging.getLogger(__name__)

Array = jax.Array
State = dict[str, Any]
"""Has params, opt_state and step.  With frozen weights, of a teacher or below adapters, it also has
base, which identifies them; with `Run.skip_spikes`, also spikes."""
Metrics = dict[str, Any]  # numbers; with experts also their loads
UNKNOWN_STEPS = 2**30
"""Steps of a run of epochs while its rows are unknown: only shapes and weights are used then."""
Total = tuple[Params, LossSums]
WEIGHT_PARTS = {
    r"/(router_DE|bias_E)$": "router",
    r"(^|/|_)norm/|scale_[A-Z]$": "norms",
    r"/mlp/(\w+/)*w\w*_E": "experts",
    r"source_attention/": "source_attention",
    r"attention/": "attention",
    r"mlp/": "mlp",
    r"embed_|positions_": "embed",
    r"softmax_": "softmax",
}
"""Parts of the model with separate gradient norms, by patterns of weights' paths."""


@dataclasses.dataclass(frozen=True)
class TrainStepSpec:
    """Holds what a compiled step depends on except its arguments.  Hashable: the jit key."""

    model: Model
    optimizer: OptimizerSpec
    criterion: Criterion
    steps: int
    seed: int
    microbatches: int = 1
    skip_spikes: SkipSpikes | None = None
    ema: float | None = None

    def transform(self) -> optax.GradientTransformation:
        weights, layout = self.model.weights(), self.model.layout
        weights = {path: info for path, info in weights.items() if self.model.trains(path)}
        transform = self.optimizer.transform(self.steps, weights, layout)
        return transform if self.ema is None else keep_average(transform, self.ema)

    def without_padding(self) -> "TrainStepSpec":
        """Returns the same without padding; arrays are replicated along axes that need padding."""
        model: Any = self.model
        layout = without_padding(model.layout)
        if layout == model.layout:
            return self
        return dataclasses.replace(self, model=dataclasses.replace(model, layout=layout))

    def initial_state(self) -> State:
        """Returns a new state, whose opt_state is not sharded yet."""
        params = self.model.init(jax.random.key(self.seed))
        trained, zero = self.trained(params), jnp.zeros((), jnp.int32)
        state = {"params": params, "opt_state": self.transform().init(trained), "step": zero}
        state |= self.spike_state()
        if len(trained) == len(params):
            return state
        return state | {"base": {"step": zero, "checksum": zero.astype(jnp.uint32)}}

    def spike_state(self) -> State:
        """Returns the part of a new state that `Run.skip_spikes` adds."""
        return {} if self.skip_spikes is None else {"spikes": self.skip_spikes.initial_state()}

    def trained(self, params: Params) -> Params:
        """Returns the weights that training changes."""
        return {name: tree for name, tree in params.items() if self.model.trains(name)}

    def saved(self, state: State) -> State:
        """Returns the part of a state that checkpoints have."""
        return state | {"params": self.trained(state["params"])}

    @jax.named_scope("optimizer")
    def update(self, state: State, gradients: Params, loads: Any = ()) -> State:
        """Returns the state after one update by these gradients, and by the loads of experts."""
        trained = self.trained(state["params"])
        updates, opt_state = self.transform().update(gradients, state["opt_state"], trained)
        params = state["params"] | optax.apply_updates(trained, updates)
        if loads and self.model.spec.adapter is None:
            params = self.model.update_routers(params, loads)
        return state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def train_step_spec(run: Run, layout: Layout) -> TrainStepSpec:
    """Returns the spec on which the compiled steps of a run depend."""
    model: Model = run.model.model(layout)
    if run.teacher is not None:
        assert run.base is not None and isinstance(run.model, TransformerSpec)  # as a run checks
        model = DistilledModel(run.model, layout, teacher_spec(*run.base, run.model))
    return TrainStepSpec(
        model=model,
        optimizer=run.optimizer,
        criterion=run.criterion,
        steps=run.steps or UNKNOWN_STEPS,
        seed=run.seed,
        microbatches=run.microbatches,
        skip_spikes=run.skip_spikes,
        ema=run.ema,
    )


def abstract_state(step_spec: TrainStepSpec, mesh: Mesh | AbstractMesh) -> State:
    """Returns shapes, types and shardings of the state, allocating nothing.

    The optimizer's arrays have the shardings that an update returns.
    """

    def after_one_update() -> State:
        state = step_spec.initial_state()
        return step_spec.update(state, step_spec.trained(state["params"]))

    return abstract(after_one_update, mesh)


def abstract_params(model: Model, mesh: Mesh | AbstractMesh) -> Params:
    """Returns shapes, types and shardings of the weights, allocating nothing."""
    return abstract(lambda: model.init(jax.random.key(0)), mesh)


def abstract(make: Callable[..., Any], mesh: Mesh | AbstractMesh, *arguments: Any) -> Any:
    """Returns the abstract result of a function on a mesh, allocating nothing."""
    with use_mesh(mesh):
        return abstract_like(jax.eval_shape(make, *arguments), mesh)


def abstract_like(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns shapes, types and shardings of arrays, as they would be on this mesh."""

    def sharded(leaf: Any) -> jax.ShapeDtypeStruct:  # an array, or what describes one
        spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(sharded, tree)


def init_state(step_spec: TrainStepSpec, mesh: Mesh) -> State:
    """Makes a new state on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(step_spec, mesh))
    # On a CPU, optimising the many random draws takes ten times as long as running them.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    with jax.set_mesh(mesh):
        return jax.jit(step_spec.initial_state, out_shardings=shardings, compiler_options=options)()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(step_spec: TrainStepSpec, state: State, batch: Batch) -> tuple[State, Metrics]:
    """Updates the state once.  Several microbatches are a leading axis of the batch's arrays."""
    key = jax.random.fold_in(jax.random.key(step_spec.seed), state["step"])
    gradients, sums = add_microbatches(step_spec, state["params"], batch, key)
    trained = step_spec.trained(state["params"])
    tokens = jnp.maximum(sums.tokens, 1)  # all documents of a batch may be excluded
    gradients = jax.tree.map(lambda g, p: (g / tokens).astype(p.dtype), gradients, trained)
    metrics = {
        "loss": sums.loss / tokens,
        "objective": sums.total_objective(token_weights(batch)) / tokens,
        "accuracy": sums.correct / tokens,
        "tokens": sums.tokens,
        **grad_norms(gradients),
    }
    if step_spec.criterion.dpo_beta is not None:
        metrics["preferences"] = sums.tokens  # the numbers above are means over these
    updated = step_spec.update(state, gradients, sums.loads)
    if step_spec.skip_spikes is not None:
        updated, more = step_spec.skip_spikes.checked(state, updated, metrics)
        metrics |= more
    metrics["learning_rate"] = step_spec.optimizer.schedule.rate(step_spec.steps)(state["step"])
    if sums.loads:
        metrics["loads"] = sums.loads
    return updated, metrics


def add_microbatches(
    step_spec: TrainStepSpec, params: Params, batch: Batch, key: Array
) -> tuple[Params, LossSums]:
    """Sums the gradients of trained weights, and the loss sums, over microbatches.

    Memory does not grow with the number of microbatches.  Several microbatches are summed in JAX's
    default float type, whatever the types of the weights.
    """
    stack_weights = token_weights(batch)
    weights, params = params, step_spec.trained(params)

    def objective(params: Params, batch: Batch, key: Array) -> tuple[Array, LossSums]:
        sums = step_spec.model.loss(weights | params, batch, step_spec.criterion, key)
        return sums.total_objective(stack_weights), sums

    gradient = jax.grad(objective, has_aux=True)
    if step_spec.microbatches == 1:
        return gradient(params, batch, key)
    if step_spec.model.runs_stages:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(step_spec.microbatches))
        return gradient(params, batch, keys)
    first = jax.tree.map(lambda x: x[0], batch)
    sums = jax.eval_shape(lambda: objective(params, first, key)[1])
    zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)

    def added_up(params: Params) -> Total:
        def add(total: Total, microbatch: tuple[Batch, Array]) -> tuple[Total, None]:
            batch, index = microbatch
            gradients, sums = gradient(params, batch, jax.random.fold_in(key, index))
            gradients = jax.tree.map(lambda g: g.astype(float), gradients)
            return jax.tree.map(jnp.add, total, (gradients, sums)), None

        zero = (jax.tree.map(lambda x: zero_gradient(x, float), params), zero_sums)
        return jax.lax.scan(add, zero, (batch, jnp.arange(step_spec.microbatches)))[0]

    try:
        gradients, sums = added_up(with_deferred_sums(step_spec.model, params))
    except Exception as error:  # JAX has no rules yet for some operations on reduced arrays
        logger.warning("Gradients cross devices once a microbatch: %s", error)
        return added_up(params)
    return jax.tree.map(jax.sharding.reshard, gradients, jax.tree.map(spec_of, params)), sums


def with_deferred_sums(model: Model, params: Params) -> Params:
    """Returns the weights so that gradients of their products are reduced once per step.

    Gradients of biases and scales, which no product reads, are reduced once per microbatch.
    """
    infos, place = model.weights(), model.layout.place("BL")
    rows, columns = map(mesh_axes, place)

    def deferred(path: tuple[Any, ...], weight: Array) -> Array:
        info = infos[leaf_path(path)]
        return defer_sum(weight, rows, (*rows, *columns)) if info.reads else weight

    return jax.tree.map_with_path(deferred, params)


def part_of(path: str) -> str:
    """Returns the part of the model that a weight belongs to."""
    return next((p for words, p in WEIGHT_PARTS.items() if re.search(words, path)), "other")


def grad_norms(gradients: Params) -> dict[str, Array]:
    """Returns the norm of all gradients, "grad_norm", and of each part, "grad_norm/attention".

    Each gradient is read, and its sum reduced, only once.  Sums have JAX's default float type.
    """
    parts = dict[str, list[Array]]()
    squares = jax.tree.map(lambda gradient: jnp.sum(jnp.square(gradient.astype(float))), gradients)
    for path, square in jax.tree.leaves_with_path(squares):
        part = part_of(leaf_path(path))
        parts.setdefault(f"grad_norm/{part}", []).append(square)
    every = {"grad_norm": jax.tree.leaves(squares), **parts}
    return {name: jnp.sqrt(optax.tree.sum(part)) for name, part in every.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluate_step(model: Model, criterion: Criterion, params: Params, batch: Batch) -> LossSums:
    """Returns the sums over one batch, without dropout."""
    return model.loss(params, batch, criterion)


@functools.partial(jax.jit, static_argnums=0)
def token_losses(model: Model, params: Params, batch: Batch) -> TokenLosses:
    return model.token_losses(params, batch)
