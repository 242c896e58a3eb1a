"""Stages run the layers of a stack in order, on each microbatch, and add up what layers report."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.layers.pipeline import in_stages, in_turn, inside_stages, stage_axes
from tests.toys import WHOLE

Array = jax.Array
WEIGHTS_ND = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
X_ABLD = np.random.default_rng(1).normal(size=(6, 2, 3, 5)).astype(np.float32)
KEYS = jax.random.split(jax.random.key(2), 6)


def layers(weights_ND: Array, x_BLD: Array, other: tuple[Array, Array], first: Array | int = 0):
    """Layers whose result depends on their number, the key of the microbatch and the order."""
    shared_D, key = other
    sums = []
    for i in range(len(weights_ND)):
        noise = jax.random.uniform(jax.random.fold_in(key, first + i), ())
        x_BLD = jnp.sin(x_BLD * weights_ND[i][None, None] + shared_D[None, None]) + noise
        sums.append(jnp.sum(x_BLD))
    return x_BLD, jnp.stack(sums)


def objective(layout: Layout, weights_ND: Array, shared_D: Array, x_ABLD: Array):
    weights_ND, run = layout.reshard(weights_ND, "ND"), in_stages(layout, layers)
    y_ABLD, sums_AN = jax.vmap(lambda x_BLD, key: run(weights_ND, x_BLD, (shared_D, key)))(
        x_ABLD, KEYS
    )
    return jnp.sum(y_ABLD**2) + jnp.sum(sums_AN * jnp.arange(4.0)[None]), (y_ABLD, sums_AN)


@functools.cache
def computed(layout: Layout):
    with jax.set_mesh(make_mesh(layout)):
        x_ABLD = layout.reshard(X_ABLD, "aBLD")
        gradient = jax.grad(lambda *args: objective(layout, *args), (0, 1, 2), has_aux=True)
        return jax.device_get(jax.jit(gradient)(WEIGHTS_ND, WEIGHTS_ND[0], x_ABLD))


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("pipe:4", "layers:pipe"),
        ("data:2,a:2,b:2", "batch:data;layers:a;layers:b"),
        ("data:2,pipe:2", "batch:pipe;layers:pipe;d_model:pipe?"),
    ],
)
def test_stages_do_what_a_loop_does(mesh: str, rules: str) -> None:
    staged, looped = computed(Layout(mesh=mesh, rules=rules)), computed(WHOLE)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), staged, looped
    )


def test_every_stage_gets_each_microbatch_a_tick_later() -> None:
    turns = [in_turn(jnp.arange(1, 5), stage, 3).tolist() for stage in range(3)]
    assert turns == [[1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 4, 0], [0, 0, 1, 2, 3, 4]]


def test_inside_stages_their_mesh_axes_split_nothing_else() -> None:
    layout = Layout(mesh="data:2,pipe:2", rules="batch:data;batch:pipe;layers:pipe;vocab:pipe")
    with jax.set_mesh(make_mesh(layout)):
        assert stage_axes(layout) == ("pipe",)
        assert inside_stages(layout).rules == "batch:data"
        gathered = Layout(mesh="data:2,pipe:2", rules="batch:pipe;layers:pipe?")
        assert stage_axes(gathered) == () and inside_stages(gathered) == gathered
    with jax.set_mesh(make_mesh(Layout(mesh="pipe:1"))):
        assert stage_axes(Layout(mesh="pipe:1", rules="layers:pipe")) == ()
