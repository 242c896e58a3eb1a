"""Counts the FLOPs of the matrix products of a compiled program."""

import math
import re
from collections.abc import Mapping

from layouts.cost.convolutions import valid_pairs
from layouts.hlo.parser import Computation, Instruction, dims, sizes_of


def product_flops(instruction: Instruction, computation: Computation) -> int:
    """Counts the FLOPs of a matrix product, which TPUs write as a convolution; else 0."""
    if instruction.opcode == "dot":
        left = sizes_of(instruction.operands[0], computation)
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        inner = math.prod(left[i] for i in dims(summed[1])) if summed else 1
        return 2 * inner * math.prod(sizes_of(instruction.name, computation))
    if instruction.opcode == "convolution":
        return convolution_flops(instruction, computation)
    return 0


def convolution_flops(instruction: Instruction, computation: Computation) -> int:
    """Counts twice the multiplications that are not with padding or holes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    assert labels is not None, instruction.rest
    names = (*instruction.operands, instruction.name)
    left, kernel, out = (
        dict(zip(axes, sizes_of(name, computation), strict=True))
        for axes, name in zip(labels.groups(), names, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", instruction.rest)
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
    """Reads a setting of the window along one axis; of a pad, the lower side."""
    if name not in settings:
        return default
    return int(settings[name].split("x")[i].split("_")[0])
