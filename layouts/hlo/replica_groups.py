"""Reads which devices exchange data with each other, in every form that XLA prints."""

import math
import re
from collections.abc import Mapping

import numpy as np

from layouts.hlo.parser import Instruction, dims


def group_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes along which the devices of a group differ, and the group size."""
    group = first_group(instruction.rest, math.prod(mesh.values()))
    indices = np.unravel_index(group, tuple(mesh.values()))
    axes = tuple(name for name, i in zip(mesh, indices, strict=True) if len(np.unique(i)) > 1)
    return axes, len(group)


def first_group(text: str, devices: int) -> np.ndarray:
    """Returns the device numbers of the first group.

    >>> first_group("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", 8)
    array([0, 2, 4, 6])
    >>> first_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 8)
    array([0, 1, 2, 3])
    >>> first_group("source_target_pairs={{0,0},{1,4}}", 8)
    array([1, 4])
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        moves = [dims(pair) for pair in re.findall(r"[\d,]+\d", pairs[1])]
        moved = np.array([move for move in moves if move[0] != move[1]] or [[0, 0]])
        return np.unique(moved[0])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", text):
        return first_of_mesh(named[1], named[2])
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = np.arange(devices).reshape(dims(tiled[2]))
        numbers = numbers.transpose(dims(tiled[3])) if tiled[3] else numbers
        return numbers.reshape(dims(tiled[1]))[0]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return np.array(dims(listed[1])) if listed else np.arange(devices)


def first_of_mesh(sizes: str, axes: str) -> np.ndarray:
    """Returns the first group along axes of a mesh that the compiler made up."""
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    group_names = re.findall(r"'(\w+)'", axes)
    inner = [i for i, name in enumerate(mesh) if name in group_names]
    outer = [i for i, name in enumerate(mesh) if name not in group_names]
    count = math.prod(numbers.shape[i] for i in inner)
    return numbers.transpose(outer + inner).reshape(-1, count)[0]
