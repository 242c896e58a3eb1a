"""What a layer of experts sends between devices, counted in the compiled program."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from configs.load import load
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.feed_forward.moe.layer import Dispatch, Moe, MoeLayer
from models.initializers import Weights
from tests.toys import ROOT, toy

ROWS, LENGTH, EXPERTS, WIDTH = 8, 24, 16, 10
# The router's weights are small and split with the experts: each device gathers them.
ROUTER = {"all-gather": 1}


def collectives(layout: Layout, dispatch: Dispatch, *, trains: bool) -> tuple[Counter[str], int]:
    """How many of each kind one layer needs, and the floats of all-to-alls on one device."""
    moe = Moe(experts=EXPERTS, dispatch=dispatch)
    spec = toy(feed_forward=moe)
    mesh = make_mesh(layout)

    def made() -> MoeLayer:
        rngs = nnx.Rngs(params=jax.random.key(0))
        return MoeLayer(moe, spec, layout, Weights(layout, spec.sizes, rngs, "float32"))

    with jax.set_mesh(mesh):
        graph, params = nnx.split(jax.eval_shape(made))
        params = jax.jit(lambda: nnx.split(made())[1])()
        x_BLD, segments_BL = (
            jax.device_put(array, NamedSharding(mesh, layout.place(axes)))
            for array, axes in (
                (jnp.ones((ROWS, LENGTH, WIDTH)), "BLD"),
                (jnp.ones((ROWS, LENGTH), jnp.int32), "BL"),
            )
        )

        def forward(params: nnx.State, x_BLD: jax.Array) -> jax.Array:
            return nnx.merge(graph, params)(x_BLD, segments_BL)[0]

        def gradient(params: nnx.State, x_BLD: jax.Array) -> object:
            def squared(params: nnx.State, x_BLD: jax.Array) -> jax.Array:
                return jnp.sum(jnp.square(forward(params, x_BLD)))

            return jax.grad(squared, argnums=(0, 1))(params, x_BLD)

        program = jax.jit(gradient if trains else forward).lower(params, x_BLD).compile()
    computed = CompiledText.read(program.as_text()).collectives(mesh.shape)
    counts = Counter(collective.kind for collective in computed for _ in range(collective.times))
    sent_bytes = sum(
        collective.bytes * collective.times
        for collective in computed
        if collective.kind == "all-to-all"
    )
    return counts, sent_bytes // 4


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("expert_parallel", {}),
        ("expert_mesh_axis", {}),
        ("expert_and_model_parallel", {"all-reduce": 1}),  # of the experts' output over d_ff
    ],
)
def test_tokens_go_to_their_experts_and_back_and_nothing_else(
    name: str, more: dict[str, int], dispatch: Dispatch
) -> None:
    """Section 3.1 of GShard: one all-to-all there and one back, of all places of all experts."""
    layout = load([str(ROOT / f"layouts/{name}.gin")]).make(Layout)
    counts, sent = collectives(layout, dispatch, trains=False)
    assert counts == {"all-to-all": 2, **ROUTER, **more}
    capacity = Moe(experts=EXPERTS).router.capacity(LENGTH, EXPERTS, training=False)
    devices = math.prod(n for axis, n in make_mesh(layout).shape.items() if axis != "model")
    assert sent == 2 * EXPERTS * ROWS * capacity * WIDTH // devices


def test_gradients_take_the_same_way_back() -> None:
    """And the gradient of the router's weights, which all tokens share, is added up."""
    layout = load([str(ROOT / "layouts/expert_parallel.gin")]).make(Layout)
    counts, _ = collectives(layout, "gather", trains=True)
    assert counts == {"all-to-all": 4, "all-reduce": 1, **ROUTER}
