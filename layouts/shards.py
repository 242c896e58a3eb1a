"""Provides helpers for functions that run on each device's shard (`Layout.shard_map`)."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Entry = str | tuple[str, ...] | None  # of a jax.P


def spec_of(x: Array) -> jax.P:
    """Returns the partition spec of an array, also in a trace."""
    return jax.typeof(x).sharding.spec


def mesh_axes(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a partition spec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def num_shards(entry: Entry) -> int:
    """Returns into how many shards an entry splits its axis, on the current mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in mesh_axes(entry))


def shard_index(axes: tuple[str, ...]) -> Array:
    """Returns the index of this device's shard of an axis that is split over these mesh axes."""
    return jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)


def is_gatherable(before: jax.P, after: jax.P, over: tuple[str, ...]) -> bool:
    """Returns whether gathers over these mesh axes alone turn one sharding into the other."""
    places = before.partitions, after.partitions
    entries = zip(*(map(mesh_axes, place) for place in places), strict=True)
    return all(old[: len(new)] == new and set(old[len(new) :]) <= set(over) for old, new in entries)


def gather_shard(x: Array, before: jax.P, after: jax.P, over: tuple[str, ...]) -> Array:
    """Gathers a device's shard of a weight for products with tokens split over these mesh axes.

    The gradient is scattered back.  If the weight were gathered before the function runs on each
    device, the full gradient would be added up on every device.
    """
    for axis, (old, new) in enumerate(zip(before.partitions, after.partitions, strict=True)):
        if names := mesh_axes(old)[len(mesh_axes(new)) :]:
            x = jax.lax.all_gather(x, names, axis=axis, tiled=True)
    split = {name for entry in before.partitions for name in mesh_axes(entry)}
    for name in over:  # one by one, since the weight may be reduced over some of them
        if name not in split:
            x = jax.lax.pcast(x, name, to="varying")
    return x


def ppermute(x: Array, entry: Entry, pairs: Sequence[tuple[int, int]]) -> Array:
    """Sends shards of an axis that `entry` splits; pairs hold a shard's index and its receiver's.

    `jax.lax.ppermute` counts devices in the order of the mesh (jax 0.10.2); `axis_index` and specs
    count them in the order of the entry.  So mesh axes are sorted here, and pairs renumbered.
    """
    names = mesh_axes(entry)
    sorted_names = sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index)
    sizes = [jax.lax.axis_size(name) for name in sorted_names]
    in_mesh_order = np.arange(math.prod(sizes)).reshape(sizes)
    position = in_mesh_order.transpose([sorted_names.index(name) for name in names]).ravel()
    renumbered = [(int(position[source]), int(position[target])) for source, target in pairs]
    return jax.lax.ppermute(x, tuple(sorted_names), renumbered)
