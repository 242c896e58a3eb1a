"""Shards tensors by axis number instead of by letter, for layers with axes of their own.

Lepikhin et al. 2020 (GShard), section 3.2.  Devices are numbered in row-major order over the
current mesh.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from layouts.cost.collectives import format_mesh

Places = tuple[tuple[str, ...], ...]


def by_count(axes: int, split_axis: int, parts: int) -> jax.P:
    """Splits one axis into `parts` parts, over the mesh axis of that size or over all mesh axes."""
    if split_axis not in range(axes):
        raise ValueError(
            f"split axis {split_axis} of a tensor with {axes} axes, which are counted from 0.  "
            f"Legal: 0 to {axes - 1}."
        )
    mesh = _mesh()
    fitting: list[tuple[str, ...]] = [(name,) for name, size in mesh.items() if size == parts]
    if not fitting and math.prod(mesh.values()) == parts:
        fitting = [tuple(mesh)]
    if len(fitting) != 1:
        problem = "several mesh axes have" if fitting else "no mesh axis has"
        raise ValueError(
            f"split into {parts} parts: {problem} that size.  The mesh: {format_mesh(mesh)}.  "
            "Give a device assignment: shard(x, ...)."
        )
    return jax.P(*(fitting[0] if axis == split_axis else None for axis in range(axes)))


def by_assignment(axes: int, devices: Sequence[object]) -> jax.P:
    """Places part i, j, ... of a tensor on the device with number `devices[i][j]...`."""
    assignment, mesh = np.asarray(devices), _mesh()
    if assignment.ndim != axes:
        raise ValueError(
            f"a device assignment of {assignment.ndim} axes for a tensor of {axes}.  Give as many, "
            "of size 1 where the tensor is whole."
        )
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    for places in _places(assignment.shape, mesh):
        order = [list(mesh).index(name) for names in places for name in names]
        if np.array_equal(numbers.transpose(order).reshape(assignment.shape), assignment):
            return jax.P(*(names or None for names in places))
    raise ValueError(
        f"device assignment {assignment.tolist()}: it does not follow the mesh {format_mesh(mesh)}."
        "  Legal: every device once, and each axis of the tensor along one or more whole mesh axes."
    )


def _places(parts: tuple[int, ...], mesh: dict[str, int]) -> Iterator[Places]:
    """Yields every assignment of all mesh axes to tensor axes with these numbers of parts."""
    for order in itertools.permutations(mesh):
        for cuts in itertools.combinations_with_replacement(range(len(mesh) + 1), len(parts) - 1):
            bounds = (0, *cuts, len(mesh))
            places = tuple(order[i:k] for i, k in itertools.pairwise(bounds))
            if tuple(math.prod(mesh[name] for name in names) for names in places) == parts:
                yield places


def _mesh() -> dict[str, int]:
    """Returns the sizes of all mesh axes larger than 1, by name."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return {name: size for name, size in sizes.items() if size > 1}
