"""One update: what it minimises, what it needs, and what becomes of the old state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Params
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2
from models.loss import Criterion, LossSums
from models.positions.rotary import Rotary
from tests.conftest import Refusing
from tests.toys import FLOAT64, ROUND_OFF, pair_rows, toy
from tests.trainer.bigram import Bigram, logits, text_rows, weights
from trainer.feed import BatchSharding
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant
from trainer.step import (
    State,
    TrainStepSpec,
    abstract_state,
    add_microbatches,
    init_state,
    train_step,
)

ROWS = 24
WHOLE = Layout(mesh="data:1")
SPLIT = Layout(mesh="data:4,model:2", rules="batch:data;vocab:model", param_rules="d_model:data")
CRITERION = Criterion(label_smoothing=0.1, z_loss=0.01)
ADAMW = AdamW(schedule=Constant(peak=0.01))
pytestmark = pytest.mark.usefixtures("float64")


def program(layout: Layout = WHOLE, microbatches: int = 1, **changes: Any) -> TrainStepSpec:
    made = TrainStepSpec(Bigram(layout), ADAMW, CRITERION, 10, 3, microbatches)
    return dataclasses.replace(made, **changes)


def numpy_batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    return text_rows(rows).batch(np.arange(rows))


def placed(layout: Layout, microbatches: int, rows: int = ROWS) -> dict[str, jax.Array]:
    sharding = BatchSharding(layout, make_mesh(layout), rows, microbatches)
    return sharding.to_global_arrays(numpy_batch(rows))


def state_of(program: TrainStepSpec) -> State:
    """A state with the weights of `bigram.weights`."""
    abstract = abstract_state(program, make_mesh(program.model.layout))
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)
    params = {
        name: jax.device_put(weight.astype(np.float64), abstract["params"][name].sharding)
        for name, weight in weights().items()
    }
    return {**zeros, "params": params}


def step(program: TrainStepSpec) -> tuple[State, dict[str, float]]:
    layout = program.model.layout
    with jax.set_mesh(make_mesh(layout)):
        state, metrics = train_step(
            program, state_of(program), placed(layout, program.microbatches)
        )
    return state, {name: float(x) for name, x in metrics.items()}


def objective(params: dict[str, np.ndarray]) -> tuple[float, float, int]:
    """Szegedy et al. 2016, section 7, and Mesh-TensorFlow's z-loss: summed, with the plain loss."""
    batch = numpy_batch()
    logits_BLV = logits(params, batch)
    log_z_BL = np.log(np.exp(logits_BLV).sum(-1))
    target_BLV = np.eye(logits_BLV.shape[-1])[batch["targets_BL"]]
    smooth_BLV = 0.9 * target_BLV + 0.1 / logits_BLV.shape[-1]
    plain_BL, smooth_BL = (log_z_BL - (t * logits_BLV).sum(-1) for t in (target_BLV, smooth_BLV))
    counted_BL = batch["segments_BL"] > 0
    total_BL = smooth_BL + 0.01 * log_z_BL**2
    return total_BL[counted_BL].sum(), plain_BL[counted_BL].sum(), counted_BL.sum()


def test_the_objective_is_smoothed_cross_entropy_and_z_loss() -> None:
    _, metrics = step(program())
    total, plain, tokens = objective(weights())
    assert metrics["tokens"] == tokens
    np.testing.assert_allclose(metrics["objective"], total / tokens, rtol=ROUND_OFF)
    np.testing.assert_allclose(metrics["loss"], plain / tokens, rtol=ROUND_OFF)
    assert metrics["objective"] > metrics["loss"] + 0.01
    assert metrics["learning_rate"] == 0.01


def test_the_gradient_is_that_of_the_mean_objective() -> None:
    """Against numpy's difference quotients, in double precision."""
    train_spec = program()
    with jax.set_mesh(make_mesh(WHOLE)):
        batch = placed(WHOLE, 1)
        gradient = jax.jit(lambda params, key: add_microbatches(train_spec, params, batch, key)[0])
        gradients = jax.device_get(gradient(state_of(train_spec)["params"], jax.random.key(0)))
    for name, at in (("embed_VD", (5, 3)), ("softmax_VD", (9, 0)), ("softmax_VD", (63, 15))):
        wide = {key: weight.astype(np.float64) for key, weight in weights().items()}
        values = []
        for change in (1e-4, -1e-4):
            moved = {**wide, name: wide[name].copy()}
            moved[name][at] += change
            values.append(objective(moved)[0])
        np.testing.assert_allclose(gradients[name][at], (values[0] - values[1]) / 2e-4, rtol=1e-6)
    tokens = objective(weights())[2]
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())) / tokens
    metrics = step(train_spec)[1]
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=ROUND_OFF)
    for name, part in (("embed_VD", "embed"), ("softmax_VD", "softmax")):
        norm = np.linalg.norm(gradients[name].astype(np.float64)) / tokens
        np.testing.assert_allclose(metrics[f"grad_norm/{part}"], norm, rtol=ROUND_OFF)


@pytest.mark.parametrize(("layout", "microbatches"), [(WHOLE, 3), (SPLIT, 1), (SPLIT, 2)], ids=str)
def test_microbatches_are_one_batch(layout: Layout, microbatches: int) -> None:
    """Rows hold unlike counts of tokens, so a mean of the microbatches' means would be wrong."""
    expected_state, expected = step(program())
    state, metrics = step(program(layout, microbatches))
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=ROUND_OFF, err_msg=name)
    for name, weight in expected_state["params"].items():
        np.testing.assert_allclose(state["params"][name], weight, rtol=0, atol=ROUND_OFF)
    assert int(state["step"]) == 1


def test_microbatches_hold_unlike_counts_of_tokens() -> None:
    counted_BL = numpy_batch()["segments_BL"] > 0
    assert len({counted_BL[slot::3].sum() for slot in range(3)}) > 1


class Indexing(Bigram):
    """A model whose layer indexes a weight, for which JAX has no rule on reduced arrays."""

    def loss(self, params: Params, *arguments: Any) -> LossSums:
        params = {**params, "embed_VD": jnp.stack([params["embed_VD"]] * 2)[1]}
        return super().loss(params, *arguments)


def test_gradients_cross_devices_in_each_microbatch_where_jax_cannot_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Refusing, "emit", lambda self, log: messages.append(log.getMessage()))
    layout = Layout(mesh="data:4", rules="batch:data")
    state, _ = step(program(layout, 2, model=Indexing(layout)))
    expected, _ = step(program())
    assert messages and messages[0].startswith("Gradients cross devices once a microbatch: ")
    for name, weight in expected["params"].items():
        np.testing.assert_allclose(state["params"][name], weight, rtol=0, atol=ROUND_OFF)


def test_the_old_state_is_donated() -> None:
    train_spec = program(SPLIT)
    with jax.set_mesh(make_mesh(SPLIT)):
        old = state_of(train_spec)
        new, _ = train_step(train_spec, old, placed(SPLIT, 1))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
        program_size = train_step._cache_size()
        newer, _ = train_step(train_spec, new, placed(SPLIT, 1))
    assert train_step._cache_size() == program_size
    assert jax.tree.map(lambda x: x.sharding, newer) == jax.tree.map(
        lambda x: x.sharding, abstract_state(train_spec, make_mesh(SPLIT))
    )


def temp_bytes(microbatches: int, rows: int) -> int:
    train_spec, mesh = program(microbatches=microbatches), make_mesh(WHOLE)
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in placed(WHOLE, microbatches, rows).items()
    }
    with jax.set_mesh(mesh):
        compiled = train_step.lower(train_spec, abstract_state(train_spec, mesh), batch).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def test_memory_does_not_grow_with_the_microbatches() -> None:
    two, eight = temp_bytes(2, 2 * ROWS), temp_bytes(8, 8 * ROWS)
    whole = temp_bytes(1, 8 * ROWS)
    logits_bytes = ROWS * 24 * 64 * 8
    assert eight < two + logits_bytes / 4
    assert whole > eight + 6 * logits_bytes  # the same batch at once


@pytest.mark.parametrize(
    "optimizer", [ADAMW, Adafactor(factored_from=4)], ids=["AdamW", "Adafactor"]
)
def test_a_new_state_is_the_same_under_every_layout_and_placed(optimizer: Any) -> None:
    computed = {}
    for layout in (WHOLE, SPLIT):
        train_spec, mesh = program(layout, optimizer=optimizer), make_mesh(layout)
        computed[layout] = init_state(train_spec, mesh)
        expected = abstract_state(train_spec, mesh)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), computed[layout]) == (
            jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), expected)
        )
    shards = [
        x.addressable_shards[0].data.shape for x in jax.tree.leaves(computed[SPLIT]["params"])
    ]
    assert shards == [(32, 4), (32, 4)]
    split = [x for x in jax.tree.leaves(computed[SPLIT]["opt_state"]) if not x.is_fully_replicated]
    assert len(split) == 4  # two moments, or rows and columns, of two weights
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, computed.values()))


def test_another_seed_gives_other_weights() -> None:
    mesh = make_mesh(WHOLE)
    one, other = (init_state(program(seed=seed), mesh)["params"]["embed_VD"] for seed in (3, 4))
    assert (np.asarray(one) != np.asarray(other)).mean() > 0.99


# Groups of two rows of sources and of four of targets, experts short of places.
ROUTER = Top2(random_second=False, capacity_factor=0.75, least_capacity=1, aux_loss=0.5, z_loss=0.1)
EXPERTS = toy(
    layers=1, encoder_layers=1, positions=Rotary(), precision=FLOAT64,
    feed_forward=Moe(experts=5, d_ff=6, router=ROUTER, group_tokens=12),
)  # fmt: skip


@functools.cache
def pairs_gradient(layout: Layout, microbatches: int) -> tuple[Any, LossSums]:
    """Returns gradients and sums of 24 pairs; the microbatches have unlike counts of tokens."""
    rng, is_short = np.random.default_rng(0), np.arange(24) % 5 == 0
    targets, sources = (
        np.where(is_short, 1, rng.integers(2, longest, 24))[:, None].tolist() for longest in (9, 6)
    )
    batch = pair_rows(targets, sources, length=9, vocab=22, source_length=6)
    experts = program(layout, microbatches, model=EXPERTS.model(layout))
    mesh, key = make_mesh(layout), jax.random.key(0)
    sharding = BatchSharding(layout, mesh, 24, microbatches, rows_together=4)
    with jax.set_mesh(mesh):
        params = jax.jit(experts.model.init)(jax.random.key(1))
        gradient = jax.jit(lambda params, batch: add_microbatches(experts, params, batch, key))
        return jax.device_get(gradient(params, sharding.to_global_arrays(batch)))


def test_microbatches_change_no_group_of_tokens_and_no_auxiliary_loss() -> None:
    """Experts on both sides of a translation, whose routers' losses are means of unlike tokens."""
    expected, expected_sums = pairs_gradient(WHOLE, 1)
    gradients, sums = pairs_gradient(Layout(mesh="data:2"), 3)
    for loads in sums.loads.values():
        load = loads["layers_N"]
        assert load.kept_i.sum() < load.chosen_i.sum()
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=ROUND_OFF)
    for gradient, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        limit = ROUND_OFF * np.abs(other).max()
        np.testing.assert_allclose(gradient, other, rtol=0, atol=limit)
