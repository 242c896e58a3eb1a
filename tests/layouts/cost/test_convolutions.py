"""FLOPs of convolutions, in a trace and in a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from layouts.cost.dataflow import total_flops, valid_pairs
from layouts.hlo.program import CompiledText


def test_padding_of_a_window_multiplies_nothing() -> None:
    """Of a window of 3 over 5 places with one of padding on each side."""
    pairs = valid_pairs(5, 3, 5, stride=1, dilate=1, spread=1, low=1)
    assert pairs == 5 * 3 - 2


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
def test_a_gradient_multiplies_twice_as_much_as_the_value(stride: int, dilation: int) -> None:
    """Whatever holes its convolutions have, in the trace and in the compiled program alike."""
    x, w = jnp.ones((2, 9, 7, 3)), jnp.ones((3, 2, 3, 4))

    def value(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, 1), "SAME", rhs_dilation=(1, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def gradients(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(value, x, w)
        return pull(y)

    of_value = total_flops(jax.make_jaxpr(value)(x, w).jaxpr)
    traced = jax.jit(gradients).trace(x, w)
    compiled = CompiledText.read(traced.lower().compile().as_text() or "")
    assert total_flops(traced.jaxpr.jaxpr) == compiled.flops == 3 * of_value
