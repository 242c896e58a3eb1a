"""Stages run the layers of a stack in order, on each microbatch, and add up what layers report."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.layers import pipeline
from models.layers.pipeline import (
    Schedule,
    exchange_of,
    in_stages,
    inside_stages,
    stage_axes,
    with_nested_maps,
)
from tests.toys import WHOLE
from trainer.planning.child import CompilerAborted, in_child

Array = jax.Array
WEIGHTS_ND = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
X_ABLD = np.random.default_rng(1).normal(size=(6, 2, 3, 5)).astype(np.float32)


def layers(weights_ND: Array, x_BLD: Array, other: tuple[Array, Array], first: Array | int = 0):
    """Layers whose result depends on their number, the key of the microbatch and the order."""
    shared_D, key = other

    def layer(x_BLD: Array, numbered: tuple[Array, Array]):
        weight_D, number = numbered
        noise = jax.random.uniform(jax.random.fold_in(key, number), (), x_BLD.dtype)
        x_BLD = jnp.sin(x_BLD * weight_D[None, None] + shared_D[None, None]) + noise
        return x_BLD, jnp.sum(x_BLD, dtype=jnp.float32)

    return jax.lax.scan(layer, x_BLD, (weights_ND, first + jnp.arange(len(weights_ND))))


def objective(layout: Layout, weights_ND: Array, shared_D: Array, x_ABLD: Array):
    weights_ND, run = layout.reshard(weights_ND, "ND"), in_stages(layout, layers, jax.checkpoint)
    y_ABLD, sums_AN = jax.vmap(lambda x_BLD, key: run(weights_ND, x_BLD, (shared_D, key)))(
        x_ABLD, jax.random.split(jax.random.key(2), 6)[: len(x_ABLD)]
    )
    return jnp.sum(y_ABLD**2, dtype=jnp.float32) + jnp.sum(sums_AN * jnp.arange(8.0)[None]), (
        y_ABLD,
        sums_AN,
    )


@functools.cache
def computed(layout: Layout, microbatches: int, dtype: DTypeLike = jnp.float32):
    """Gradients and results, the text of the trace, and that of the compiled program."""
    with jax.set_mesh(make_mesh(layout)):
        weights_ND, x_ABLD = (jnp.asarray(x, dtype) for x in (WEIGHTS_ND, X_ABLD[:microbatches]))
        arguments = weights_ND, weights_ND[0], layout.reshard(x_ABLD, "aBLD")
        gradient = jax.grad(lambda *args: objective(layout, *args), (0, 1, 2), has_aux=True)
        traced = jax.jit(gradient).trace(*arguments)
        program = traced.lower().compile()
        return jax.device_get(program(*arguments)), str(traced.jaxpr), program.as_text()


@pytest.mark.parametrize(
    ("mesh", "rules", "repeats", "microbatches"),
    [
        ("pipe:4", "layers:pipe", 1, 6),
        ("data:2,a:2,b:2", "batch:data;layers:a;layers:b", 1, 6),
        ("data:2,pipe:2", "batch:pipe;layers:pipe;d_model:pipe?", 1, 6),
        ("data:2,a:2,b:2", "batch:data;layers:b;layers:a", 2, 6),
        ("data:2,pipe:2", "batch:pipe;layers:pipe;d_model:pipe?", 4, 6),
        ("pipe:4", "layers:pipe", 2, 3),
    ],
)
def test_stages_do_what_a_loop_does(mesh: str, rules: str, repeats: int, microbatches: int) -> None:
    layout = Layout(mesh=mesh, rules=rules, pipeline_repeats=repeats)
    staged, trace, text = computed(layout, microbatches)
    looped, *_ = computed(WHOLE, microbatches)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), staged, looped
    )
    # Of hidden states, and of each group of layers, which are stored in order; forward, backward.
    assert text.count(" collective-permute(") == 2 * (1 + repeats * (repeats > 1))
    assert "all-to-all" not in text
    stages = {"pipe:4": 4, "data:2,a:2,b:2": 4}.get(mesh, 2)
    ticks = Schedule(stages, microbatches, repeats).ticks
    if repeats > 1:  # no weights, which broadcast before a product, are saved at each tick
        assert f"[{ticks},{8 // stages // repeats},1,1,5]" not in trace


def test_stages_compute_in_bfloat16() -> None:
    """XLA's CPU backend aborts where gradients of what stages share are summed among them."""
    layout = Layout(mesh="data:2,pipe:2", rules="batch:data;layers:pipe")
    staged, *_ = computed(layout, 6, jnp.bfloat16)
    looped, *_ = computed(Layout(mesh="data:2", rules="batch:data"), 6, jnp.bfloat16)
    for x, y in zip(jax.tree.leaves(staged), jax.tree.leaves(looped), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-6 * np.abs(y).max())


def compute_without_repeats() -> None:
    """Computes as above, but gives what stages share to them as it is."""
    jax.config.update("jax_num_cpu_devices", 4)  # in a child
    pipeline.is_repeated = lambda x: False
    computed(Layout(mesh="data:2,pipe:2", rules="batch:data;layers:pipe"), 6, jnp.bfloat16)


@pytest.mark.faults
def test_without_repeats_stages_abort_in_bfloat16() -> None:
    """Where this fails, `is_repeated` may go."""
    with pytest.raises(CompilerAborted):
        in_child(compute_without_repeats)


SIZES = list(itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3, 4, 5, 8)))


def test_every_stage_gets_each_microbatch_a_tick_later() -> None:
    """Once for each repeat, and the first stage when it is back from the last one."""
    for stages, repeats, microbatches in SIZES:
        schedule = Schedule(stages, microbatches, repeats)
        work = np.indices((repeats, microbatches))
        turns = schedule.turn(*work)
        assert len(np.unique(turns)) == turns.size
        assert turns.max() + stages == schedule.ticks
        np.testing.assert_array_equal(np.stack(schedule.work(turns)), work)
        assert (turns[1:] == turns[:-1] + stages).all()


def test_the_bubble_is_shorter_with_repeats() -> None:
    for stages, repeats, microbatches in SIZES:
        idle = Schedule(stages, microbatches, repeats).bubble
        assert idle <= Schedule(stages, microbatches).bubble + 1e-12
        if microbatches % stages == 0:
            assert idle == pytest.approx((stages - 1) / (repeats * microbatches + stages - 1))


def test_in_an_exchange_every_stage_sends_and_receives_one_group() -> None:
    for stages, repeats, _ in SIZES:
        groups = np.arange(stages * repeats)
        for exchange in range(repeats):
            sent = groups[exchange_of(groups, stages, repeats) == exchange]
            assert sorted(sent // repeats) == sorted(sent % stages) == list(range(stages))


def test_inside_stages_their_mesh_axes_split_nothing_else() -> None:
    layout = Layout(mesh="data:2,pipe:2", rules="batch:data;batch:pipe;layers:pipe;vocab:pipe")
    with jax.set_mesh(make_mesh(layout)):
        assert stage_axes(layout) == ("pipe",)
        assert inside_stages(layout).rules == "batch:data"
        gathered = Layout(mesh="data:2,pipe:2", rules="batch:pipe;layers:pipe?")
        assert stage_axes(gathered) == () and inside_stages(gathered) == gathered
    with jax.set_mesh(make_mesh(Layout(mesh="pipe:1"))):
        assert stage_axes(Layout(mesh="pipe:1", rules="layers:pipe")) == ()


def compile_two_stacks(maps: int, blocks: int) -> None:
    """Compiles stages of two stacks whose layers have so many nested maps."""
    jax.config.update("jax_num_cpu_devices", 4)  # in a child
    layout = Layout(mesh="data:2,pipe:2", rules="batch:data;layers:pipe")

    def layer(weights_ND: Array, x_BLD: Array, other: None, first: Array | int = 0):
        for _ in range(maps):
            x_BLD = inside_stages(layout).shard_map(jnp.sin, "BLD->BLD")(x_BLD)
        return x_BLD, jnp.zeros(len(weights_ND))

    def run(weights_ND: Array, x_ABLD: Array) -> Array:
        stages = in_stages(layout, layer, lambda run: run)
        if blocks:
            x_ABLD = with_nested_maps(layout, x_ABLD, blocks)
        for _ in range(2):
            x_ABLD, _ = jax.vmap(lambda x_BLD: stages(weights_ND, x_BLD, None))(x_ABLD)
        return x_ABLD

    with jax.set_mesh(make_mesh(layout)):
        place = layout.reshard(jnp.asarray(WEIGHTS_ND), "ND"), layout.reshard(X_ABLD, "aBLD")
        jax.jit(run).lower(*place).compile()


def test_any_number_of_nested_maps_compiles() -> None:
    """Without maps before the stages, XLA reads freed memory at some numbers (jax 0.10.2)."""
    in_child(compile_two_stacks, 44, blocks=2)
    if jax.__version_info__ < (0, 12):  # what it reads there varies, and so does how it fails
        with pytest.raises((RuntimeError, CompilerAborted), match=r"PartitionId|realloc\(\)"):
            in_child(compile_two_stacks, 44, blocks=0)
