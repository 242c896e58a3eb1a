"""Layouts do not change the result: the same training steps under every shipped layout.

Every program is compiled once, for the whole module; new layout files join by themselves.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from configs.load import load
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.adapters.lora import Lora
from models.api import Batch, Params
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Dispatch, Moe
from models.feed_forward.moe.routing import SigmoidTopK, Top2, TopK
from models.loss import Criterion, LossSums
from models.norms import LayerNorm
from models.parts import Block
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import Precision
from models.transformer import Transformer, TransformerModel
from tests.toys import FLOAT64, ROOT, ROUND_OFF, SPLITTABLE, pair_rows
from trainer.feed import BatchSharding
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.muon import Muon
from trainer.optimizers.optimizer import OptimizerSpec
from trainer.optimizers.schedules import Constant
from trainer.run import Run as Run  # model files name it
from trainer.step import State, TrainStepSpec, abstract_state, train_step

STEPS, ROWS = 10, 8
SPEC = dataclasses.replace(SPLITTABLE, scan=True, precision=FLOAT64)
STAGED = dataclasses.replace(SPEC, layers=2)  # which divide over two stages
NO_DROPOUT = dataclasses.replace(SPEC, dropout=0.0, attention=MultiHead())
CRITERION = Criterion(label_smoothing=0.1, z_loss=1e-3)
RATE = Constant(peak=3e-3, warmup_steps=4)
# AdamW divides each gradient by its size: without a floor, one that is nothing but round-off would
# move its weight as far as any other.
ADAMW = AdamW(schedule=RATE, clip_global_norm=0.5, epsilon=1e-5)
# test_muon.py has all of its iterations under layouts.
MUON = Muon(schedule=RATE, clip_global_norm=0.5, epsilon=1e-5, iterations=2)
ADAFACTOR = Adafactor(schedule=RATE, clip_global_norm=0.5, factored_from=4)

pytestmark = pytest.mark.usefixtures("float64")

# Into how many parts each layout splits the axes of weights and opt_state on 8 devices.
WAYS = {
    "whole": {},
    "data_parallel": {},
    "model_parallel": {"J": 8, "F": 8, "V": 8},
    "data_and_model_parallel": {"J": 2, "F": 2, "V": 2},
    "fsdp": {"D": 8},
    "sequence_parallel": {"J": 2, "F": 2, "V": 2, "L": 2},
    "two_dimensional": {"J": 2, "F": 2, "V": 2, "D": 4},
    "three_dimensional": {"J": 2, "F": 2, "V": 2, "D": 2, "L": 2},
    "mesh_tensorflow": {"J": 4, "F": 4, "V": 4},
    "pipeline": {"N": 2, "V": 2},
}
AXES = {"J": "heads", "F": "d_ff", "V": "vocab", "D": "d_model", "L": "length", "N": "layers"}
LAYOUTS = {path.stem: load([str(path)]).make(Layout) for path in sorted(ROOT.glob("layouts/*.gin"))}
WHOLE = LAYOUTS["whole"]
# Mesh-TensorFlow's string for its language model, as it stands there.
LAYOUTS["mesh_tensorflow"] = Layout(
    mesh="rows:2,cols:4", rules="batch:rows;vocab:cols;d_ff:cols;heads:cols"
)
FACTORED = ("whole", "fsdp", "two_dimensional")
FOR_EXPERTS = {"expert_parallel": 8, "expert_and_model_parallel": 4, "expert_mesh_axis": 4}
CASES = [
    *(("AdamW", name) for name in LAYOUTS if name not in (*FACTORED[1:], *FOR_EXPERTS)),
    *(("Adafactor", name) for name in FACTORED),
]


@dataclasses.dataclass(frozen=True)
class Noted(TransformerModel):
    """Notes each trace of its loss."""

    def loss(
        self, params: Params, batch: Batch, criterion: Criterion, key: jax.Array | None = None
    ) -> LossSums:
        TRACED.append(str(self.layout))
        return super().loss(params, batch, criterion, key)


class Trained(NamedTuple):
    """What some steps under a layout left."""

    losses: np.ndarray
    grad_norms: np.ndarray
    params: dict[str, np.ndarray]
    opt_state: dict[str, np.ndarray]
    shards: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # shape, and that on a device
    batch_split: bool


TRACED: list[str] = []  # as text: nothing here may rest on how layouts compare
DONE: dict[str, Trained] = {}


def batches() -> Iterable[dict[str, np.ndarray]]:
    """Rows of two segments each; a model without an encoder does not look at their sources."""
    rng, source_rng = np.random.default_rng(0), np.random.default_rng(1)
    for step in range(STEPS):
        yield pair_rows(
            rng.integers(3, 13, (ROWS, 2)).tolist(), source_rng.integers(2, 9, (ROWS, 2)).tolist(),
            SPEC.length, SPEC.vocab, seed=step, source_length=16,
        )  # fmt: skip


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def first_state(program: TrainStepSpec, mesh: jax.sharding.Mesh) -> State:
    """The same numbers under every layout: random weights, empty opt_state, step 0."""
    abstract, rng = abstract_state(program, mesh), np.random.default_rng(1)

    def number(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = rng.normal("scale" in path, 0.25, leaf.shape) * path.startswith("params")
        return jax.device_put(np.asarray(drawn, leaf.dtype), leaf.sharding)

    computed = [number(path, leaf) for path, leaf in by_path(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), computed)


def trained(
    optimizer: OptimizerSpec, layout: Layout, spec: Transformer = SPEC, microbatches: int = 1
) -> Trained:
    """What training leaves; each case is trained once."""
    case = f"{optimizer} {layout} {spec} {microbatches}"
    if case not in DONE:
        DONE[case] = train(optimizer, layout, spec, microbatches)
    return DONE[case]


def train(
    optimizer: OptimizerSpec, layout: Layout, spec: Transformer, microbatches: int
) -> Trained:
    """Calls the training step for each batch."""
    program = TrainStepSpec(Noted(spec, layout), optimizer, CRITERION, STEPS, 5, microbatches)
    mesh = make_mesh(layout)
    sharding = BatchSharding(layout, mesh, ROWS, microbatches)
    traces, compiled = len(TRACED), train_step._cache_size()
    state, losses, grad_norms = first_state(program, mesh), [], []
    placed = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        for host_batch in batches():
            batch = sharding.to_global_arrays(host_batch)
            state, metrics = train_step(program, state, batch)
            losses.append(float(metrics["loss"]))
            grad_norms.append(float(metrics["grad_norm"]))
    assert jax.tree.map(lambda x: x.sharding, state) == placed  # or the next step compiles again
    assert int(state["step"]) == STEPS
    # It was this layout that was traced and compiled, and no other one's program that ran.
    assert set(TRACED[traces:]) == {str(layout)}
    assert train_step._cache_size() == compiled + 1
    shards = {p: (x.shape, x.addressable_shards[0].data.shape) for p, x in by_path(state).items()}
    return Trained(
        np.array(losses),
        np.array(grad_norms),
        by_path(jax.device_get(state["params"])),
        by_path(jax.device_get(state["opt_state"])),
        shards,
        not batch["targets_BL"].sharding.is_fully_replicated,
    )


def assert_equal_to_round_off(computed: Trained, expected: Trained) -> None:
    np.testing.assert_allclose(computed.losses, expected.losses, rtol=ROUND_OFF)
    np.testing.assert_allclose(computed.grad_norms, expected.grad_norms, rtol=ROUND_OFF)
    assert computed.params.keys() == expected.params.keys()
    for path, weight in expected.params.items():
        np.testing.assert_allclose(computed.params[path], weight, rtol=0, atol=ROUND_OFF,
                                   err_msg=path)  # fmt: skip
    for path, slot in expected.opt_state.items():
        np.testing.assert_allclose(computed.opt_state[path], slot, rtol=0, err_msg=path,
                                   atol=ROUND_OFF * np.abs(slot).max())  # fmt: skip


@pytest.mark.parametrize(("optimizer", "name"), CASES, ids=lambda value: value)
def test_training_under_a_layout_is_training_on_one_device(optimizer: str, name: str) -> None:
    settings = {"AdamW": ADAMW, "Adafactor": ADAFACTOR}[optimizer]
    spec = STAGED if name == "pipeline" else SPEC
    computed = trained(settings, LAYOUTS[name], spec)
    ways = {getattr(spec, AXES[letter]): n for letter, n in WAYS.get(name, {}).items()}
    if name in WAYS:
        for path, (shape, shard) in computed.shards.items():
            assert shard == tuple(size // ways.get(size, 1) for size in shape), path
    assert name == "whole" or computed.batch_split or ways
    if name != "whole":
        assert_equal_to_round_off(computed, trained(settings, WHOLE, spec))


def test_training_changes_every_weight_and_loss() -> None:
    """Or the sweep would compare nothing with nothing."""
    for settings in (ADAMW, ADAFACTOR):
        program = TrainStepSpec(Noted(SPEC, WHOLE), settings, CRITERION, STEPS, 5)
        first = by_path(jax.device_get(first_state(program, make_mesh(WHOLE))["params"]))
        computed = trained(settings, WHOLE)
        assert len(set(computed.losses)) == STEPS
        assert computed.losses[-5:].mean() < computed.losses[:5].mean() - 0.05
        for path, weight in computed.params.items():
            assert np.abs(weight - first[path]).max() > 1e6 * ROUND_OFF, path
    factored = [
        path for path in computed.opt_state if "v_row" in path and computed.opt_state[path].ndim > 1
    ]
    assert len(factored) > 5


def first_step(
    layout: Layout, precision: Precision = FLOAT64, *, step: int = 0, lost_token: bool = False
) -> np.ndarray:
    """Returns the loss and the gradient norm of one step."""
    spec = dataclasses.replace(SPEC, precision=precision)
    program = TrainStepSpec(Noted(spec, layout), ADAMW, CRITERION, STEPS, 5)
    mesh, batch = make_mesh(layout), next(iter(batches()))
    state = first_state(program, mesh)
    state["step"] = jax.device_put(np.int32(step), state["step"].sharding)
    batch["segments_BL"][3, 1] *= not lost_token
    with jax.set_mesh(mesh):
        placed = BatchSharding(layout, mesh, ROWS).to_global_arrays(batch)
        _, metrics = train_step(program, state, placed)
    return np.array([float(metrics["loss"]), float(metrics["grad_norm"])])


@pytest.mark.parametrize("change", [{"step": 1}, {"lost_token": True}], ids=str)
def test_a_small_difference_is_far_beyond_round_off(change: Any) -> None:
    """Other dropout bits, or one lost token of 120, must not pass: one step shows either."""
    expected = trained(ADAMW, WHOLE)
    ratios = first_step(LAYOUTS["data_parallel"], **change) / [
        expected.losses[0],
        expected.grad_norms[0],
    ]
    assert np.abs(ratios - 1).min() > 1e5 * ROUND_OFF


@pytest.mark.few(2)
@pytest.mark.parametrize(("compute", "bound"), [("float32", 2e-6), ("bfloat16", 2**-7)])
@pytest.mark.parametrize("name", ["sequence_parallel", "two_dimensional"])
def test_a_step_in_fewer_bits_is_equal_to_its_round_off(
    name: str, compute: Any, bound: float
) -> None:
    """A float32 has 24 bits, a bfloat16 8; losses and norms add up some hundred of them."""
    with jax.enable_x64(False):
        precision = Precision(compute=compute)
        computed, expected = (first_step(LAYOUTS[key], precision) for key in (name, "whole"))
    np.testing.assert_allclose(computed, expected, rtol=bound)


def test_microbatches_and_an_axis_over_several_mesh_axes() -> None:
    """Two microbatches are one batch, and d_ff is cut first by x, then by y, then by z."""
    layout = Layout(
        mesh="x:2,y:2,z:2", rules="d_ff:x;d_ff:y;d_ff:z;vocab:y;vocab:z;heads:z;length:x?"
    )
    computed = trained(ADAMW, layout, NO_DROPOUT, 2)
    assert computed.shards["params/decoder/layers_N/mlp/wi_DF"] == ((3, 16, 40), (3, 16, 5))
    assert computed.shards["params/embed_VD"] == ((64, 16), (16, 16))
    assert_equal_to_round_off(computed, trained(ADAMW, WHOLE, NO_DROPOUT))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fsdp", "sequence_parallel", "two_dimensional"])
def test_faster_ways_to_compute_are_equal_too(name: str) -> None:
    """What the shipped small models use: one product for q, k and v, rotation, slices."""
    spec = dataclasses.replace(
        SPEC, attention=MultiHead(combined_qkv=True, chunks=2), positions=Rotary(),
        feed_forward=Mlp(gated=True, biases=True), norm=LayerNorm(), loss_chunks=3, scan=False,
        layers=1,
    )  # fmt: skip
    computed, expected = trained(ADAMW, LAYOUTS[name], spec), trained(ADAMW, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sequence_parallel", "pipeline"])
def test_layers_of_two_kinds_are_equal_too(name: str) -> None:
    """Every second layer has a sliding window, and rotation besides the learned positions.

    Norms are around the parts of one kind, and after those of the other; all heads have one norm,
    and logits are bounded.
    """
    attention = dataclasses.replace(SPEC.attention, window=3, qk_norm=True, qk_norm_over="heads")
    window = Block(attention=attention, positions=Rotary(theta=100.0), norm_places="both")
    pattern = (window, Block(norm_places="after", residual_scale=0.5))
    spec = dataclasses.replace(SPEC, layers=4, pattern=pattern, logit_cap=3.0)
    computed, expected = trained(ADAMW, LAYOUTS[name], spec), trained(ADAMW, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dispatch"), [("two_dimensional", "dropless"), ("pipeline", "gather")]
)
def test_sinks_and_biases_of_experts_are_equal_too(name: str, dispatch: Dispatch) -> None:
    expert = Mlp(activation="clamped_swiglu", gated=True, biases=True)
    router = TopK(k=2, normalises=True, capacity_factor=4.0)
    moe = Moe(experts=8, d_ff=24, expert=expert, router=router, dispatch=dispatch, shared_d_ff=8)
    attention = dataclasses.replace(SPEC.attention, sinks=True, window=3)
    positions = Rotary(fraction=0.7)  # 4 of 6 columns
    pattern = (Block(attention=attention, positions=positions), Block(feed_forward=moe))
    spec = dataclasses.replace(SPEC, layers=5, first_blocks=pattern[:1], pattern=pattern)
    computed, expected = trained(ADAMW, LAYOUTS[name], spec), trained(ADAMW, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fsdp", "context_parallel", "pipeline"])
def test_latent_attention_biased_routers_and_muon_are_equal_too(name: str) -> None:
    router = SigmoidTopK(bias_rate=0.01, expert_groups=4, groups_per_token=2)
    moe = Moe(experts=8, d_ff=24, shared_d_ff=8, router=router)
    latent = Latent(latent=8, rotated=4, query_latent=16, logit_cap=5.0)
    first, second = Block(attention=latent, positions=Rotary()), Block(feed_forward=moe)
    spec = dataclasses.replace(SPEC, layers=4, first_blocks=(first, second), pattern=(second,))
    computed, expected = trained(MUON, LAYOUTS[name], spec), trained(MUON, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)
    for block in ("first/block1", "layers_N"):
        assert np.abs(expected.params[f"decoder/{block}/mlp/bias_E"]).min() > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sequence_parallel", "context_parallel"])
def test_translation_models_are_equal_too(name: str) -> None:
    """An encoder, attention over the source, two embeddings of different sizes."""
    spec = dataclasses.replace(
        SPEC, positions=Relative(shared=True), encoder_layers=2, source_vocab=72, tied=False
    )
    computed, expected = trained(ADAFACTOR, LAYOUTS[name], spec), trained(ADAFACTOR, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)


ADAPTED = {
    "pipeline": LAYOUTS["pipeline"],
    "fsdp": LAYOUTS["fsdp"],
    "two_dimensional": LAYOUTS["two_dimensional"],
    "split rank": Layout(
        mesh="data:2,model:4", rules="batch:data;adapter_rank:model;heads:model;d_ff:model?"
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_equal_too(name: str) -> None:
    """Of all weights, the embedding among them; the weights themselves keep every bit."""
    adapter, layout = Lora(rank=4, targets=("w*", "embed"), store="float64"), ADAPTED[name]
    spec = dataclasses.replace(STAGED, adapter=adapter, feed_forward=Mlp(gated=True))
    computed, expected = trained(ADAMW, layout, spec), trained(ADAMW, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)
    if name == "split rank":
        a_DZ = computed.shards["params/adapter/decoder/layers_N/attention/wq/a_DZ"]
        assert a_DZ == ((2, 16, 4), (2, 16, 1))


def small(model: Transformer) -> Transformer:
    """The sweep's model with another one's experts; beside an encoder, with layers of them alone.

    Top-2 has a random second expert, jitter and both losses, and drops choices.  How many experts
    top-k takes, and how many layers of the same experts follow each other, is no difference.
    """
    [moe] = model.moes
    router = dataclasses.replace(
        moe.router, jitter=0.1, z_loss=1e-3, capacity_factor=0.75,
        evaluation_capacity_factor=Top2().evaluation_capacity_factor,
    )  # fmt: skip
    if type(router) is TopK:
        router = dataclasses.replace(router, k=4)
    group_tokens = moe.group_tokens and SPEC.length // 3
    moe = dataclasses.replace(
        moe, experts=16, d_ff=moe.d_ff and 24, router=router, group_tokens=group_tokens,
        expert=Mlp(),
    )  # fmt: skip
    pattern = (Block(feed_forward=moe),) if model.encoder_layers else with_experts(model, moe)
    return dataclasses.replace(
        SPEC, pattern=pattern, layers=len(pattern), scan=False, attention=MultiHead(),
        encoder_layers=model.encoder_layers and len(pattern), positions=type(model.positions)(),
        source_vocab=model.source_vocab and 72,
    )  # fmt: skip


def with_experts(model: Transformer, moe: Moe) -> tuple[Block, ...]:
    """The pattern of a model with these experts in the layers that have some; one where all do."""
    pattern = [
        Block(feed_forward=moe) if isinstance(parts.feed_forward, Moe) else Block()
        for parts in model.blocks[len(model.first_blocks) :]
    ]
    return tuple(pattern) if Block() in pattern else (Block(feed_forward=moe),)


def models_with_experts() -> dict[str, Transformer]:
    """Those of all model files, in small; of those that then are alike, the first."""
    computed: dict[Transformer, str] = {}
    for path in sorted(ROOT.glob("configs/models/*.gin")):
        config = load([str(path)])
        if any(binding.name == "Moe.experts" for binding in config.bound.values()):
            computed.setdefault(small(config.make(Transformer)), path.stem)
    return {name: spec for spec, name in computed.items()}


MODELS = models_with_experts()


@pytest.mark.few(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", FOR_EXPERTS)
def test_experts_are_equal_too(name: str, model: str) -> None:
    spec = MODELS[model]
    computed, expected = trained(ADAMW, LAYOUTS[name], spec), trained(ADAMW, WHOLE, spec)
    shards = [
        computed.shards[path] for path in computed.shards if re.match("params.*/wi_EDF", path)
    ]
    for shape, shard in shards:
        assert shape[1] == 16 and shard[1] == 16 // FOR_EXPERTS[name]
    blocks = [*spec.blocks, *(spec.encoder_blocks if spec.has_encoder else ())]
    assert len(shards) == sum(isinstance(block.feed_forward, Moe) for block in blocks)
    assert_equal_to_round_off(computed, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("dispatch", ["gather", "dropless"])
def test_experts_of_split_rows_are_equal_too(dispatch: Dispatch) -> None:
    """Each group of tokens is of one device, which sends it to the experts of the others."""
    spec = MODELS["tiny_moe"]
    [moe] = spec.moes
    moe = dataclasses.replace(moe, dispatch=dispatch, group_tokens=SPEC.length // 4)
    spec = dataclasses.replace(spec, pattern=with_experts(spec, moe))
    context = LAYOUTS["context_parallel"]
    rules = f"{context.rules};groups:data;groups:context;experts:context"
    layout = dataclasses.replace(context, mesh="data:2,context:4", rules=rules)
    computed, expected = trained(ADAMW, layout, spec), trained(ADAMW, WHOLE, spec)
    assert_equal_to_round_off(computed, expected)


def test_rows_and_their_positions_are_split_over_the_context() -> None:
    shards = trained(ADAMW, LAYOUTS["context_parallel"]).shards
    assert shards["params/embed_VD"] == ((64, 16), (32, 4))
    assert shards["params/decoder/layers_N/mlp/wi_DF"] == ((3, 16, 40), (3, 2, 40))
    assert shards["params/positions_LD"] == ((24, 16), (12, 4))


def in_a_circular_pipeline(*, encodes: bool) -> Transformer:
    """A model with two groups of layers, each a repeat of the pattern, in each of two stages."""
    tiny = MODELS["tiny_moe"]
    [moe] = tiny.moes
    experts = Block(feed_forward=moe)
    if not encodes:
        return dataclasses.replace(tiny, pattern=(experts,), layers=4, scan=True)
    return dataclasses.replace(
        tiny, pattern=(experts,), layers=4, encoder_layers=4, source_vocab=72, scan=True,
        positions=Relative(shared=True), tied=False, remat="full",
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("encodes", [True, False])
def test_microbatches_in_a_circular_pipeline_are_equal_too(encodes: bool) -> None:
    """Each with its random bits, in each layer, its loads of experts, and its source.

    Weights and opt_state are stored in the same order as without, so checkpoints are as well.
    """
    spec = in_a_circular_pipeline(encodes=encodes)
    layout = Layout(
        mesh="data:2,pipe:2", rules="batch:data;experts:data;layers:pipe;vocab:pipe",
        pipeline_repeats=2,
    )  # fmt: skip
    computed, expected = trained(ADAMW, layout, spec, 4), trained(ADAMW, WHOLE, spec, 4)
    stacked = {path: s for path, s in computed.shards.items() if re.match("params.*layers_N", path)}
    assert all(shard[0] == 2 and shape[0] == 4 for shape, shard in stacked.values())
    assert len({path.split("/")[1] for path in stacked}) == 1 + encodes
    experts = [shard[1] for path, (_, shard) in stacked.items() if path.endswith("wi_EDF")]
    assert experts == [8] * (1 + encodes)
    assert_equal_to_round_off(computed, expected)
