"""Counts the FLOPs of convolutions."""

import functools
import math
from typing import Any

import numpy as np


def convolution_flops(eqn: Any) -> int:
    """Counts the FLOPs of a traced convolution, twice the multiplications not with padding."""
    settings = eqn.params
    left, kernel, out = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    of_left, of_kernel, of_out = settings["dimension_numbers"]
    pairs = math.prod(
        valid_pairs(
            left[of_left[axis]], kernel[of_kernel[axis]], out[of_out[axis]],
            stride=settings["window_strides"][axis - 2], dilate=settings["lhs_dilation"][axis - 2],
            spread=settings["rhs_dilation"][axis - 2], low=settings["padding"][axis - 2][0],
        )
        for axis in range(2, len(left))
    )  # fmt: skip
    batch = left[of_left[0]] // settings["batch_group_count"]
    return 2 * batch * out[of_out[1]] * kernel[of_kernel[1]] * pairs


@functools.cache
def valid_pairs(
    size: int, kernel: int, out: int, *, stride: int, dilate: int, spread: int, low: int
) -> int:
    """Counts pairs of an output and a kernel index along one axis that meet an input."""
    index = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - low
    inside = (index >= 0) & (index <= (size - 1) * dilate) & (index % dilate == 0)
    return int(np.sum(inside))
