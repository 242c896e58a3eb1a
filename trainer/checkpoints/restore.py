"""Restores the weights of trained models under any layout, and pads states for a layout."""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from configs.errors import UserError, brief
from configs.write import diff
from data.vocabs import Vocabs
from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.padding import resized
from models.api import Model, Params
from models.distillation import TEACHER, DistilledModel
from models.precision import StoredWeights, quantize_weights
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.warm_start import checksum, warm_started
from trainer.model_dir import ModelDir
from trainer.multihost import connect
from trainer.resume.changes import is_free
from trainer.resume.history import Change, last_saved
from trainer.run import Run
from trainer.step import State, TrainStepSpec, abstract_state, train_step_spec

logger = logging.getLogger(__name__)
EMA = "ema"
"""Selects the saved moving average instead of a number of checkpoints to average."""
WITHOUT_EFFECT = r"^Precision\.|dropout$|aux_loss$|z_loss$|jitter$"
"""Settings of a model that affect what it decodes only by round-off."""


@dataclasses.dataclass(frozen=True)
class StatePadding:
    """Pads and unpads training states, or parts of them."""

    step_spec: TrainStepSpec
    mesh: Mesh

    @functools.cached_property
    def padded(self) -> State:
        """Returns the shapes, types and shardings of the padded state."""
        return abstract_state(self.step_spec, self.mesh)

    @functools.cached_property
    def unpadded(self) -> State:
        """Returns the same for the unpadded state, which is what is saved.  Arrays with padding are
        replicated along the padded axes."""
        even = self.step_spec.without_padding()
        if even is self.step_spec:
            return self.padded
        even_state = abstract_state(even, self.mesh)
        return jax.tree.map(lambda a, b: a if a.shape == b.shape else b, self.padded, even_state)

    def unpad(self, state: State) -> State:
        return self._like(self.unpadded, state)

    def pad(self, state: State) -> State:
        return self._like(self.padded, state)

    def add_base(self, state: State, run: Run) -> None:
        """Adds to an unpadded state the weights that training does not change: the base weights of
        adapters, or a teacher's.

        A saved state has their step and checksum; in a new state, the checksum is 0.
        """
        assert run.base is not None  # as a run checks
        setting, folder = run.base
        model, known = self.step_spec.without_padding().model, jax.device_get(state["base"])
        params = self.unpadded["params"].items()
        abstract = {name: tree for name, tree in params if not model.trains(name)}
        step = int(known["step"]) if known["checksum"] else None
        is_teacher = isinstance(model, DistilledModel)
        if isinstance(model, DistilledModel):
            abstract, model = abstract[TEACHER], model.teacher
        frozen, step = warm_started(abstract, folder, model, self.mesh, step, setting)
        if is_teacher:
            frozen = {TEACHER: frozen}
        base = {"step": np.int32(step), "checksum": jax.device_get(checksum(frozen))}
        if known["checksum"] not in (0, base["checksum"]):
            raise UserError(
                f"{setting} = {folder!r}, step {step}: not the weights that the run was trained "
                f"with.  Copy those back, or set {setting} to their folder."
            )
        state["base"] = jax.device_put(base, self.padded["step"].sharding)
        state["params"] = frozen | state["params"]

    def _like(self, abstract: State, state: State) -> State:
        if self.step_spec.without_padding() is self.step_spec:
            return state
        leaves, structure = jax.tree.flatten(state)
        params = {name: abstract["params"][name] for name in state.get("params", ())}
        targets = jax.tree.leaves({name: ({**abstract, "params": params})[name] for name in state})
        differ = [i for i, leaf in enumerate(targets) if leaf.shape != leaves[i].shape]
        forms = tuple((targets[i].shape, targets[i].sharding.spec) for i in differ)
        with jax.set_mesh(self.mesh):
            new = all_resized([leaves[i] for i in differ], forms)
        for i, leaf in zip(differ, new, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnums=1)
def all_resized(
    arrays: list[jax.Array], forms: tuple[tuple[tuple[int, ...], jax.P], ...]
) -> list[jax.Array]:
    """Pads arrays with zeros or cuts them to other shapes, and sets their shardings."""
    return [resized(x, *form) for x, form in zip(arrays, forms, strict=True)]


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """Holds a model with weights, ready to evaluate, decode or score."""

    model: Model
    params: Params
    run: Run
    vocabs: Vocabs
    mesh: Mesh
    step: int
    averaged_steps: Sequence[int] = ()
    """The steps whose weights are averaged; a single one if nothing is averaged."""


def chosen_steps(checkpoints: Checkpoints, which: str) -> list[int | None]:
    """Returns the steps that "latest", "best", "all" or numbers stand for.

    None is the newest checkpoint that is not damaged.
    """
    steps = checkpoints.steps()
    if which == "all":
        return [*steps]
    if which == "latest":
        return [None]
    if which == "best":
        if (best := checkpoints.best) is None:
            raise UserError(
                f"--checkpoint=best: no checkpoint in {checkpoints.folder} has a metric.  An "
                "evaluation on the validation split writes it.  Legal: latest, all, or steps, "
                f"separated by commas: {', '.join(map(str, steps))}."
            )
        return [best]
    names = which.split(",")
    if all(re.fullmatch(r"[0-9]{1,18}", name) and int(name) in steps for name in names):
        return [int(name) for name in names]
    raise UserError(
        f"--checkpoint={which}: no such checkpoint.  Legal: latest, best, all, or steps, separated "
        f"by commas: {', '.join(map(str, steps))}."
    )


def weights_path(run: Run, average: str | None) -> str:
    """Returns the path of the weights, or of their moving average, in a checkpoint."""
    if average != EMA:
        return "params"
    if run.ema is None:
        raise UserError(
            "--average=ema: the run keeps no moving average of its weights.  Train with Run.ema, "
            "such as 0.999, or give a number of checkpoints."
        )
    return "opt_state/average"


def averaged_steps(checkpoints: Checkpoints, step: int | None, average_text: str) -> list[int]:
    """Returns the last few steps up to `step`, or up to the newest."""
    average = int(average_text) if re.fullmatch(r"[0-9]{1,9}", average_text) else 0
    if not average:
        raise UserError(
            f"--average={brief(average_text)}: legal: a number of checkpoints of at least 1, or "
            f"{EMA}."
        )
    last = checkpoints.latest if step is None else step
    steps = [s for s in checkpoints.steps() if last is None or s <= last]
    if average > len(steps):
        raise UserError(
            f"--average={average}: up to step {last} the run has fewer checkpoints.  Legal: at "
            f"most {len(steps)}."
        )
    return steps[-average:]


class ModelRestorer(contextlib.AbstractContextManager["ModelRestorer"]):
    """Restores checkpoints of one run as models, for as long as the context lasts."""

    def __init__(
        self, model_dir: Path, run: Run, layout: Layout, weights: StoredWeights = "stored"
    ):
        run = dataclasses.replace(run, teacher=None)
        self.run, self.weights = run, weights
        self.directory = directory = ModelDir(model_dir)
        self.vocabs, self.content_hash = directory.vocabs(run.task), directory.content_hash
        self.mesh = make_mesh(layout)
        connect(self.mesh)
        self.padding = StatePadding(train_step_spec(run, layout), self.mesh)
        self.checkpoints = Checkpoints(model_dir)
        if self.checkpoints.latest is None:
            remedy = "Let `meshloom train` save one."
            if steps := last_saved(model_dir):
                remedy = f"The run reached step {steps}: mount or copy its checkpoints back."
            raise UserError(f"{model_dir}: no checkpoint there.  {remedy}")

    def restore(self, step: int | None, average: str | None = None) -> TrainedModel:
        """Restores the weights of one step, their moving average, or the mean of the last few
        checkpoints up to it."""
        saved = self.padding.step_spec.saved(self.padding.unpadded)  # traced once, for all
        abstract, model, run = saved["params"], self.padding.step_spec.model, self.run.merged
        with jax.set_mesh(self.mesh):
            if average is not None and average != EMA:
                steps = averaged_steps(self.checkpoints, step, average)
                logger.info("Averaging the checkpoints of steps %s.", ", ".join(map(str, steps)))
                params, step = self.checkpoints.average(steps, abstract), steps[-1]
            else:
                path = weights_path(run, average)
                tree = traverse_util.unflatten_dict({path: abstract}, sep="/")
                state, step = self.checkpoints.restore(tree, step)
                logger.info("Loaded %s of step %d.", path, step)
                params = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(state))
                steps = [step]
            if "base" in saved:
                state = self.checkpoints.restore({"base": saved["base"]}, step)[0] | {"params": {}}
                self.padding.add_base(state, self.run)
                merge = jax.jit(lambda base, new: model.merged(base | new), donate_argnums=0)
                params, model = merge(state["params"], params), run.model.model(model.layout)
        params = self.padding.pad({"params": params})["params"]
        if self.weights == "int8":
            with jax.set_mesh(self.mesh):
                params = jax.jit(quantize_weights, static_argnums=0)(model, params)
        return TrainedModel(model, params, run, self.vocabs, self.mesh, step, steps)

    def __exit__(self, *error: object) -> None:
        self.checkpoints.__exit__(None, None, None)


def restore_adapters(model_dir: Path, trained: TrainedModel) -> tuple[Run, Params, int]:
    """Returns a run, its newest adapters, which were trained with these weights, and their step."""
    directory = ModelDir(model_dir)
    run = directory.load().make(Run)
    directory.vocabs(run.task)  # raises if the vocabulary, or the checkpoints, are of another run
    if run.model.adapter is None:
        raise UserError(f"{model_dir}: no adapters there.  Legal: a run with @Lora().")
    changes = [Change(*row) for row in diff(trained.run.model, run.merged.model)]
    changes = [x for x in changes if not re.search(WITHOUT_EFFECT, x.name) and not is_free(x)]
    if changes:
        rows = ", ".join(f"{x.name} = {x.new!r}, served with {x.old!r}" for x in changes)
        raise UserError(f"{model_dir}: adapters of another model than the one served: {rows}.")
    if alone := run.model.adapter.merged_paths(trained.model.weights()):
        raise UserError(
            f"{model_dir}: adapters of {', '.join(alone)} are not served with others.  Serve "
            "this run alone (--model_dir), or train adapters of other weights (Lora.targets)."
        )
    padding = StatePadding(train_step_spec(run, trained.model.layout), trained.mesh)
    saved = padding.step_spec.saved(padding.unpadded)
    base = {name: tree for name, tree in padding.unpadded["params"].items()
            if name in trained.params}  # fmt: skip

    @jax.jit
    def checksum_there(params: Params) -> jax.Array:
        """Returns the checksum of the weights in the types that the run uses."""
        return checksum(jax.tree.map(lambda x, like: x.astype(like.dtype), params, base))

    with Checkpoints(model_dir) as checkpoints, jax.set_mesh(trained.mesh):
        if checkpoints.latest is None:
            raise UserError(f"{model_dir}: no checkpoint there.")
        state, step = checkpoints.restore({name: saved[name] for name in ("params", "base")})
        if state["base"]["checksum"] != checksum_there(trained.params):
            there = int(state["base"]["step"])
            raise UserError(
                f"{model_dir}: step {trained.step} is served, but the adapters were trained on "
                f"step {there} of Run.start_from = {run.start_from!r}.  --checkpoint={there} "
                "serves that step."
            )
        logger.info("Loaded adapters of %s, step %d.", model_dir, step)
        return run, padding.pad({"params": state["params"]})["params"], step
