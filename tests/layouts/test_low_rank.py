"""Products with adapted weights are those with the sum, under a layout, whatever holds the base."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.low_rank import RANK, Adapted, factor_axes, merged
from layouts.mesh import make_mesh
from layouts.quantized import quantize
from tests.toys import WHOLE

SIZES = {"B": 4, "L": 6, "D": 8, "J": 2, "K": 5, "E": 3, "Z": 2}
SPLIT = Layout(mesh="data:2,model:2", rules="batch:data;kv_heads:model;adapter_rank:model")
CASES = [("BLD,DJK->BLJK", "ioo"), ("BLJK,JKD->BLD", "iio"), ("EBD,EDK->EBK", "sio")]


def arrays(*terms: str) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=[SIZES[x] for x in axes]), jnp.float32) for axes in terms]


@pytest.mark.parametrize(("equation", "kinds"), CASES)
@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["whole", "split"])
def test_a_product_is_that_of_the_sum(layout: Layout, equation: str, kinds: str) -> None:
    left, right, _ = equation.replace("->", ",").split(",")
    of_a, of_b = factor_axes(right, kinds)
    x, base, a, b = arrays(left, right, of_a, of_b)
    expected_sum = np.asarray(base) + 0.5 * np.einsum(f"{of_a},{of_b}->{right}", a, b)
    expected = np.einsum(equation, x, expected_sum)
    with jax.set_mesh(make_mesh(layout)):
        weight = layout.reshard(Adapted(base, a, b, 0.5, kinds), right, stored=True)
        computed = layout.einsum(equation, layout.reshard(x, left), weight)
        whole = merged(weight)
        assert whole.sharding == layout.reshard(base, right, stored=True).sharding
    np.testing.assert_allclose(computed, expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(whole, expected_sum, rtol=1e-6, atol=1e-6)


def test_a_base_in_8_bits_and_one_in_16() -> None:
    x, base, a, b = arrays("BLD", "DK", "DZ", "ZK")
    rounded = quantize(base, [0])
    with jax.set_mesh(make_mesh(WHOLE)):
        computed = WHOLE.einsum("BLD,DK->BLK", x, Adapted(rounded, a, b, 2.0, "io"))
        narrow = Adapted(base.astype("bfloat16"), a, b, 2.0, "io").astype("float32")
    total = np.asarray(rounded.astype(float)) + 2 * np.asarray(a) @ np.asarray(b)
    np.testing.assert_allclose(computed, np.asarray(x) @ total, rtol=1e-5, atol=1e-5)
    exact = np.asarray(base.astype("bfloat16").astype("float32")) + 2 * np.asarray(a) @ b
    np.testing.assert_allclose(narrow, exact, rtol=1e-6, atol=1e-6)


def test_letters() -> None:
    assert factor_axes("NDJQK", "iooo") == ("NDZ", "NZJQK")
    assert factor_axes("rJK", "ioo") == ("rZ", "ZJK")
    assert RANK.name == "adapter_rank"
    assert merged("no weight") == "no weight"
