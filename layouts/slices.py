"""Spreads mesh axes over slices: groups of devices that a slow network connects.

"data:2" with a mesh of "data:8,model:4" puts two slices side by side along data, each with four
times four devices: what is exchanged along model never leaves a slice.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import UserError, did_you_mean
from layouts.layout import pairs

EXAMPLE = "Legal: slices by mesh axis, as in 'data:2', or 'data:-1' for all."


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Groups devices by their slice; by their process, where all are on one and are no TPUs.

    JAX knows the slices of TPUs and of GPUs; several processes on one host try out the same.
    """

    def grouped(attribute: str) -> list[list[Any]]:
        groups: dict[int, list[Any]] = {}
        for device in devices:
            groups.setdefault(getattr(device, attribute, None) or 0, []).append(device)
        return [groups[index] for index in sorted(groups)]

    slices = grouped("slice_index")
    if len(slices) > 1 or devices[0].platform == "tpu":
        return slices
    return grouped("process_index")


def numbers_by_axis(text: str, head: str, example: str) -> dict[str, int]:
    """Parses a number for each mesh axis, one of them perhaps -1; `head` begins what is refused."""
    try:
        entries = [(name, int(number)) for name, number in pairs(text)]
    except ValueError:
        raise UserError(f"{head}.  {example}") from None
    numbers = dict(entries)
    if len(numbers) < len(entries):
        raise UserError(f"{head}: a mesh axis is named twice.  Name each once.")
    open_axes = sum(number == -1 for number in numbers.values())
    if open_axes > 1:
        raise UserError(f"{head}: only one number may be -1, found {open_axes}.")
    return numbers


def slice_counts(text: str, mesh: Mapping[str, int], count: int | None = None) -> dict[str, int]:
    """Parses the number of slices along each mesh axis; -1 is what the others leave of `count`.

    Without a count, the numbers are taken as they are.

    >>> slice_counts("data:-1", {"data": 8, "model": 4}, 2)
    {'data': 2, 'model': 1}
    """
    head = f"Layout.slices = {text!r}"
    given = numbers_by_axis(text, head, EXAMPLE)
    for name, size in given.items():
        if name not in mesh:
            near = did_you_mean(name, mesh)
            raise UserError(f"{head}: no such mesh axis: {name}.{near}  Legal: {', '.join(mesh)}.")
        if size < 1 and size != -1:
            raise UserError(f"{head}: {name}:{size} is not a number of slices.  {EXAMPLE}")
    open_axes = [name for name, size in given.items() if size == -1]
    fixed = math.prod(size for size in given.values() if size != -1)
    if open_axes:
        given[open_axes[0]] = max(1, (count or fixed) // fixed)
    if count is not None and math.prod(given.values()) != count:
        made = math.prod(given.values())
        raise UserError(f"{head}: {made} slices, and the devices are in {count}.  {EXAMPLE}")
    for name, size in given.items():
        if mesh[name] % size:
            raise UserError(f"{head}: {size} slices do not divide {name} = {mesh[name]}.")
    return {name: given.get(name, 1) for name in mesh}


def side_by_side(meshes: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Joins the devices of slices, an array each, into one array: `counts` slices along each axis.

    As `jax.experimental.mesh_utils.create_hybrid_device_mesh` joins those that it makes.
    """
    blocks = np.empty(len(meshes), object)
    for i, mesh in enumerate(meshes):
        blocks[i] = mesh
    return np.block(blocks.reshape(tuple(counts)).tolist())
