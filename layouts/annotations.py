"""Placements by axis number instead of by letter, for layers that bring their own axes.

Lepikhin et al. 2020 (GShard), section 3.2.  Devices are counted through the mesh that is set, its
last axis fastest.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

Places = tuple[tuple[str, ...], ...]


def by_count(axes: int, split_axis: int, parts: int) -> jax.P:
    """One axis in so many parts: over the mesh axis of that size, or over all of them together."""
    mesh = _mesh()
    fitting: list[tuple[str, ...]] = [(name,) for name, size in mesh.items() if size == parts]
    if not fitting and math.prod(mesh.values()) == parts:
        fitting = [tuple(mesh)]
    if len(fitting) != 1:
        found = "several mesh axes have" if fitting else "no mesh axis has"
        raise ValueError(
            f"split into {parts} parts: {found} that size.  The mesh: {_shown(mesh)}.  "
            "Give a device assignment: shard(x, ...)."
        )
    return jax.P(*(fitting[0] if axis == split_axis else None for axis in range(axes)))


def by_assignment(axes: int, devices: Sequence[object]) -> jax.P:
    """An array of device numbers, of which entry i, j, ... holds part i, j, ... of the tensor."""
    wanted, mesh = np.asarray(devices), _mesh()
    if wanted.ndim != axes:
        raise ValueError(
            f"a device assignment of {wanted.ndim} axes for a tensor of {axes}.  Give as many, of "
            "size 1 where the tensor is whole."
        )
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    for places in _places(wanted.shape, mesh):
        order = [list(mesh).index(name) for own in places for name in own]
        if np.array_equal(numbers.transpose(order).reshape(wanted.shape), wanted):
            return jax.P(*(own or None for own in places))
    raise ValueError(
        f"device assignment {wanted.tolist()}: it does not follow the mesh {_shown(mesh)}.  Legal: "
        "every device once, and each axis of the tensor along one or more whole mesh axes."
    )


def _places(parts: tuple[int, ...], mesh: dict[str, int]) -> Iterator[Places]:
    """Each way to give all mesh axes to the axes of a tensor that has so many parts along each."""
    for order in itertools.permutations(mesh):
        for cuts in itertools.combinations_with_replacement(range(len(mesh) + 1), len(parts) - 1):
            bounds = (0, *cuts, len(mesh))
            places = tuple(order[i:k] for i, k in itertools.pairwise(bounds))
            if tuple(math.prod(mesh[name] for name in own) for own in places) == parts:
                yield places


def _mesh() -> dict[str, int]:
    """The mesh axes that split anything."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return {name: size for name, size in sizes.items() if size > 1}


def _shown(mesh: dict[str, int]) -> str:
    return ", ".join(f"{name}:{size}" for name, size in mesh.items())
