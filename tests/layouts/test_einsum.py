"""Products are equal with and without merged axes; the mesh's devices decide which is traced."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from layouts import einsum
from layouts.absent_devices import has_compiler, topology_mesh
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh, uncached, use_mesh

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


def test_sums_of_bfloat16_products_stay_in_float32_on_cpus() -> None:
    """XLA computes them by the processor's instructions where their result is float32."""
    equation = "BLD,DJQK->BLJQK"
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in operands(equation)]
    mesh, place = make_mesh(LAYOUT), jax.P(*[None] * 5)
    product = functools.partial(einsum.merged_einsum, equation, place=place, dtype=None)
    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(lambda *arrays: product(arrays))(*arrays))
        rounded = jax.jit(lambda *arrays: product(arrays))(*arrays)
    assert "preferred_element_type=float32" in text
    exact = np.einsum(equation, *(np.asarray(array, np.float64) for array in arrays))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(np.float32), exact, rtol=2**-8)


@pytest.mark.parametrize(
    ("equation", "sizes", "dtype", "rows"),
    [
        ("BLD,DF->BLF", {"B": 1, "L": 1}, jnp.bfloat16, 2),
        ("BLD,DF->BLF", {"B": 1, "L": 1}, jnp.float32, 1),
        ("BLD,DF->BLF", {"B": 1, "L": 3}, jnp.bfloat16, 3),
        ("BJQLK,BJMK->BJQLM", {"B": 4, "L": 1, "Q": 1}, jnp.bfloat16, 2),
        ("BLD,BLF->DF", {"B": 1, "L": 1}, jnp.bfloat16, 10),
    ],
)
def test_the_only_row_of_a_bfloat16_product_is_multiplied_twice_on_cpus(
    equation: str, sizes: dict[str, int], dtype: jnp.dtype, rows: int
) -> None:
    """XLA multiplies two rows by native instructions, and converts the matrix for one row."""
    terms = equation.split("->")[0].split(",")
    rng, sizes = np.random.default_rng(0), SIZES | sizes
    arrays = [jnp.asarray(rng.normal(size=[sizes[x] for x in axes]), dtype) for axes in terms]
    layout = Layout(mesh="data:1,model:4", rules="batch:data;d_ff:model")
    with jax.set_mesh(make_mesh(layout)):
        placed = [layout.reshard(*each) for each in zip(arrays, terms, strict=True)]
        product = functools.partial(layout.einsum, equation)
        jaxpr, result = jax.make_jaxpr(product)(*placed), jax.jit(product)(*placed)
    [eqn] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    ((contracted, _), (batch, _)) = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    free = (size for i, size in enumerate(shape) if i not in (*contracted, *batch))
    assert math.prod(free) == rows
    exact = np.einsum(equation, *(np.asarray(array, np.float64) for array in arrays))
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("equation", ["LBD,DF->BLF", "BLD,DF->FLB", "BDL,DBF->BLF"])
@pytest.mark.parametrize("rows", [1, 2])
def test_bfloat16_products_may_give_their_axes_in_any_order(equation: str, rows: int) -> None:
    """XLA fails at run time where it transposes what it has summed in float32."""
    *terms, _ = equation.replace("->", ",").split(",")
    sizes = {"B": rows, "L": rows, "D": 16, "F": 32}
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=[sizes[x] for x in axes]), "bfloat16") for axes in terms]
    layout = Layout(mesh="data:1", rules="")
    with jax.set_mesh(make_mesh(layout)):
        result = jax.jit(functools.partial(layout.einsum, equation))(*arrays)
    exact = np.einsum(equation, *(np.asarray(array, np.float64) for array in arrays))
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    ("split", "groups"), [("BJ", ["BL", "D", "JQK"]), ("LQ", ["B", "L", "D", "J", "QK"])]
)
def test_adjacent_axes_are_merged_unless_they_are_split(split: str, groups: list[str]) -> None:
    assert einsum.adjacent_letters(["BLD", "DJQK", "BLJQK"], {*split}) == groups


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


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize("gathers_first", [False, True])
def test_on_tpus_the_gradient_of_a_stored_weight_is_not_added_up_whole(gathers_first: bool) -> None:
    """The product gathers the weight, so its gradient knows the stored placement."""
    layout = Layout(mesh="data:16", rules="batch:data", param_rules="d_model:data")

    def objective(w_DF: jax.Array, x_BLD: jax.Array) -> jax.Array:
        w_DF = w_DF.astype(jnp.bfloat16)
        if gathers_first:
            w_DF = layout.reshard(w_DF, "DF")
        y_BLF = layout.einsum("BLD,DF->BLF", x_BLD, w_DF)
        return jnp.sum(jnp.square(y_BLF.astype(jnp.float32)))

    mesh = topology_mesh("v5e:4x4", {"data": 16})
    with jax.set_mesh(mesh), uncached():
        w_DF, x_BLD = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, place))
            for shape, dtype, place in (
                ((2048, 4096), jnp.float32, layout.place("DF", stored=True)),
                ((32, 2048, 2048), jnp.bfloat16, layout.place("BLD")),
            )
        )
        program = jax.jit(jax.grad(objective)).lower(w_DF, x_BLD).compile()
    read = CompiledText.read(program.as_text()).collectives({"data": 16})
    assert any(c.kind == "all-reduce" for c in read) is gathers_first
    assert read
