"""Products are equal with and without merged axes; the mesh's devices decide which is traced."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from layouts import einsum
from layouts.layout import Layout
from layouts.mesh import make_mesh, use_mesh

SIZES = {"B": 4, "L": 6, "D": 10, "J": 2, "Q": 8, "K": 3, "M": 12, "V": 16, "E": 14, "F": 20}
LAYOUT = Layout(mesh="x:2,y:2", rules="batch:x;queries:y;memory:y;d_ff:x?;length:y?")
EQUATIONS = (
    "BLD,DJQK->BLJQK",
    "BJQLK,BJMK->BJQLM",
    "BLJQK,JQKD->BLD",
    "BLD,BLF->DF",
    "DBL,BLV->DV",
)


def operands(equation: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=[SIZES[letter] for letter in axes]).astype(np.float32)
        for axes in equation.split("->")[0].split(",")
    ]


@pytest.mark.parametrize("way", [einsum.merged_einsum, einsum.plain_einsum])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_equal_numpys_and_are_placed(equation: str, way: Callable[..., jax.Array]) -> None:
    terms, out_axes = equation.split("->")
    mesh, place = make_mesh(LAYOUT), LAYOUT.place(out_axes)
    arrays = [
        jax.device_put(array, NamedSharding(mesh, LAYOUT.place(axes)))
        for array, axes in zip(operands(equation), terms.split(","), strict=True)
    ]
    with jax.set_mesh(mesh):
        product = jax.jit(lambda *arrays: way(equation, arrays, place, None))(*arrays)
    assert product.sharding.spec == place
    expected = np.einsum(equation, *operands(equation))
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "axes"), [("cpu", 2), ("tpu", 3), (None, 3)])
def test_axes_are_merged_for_cpus_alone(platform: str | None, axes: int) -> None:
    """Whatever devices this machine has: plans are compiled for those of the mesh."""
    device = platform and AbstractDevice("any", None, platform)
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,), abstract_device=device)

    with use_mesh(mesh):
        trace = jax.make_jaxpr(functools.partial(Layout().einsum, "BLD,DF->BLF"))
        jaxpr = trace(np.zeros((4, 6, 10), np.float32), np.zeros((10, 14), np.float32))
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [len(eqn.outvars[0].aval.shape) for eqn in products] == [axes]
