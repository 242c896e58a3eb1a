"""What runs on each device gathers weights, and scatters their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from layouts.hlo.program import CompiledProgram
from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.shards import gather_shard

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
    read = CompiledProgram.read(program.as_text()).collectives(dict(mesh.shape))
    assert {c.kind for c in read if c.bytes > 4} == {"reduce-scatter", "all-gather"}
