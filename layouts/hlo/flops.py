"""FLOPs of the matrix products of a compiled program."""

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from layouts.hlo.parser import Computation, Instruction, dims, sizes_of


def product_flops(own: Instruction, inside: Computation) -> int:
    """FLOPs of a matrix product, which TPUs write as a convolution; 0 of anything else."""
    if own.opcode == "dot":
        left = sizes_of(own.operands[0], inside)
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", own.rest)
        inner = math.prod(left[i] for i in dims(summed[1])) if summed else 1
        return 2 * inner * math.prod(sizes_of(own.name, inside))
    if own.opcode == "convolution":
        return convolution_flops(own, inside)
    return 0


def convolution_flops(own: Instruction, inside: Computation) -> int:
    """Twice the multiplications that are not with padding or holes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", own.rest)
    assert labels is not None, own.rest
    parts = (*own.operands, own.name)
    left, kernel, out = (
        dict(zip(axes, sizes_of(name, inside), strict=True))
        for axes, name in zip(labels.groups(), parts, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", own.rest)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", own.rest)
    spatial = [axis for axis in labels[3] if axis.isdigit()]
    pairs = 1
    for i, axis in enumerate(sorted(spatial)):
        pairs *= valid_pairs(
            left[axis], kernel[axis], out[axis],
            stride=nth(settings, "stride", i), dilate=nth(settings, "lhs_dilate", i),
            spread=nth(settings, "rhs_dilate", i), low=nth(settings, "pad", i, 0),
        )  # fmt: skip
    batch = left["b"] // (int(groups[1]) if groups else 1)
    return 2 * batch * out["f"] * kernel["i"] * pairs


def nth(settings: Mapping[str, str], name: str, i: int, default: int = 1) -> int:
    """A setting of the window along one axis; of a pad, the lower side."""
    if name not in settings:
        return default
    return int(settings[name].split("x")[i].split("_")[0])


@functools.cache
def valid_pairs(
    size: int, kernel: int, out: int, *, stride: int, dilate: int, spread: int, low: int
) -> int:
    """Pairs of an output and a kernel place along one axis that meet an input."""
    place = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - low
    inside = (place >= 0) & (place <= (size - 1) * dilate) & (place % dilate == 0)
    return int(np.sum(inside))
