"""What runs on each device gathers weights, scatters their gradients, and sends shards on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.shards import gather_shard, is_gatherable, ppermute

LAYOUT = Layout(mesh="x:2,y:2", rules="batch:x;batch:y", param_rules="d_model:x;d_model:y")


def test_the_gradient_of_a_weight_that_is_gathered_on_devices_is_scattered() -> None:
    rng = np.random.default_rng(0)
    x_BD, w_DF, dy_BF = (rng.normal(size=size) for size in ((12, 8), (8, 6), (12, 6)))
    before, after = LAYOUT.place("DF", stored=True), LAYOUT.place("(B)dF")

    def run(x_Bd: jax.Array, shard_DF: jax.Array) -> jax.Array:
        return x_Bd @ gather_shard(shard_DF, before, after, ("x", "y"))

    def objective(w_DF: jax.Array, x_BD: jax.Array, dy_BF: jax.Array) -> jax.Array:
        y_BF = LAYOUT.shard_map(run, "Bd,*->BF")(x_BD, LAYOUT.reshard(w_DF, "DF", stored=True))
        return jnp.sum(y_BF * LAYOUT.reshard(dy_BF, "BF"))

    mesh = make_mesh(LAYOUT)
    with jax.set_mesh(mesh):
        arrays = (jnp.asarray(array, jnp.float32) for array in (w_DF, x_BD, dy_BF))
        program = jax.jit(jax.grad(objective)).lower(*arrays).compile()
        dw_DF = program(*(jnp.asarray(array, jnp.float32) for array in (w_DF, x_BD, dy_BF)))
    np.testing.assert_allclose(dw_DF, x_BD.T @ dy_BF, rtol=0, atol=1e-5)
    read = CompiledText.read(program.as_text()).collectives(dict(mesh.shape))
    assert {c.kind for c in read if c.bytes > 4} == {"reduce-scatter", "all-gather"}


def test_shards_are_sent_by_their_index_whatever_the_order_of_the_mesh_axes() -> None:
    """All over one axis, two and three of the mesh; the first shard receives from none."""
    onward = {2: [(0, 1)], 4: [(i, i + 1) for i in range(3)], 8: [(i, i + 1) for i in range(7)]}
    orders = [axes for n in (1, 2, 3) for axes in itertools.permutations("xyz", n)]
    with jax.set_mesh(make_mesh(Layout(mesh="x:2,y:2,z:2"))):

        @jax.jit
        def sent() -> list[jax.Array]:
            return [
                jax.shard_map(
                    lambda x, axes=axes: ppermute(x, axes, onward[2 ** len(axes)]),
                    in_specs=jax.P(axes),
                    out_specs=jax.P(axes),
                )(jax.sharding.reshard(jnp.arange(2 ** len(axes)), jax.P(axes)))
                for axes in orders
            ]

        for axes, received in zip(orders, sent(), strict=True):
            assert received.tolist() == [0, *range(2 ** len(axes) - 1)], axes


def test_gathers_alone_lead_from_split_to_whole() -> None:
    whole, split, moved = jax.P(None, None), jax.P("x", None), jax.P(None, "x")
    gatherable = [is_gatherable(split, after, ("x",)) for after in (whole, split, moved)]
    assert gatherable == [True, True, False]
