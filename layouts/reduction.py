"""Defers sums of gradients over devices.

A weight that is `reduced` over mesh axes is the same on all their devices, and its gradient is
`unreduced` over them: each device keeps the sum over its own tokens, until a reshard adds them up.
The terms are those of `jax.sharding.PartitionSpec`.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from layouts.shards import Entry, mesh_axes, spec_of


def free_axes(place: jax.P, over: Iterable[str]) -> frozenset[str]:
    """Returns which of these mesh axes, with several devices, split no axis of an array."""
    used = {name for entry in place.partitions for name in mesh_axes(entry)}
    sizes = jax.sharding.get_abstract_mesh().shape
    return frozenset(name for name in over if name not in used and sizes[name] > 1)


def defer_sum(weight: Array, rows: Iterable[str], tokens: Iterable[str]) -> Array:
    """Returns a weight whose gradient is not added up over the mesh axes of tokens.

    A weight that is split over a mesh axis of the rows is returned unchanged: devices add up and
    scatter its gradient immediately, because it may not fit unsharded.
    """
    spec = spec_of(weight)
    axes = free_axes(spec, tokens)
    if not axes or free_axes(spec, rows) != free_axes(jax.P(), rows):
        return weight
    return jax.sharding.reshard(weight, spec.update(reduced=axes))


def reduced_over(weight: Array, tokens: Iterable[Entry]) -> Array:
    """Returns a weight, if it is reduced, as reduced over the mesh axes that split its tokens.

    JAX requires these to be equal.  If they cannot be, the returned weight is not reduced.
    """
    spec = spec_of(weight)
    used = free_axes(jax.P(), (name for entry in tokens for name in mesh_axes(entry)))
    if not spec.reduced or used == spec.reduced:
        return weight
    used = used if used < spec.reduced else frozenset()
    return jax.sharding.reshard(weight, spec.update(reduced=used))


def reduced_alike(weights: Iterable[Array]) -> list[Array]:
    """Returns the weights as reduced over the same mesh axes: those over which all were."""
    weights = list(weights)
    shared = frozenset.intersection(*(spec_of(weight).reduced for weight in weights))
    places = (spec_of(weight).update(reduced=shared) for weight in weights)
    return [jax.sharding.reshard(*each) for each in zip(weights, places, strict=True)]


def like_sums(x: Array, place: jax.P) -> jax.P:
    """Adds the mesh axes over which x is reduced or unreduced to a partition spec.

    Mesh axes that the spec already uses are left out.
    """
    spec = spec_of(x)
    if not (spec.reduced or spec.unreduced):
        return place
    reduced, unreduced = (free_axes(place, names) for names in (spec.reduced, spec.unreduced))
    return place.update(reduced=reduced, unreduced=unreduced)


def zero_gradient(weight: Array, dtype: DTypeLike) -> Array:
    """Returns zeros of this type, to which the gradients of a weight can be added."""
    spec = spec_of(weight)
    place = jax.P(*spec.partitions)
    zero = jnp.zeros(weight.shape, dtype, out_sharding=place)
    return jax.sharding.reshard(zero, place.update(unreduced=spec.reduced))


def scaled(x: Array, factor: Array) -> Array:
    """Multiplies an array, which may be unreduced, by a number or by an array that is not."""
    axes = spec_of(x).unreduced
    place = spec_of(factor).update(reduced=axes)
    return x * (jax.sharding.reshard(factor, place) if axes else factor)
