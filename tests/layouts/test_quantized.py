"""Operands of 8 bits: rounded as in NumPy, with a scale for each row and column, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh, use_mesh
from layouts.quantized import Quantized, RoundedInProducts, Rounding, quantize

SIZES = {"B": 4, "L": 6, "D": 10, "J": 2, "Q": 8, "K": 3, "E": 14, "F": 20, "G": 12, "V": 16}
LAYOUTS = [
    Layout(mesh="x:1", rules=""),
    Layout(mesh="x:2,y:2", rules="batch:x;groups:x;queries:y;d_ff:y;vocab:y"),
    Layout(mesh="x:2,y:2", rules="batch:x;length:y?;d_model:x?", param_rules="d_model:y;d_ff:x"),
]
EQUATIONS = ("BLD,DJQK->BLJQK", "BLJQK,JQKD->BLD", "BLF,FD->BLD", "EGcD,EDF->EGcF")


def operands(equation: str) -> list[np.ndarray]:
    """Random arrays whose rows differ much in size; one row is all zeros."""
    rng = np.random.default_rng(0)
    x, weight = (
        rng.normal(size=[SIZES[letter.upper()] if letter != "c" else 5 for letter in axes])
        for axes in equation.split("->")[0].split(",")
    )
    x *= rng.lognormal(sigma=2, size=(*x.shape[:2], *[1] * (x.ndim - 2)))
    x[1, 1] = 0
    return [x.astype(np.float32), weight.astype(np.float32)]


def rounded(array: np.ndarray, summed: tuple[int, ...], rounding: Rounding) -> np.ndarray:
    """What an array is rounded to, written from the definition."""
    largest, dtype = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}[rounding]
    top = np.abs(array).max(axis=summed, keepdims=True)
    top = np.where(top > 0, top, 1)
    scaled = array * (largest / top)
    whole = np.rint(scaled) if rounding == "int8" else scaled
    return whole.astype(dtype).astype(np.float64) * (top / largest)


def expected_product(equation: str, rounding: Rounding) -> np.ndarray:
    terms, out = equation.split("->")
    arrays = [
        rounded(array, tuple(i for i, axis in enumerate(axes) if axis not in out), rounding)
        for axes, array in zip(terms.split(","), operands(equation), strict=True)
    ]
    return np.einsum(equation, *arrays)


@pytest.mark.parametrize("rounding", ["int8", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.rules)
def test_products_of_rounded_operands_equal_numpys(layout: Layout, rounding: Rounding) -> None:
    mesh = make_mesh(layout)
    for equation in EQUATIONS:
        terms = equation.split("->")[0].split(",")
        with jax.set_mesh(mesh):
            x, weight = (
                jax.device_put(array, NamedSharding(mesh, layout.place(axes, stored=bool(i))))
                for i, (axes, array) in enumerate(zip(terms, operands(equation), strict=True))
            )

            def product(x: jax.Array, weight: jax.Array, equation: str = equation) -> jax.Array:
                return layout.einsum(equation, x, RoundedInProducts(weight, rounding))

            y, vjp = jax.vjp(jax.jit(product), x, weight)
            gradients = vjp(y)
            plain = jax.vjp(functools.partial(layout.einsum, equation), x, weight)[1](y)
        np.testing.assert_allclose(y, expected_product(equation, rounding), rtol=1e-5, atol=1e-5)
        assert y.sharding.spec == layout.place(equation.split("->")[1])
        for gradient, other, operand in zip(gradients, plain, (x, weight), strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-4)
            assert gradient.sharding.spec == operand.sharding.spec


@pytest.mark.parametrize(("rounding", "dtype"), [("int8", np.int8), ("fp8", jnp.float8_e4m3fn)])
def test_accelerators_multiply_8_bits(rounding: Rounding, dtype: type) -> None:
    device = AbstractDevice("any", None, "tpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,), abstract_device=device)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return Layout().einsum("BLD,DF->BLF", x, RoundedInProducts(weight, rounding))

    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(product, x, weight)
        return y, *vjp(y)

    with use_mesh(mesh):
        arrays = np.zeros((4, 6, 10), jnp.bfloat16), np.zeros((10, 14), jnp.bfloat16)
        jaxpr = jax.make_jaxpr(step)(*arrays).jaxpr
    [inner] = [eqn.params["call_jaxpr"] for eqn in jaxpr.eqns if "call_jaxpr" in eqn.params]
    [forward], gradients = (
        [eqn for eqn in each.eqns if eqn.primitive.name == "dot_general"] for each in (inner, jaxpr)
    )
    assert [variable.aval.dtype for variable in forward.invars] == [dtype, dtype]
    assert forward.outvars[0].aval.dtype == (np.int32 if rounding == "int8" else np.float32)
    assert len(gradients) == 2 and jaxpr.outvars[0].aval.dtype == jnp.bfloat16
    assert {v.aval.dtype for eqn in gradients for v in eqn.invars} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("equation", "summed"),
    [("BLD,DJQK->BLJQK", "D"), ("BLF,FD->BLD", "F"), ("BLJK,DJK->BLJD", "D"), ("BLK,DK->BLD", "D"),
     ("BLD,DK->BLK", "F")],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.rules)
def test_a_scale_multiplies_the_result_or_the_other_operand(
    layout: Layout, equation: str, summed: str
) -> None:
    """Or, where neither has its axes, as of a scale for each summed row, the weight."""
    x, weight = operands(equation)
    axes = equation.split("->")[0].split(",")[1]
    numbers = tuple(i for i, axis in enumerate(axes) if axis in summed)
    with jax.set_mesh(make_mesh(layout)):
        stored = layout.reshard(weight, axes, stored=True)
        y = layout.einsum(
            equation, layout.reshard(x, equation.split(",")[0]), quantize(stored, numbers)
        )
    expected = np.einsum(equation, x, rounded(weight, numbers, "int8"))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_an_error_is_at_most_half_a_step() -> None:
    _, weight = operands("BLD,DF->BLF")
    of_channels = quantize(jnp.asarray(weight), [0])
    assert of_channels.values.dtype == np.int8 and of_channels.scale.shape == (1, 20)
    step = np.abs(weight).max(axis=0) / 127
    error = np.abs(of_channels.astype(np.float32) - weight)
    assert (error <= step / 2 * (1 + 1e-5)).all() and (error.max(axis=0) > step / 4).all()
    assert isinstance(of_channels[2:4], Quantized) and of_channels.shape == (10, 20)
