"""Reads and writes the keys and values of a layer, alone or in the caches of all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.einsum import platform


class LayerCache(NamedTuple):
    """Refers to a layer's array in a stack of the caches of all layers.

    New tokens are written to the stack itself.  A scan over the arrays of layers would copy each of
    them.
    """

    stack: Array
    layer: Array


CacheArray = Array | LayerCache


def read(cache: CacheArray) -> Array:
    """Returns the array of a layer."""
    if isinstance(cache, LayerCache):
        return jax.lax.dynamic_index_in_dim(cache.stack, cache.layer, keepdims=False)
    return cache


def write(cache: CacheArray, new: Array, cache_index: Array | None, axis: int) -> CacheArray:
    """Writes keys or values of new tokens at an index of an axis, which is never sharded."""
    assert cache_index is not None
    array, layer = cache if isinstance(cache, LayerCache) else (cache, None)
    starts = [cache_index if i == axis else jnp.int32(0) for i in range(new.ndim)]
    if layer is not None:
        new, starts = new[None], [layer, *starts]

    def written(array: Array) -> Array:
        return jax.lax.dynamic_update_slice(array, new, starts)

    if platform() != "cpu":
        array = written(array)
    else:  # XLA would fuse the update with each of its readers, and copy the cache for each
        array = jax.lax.cond(cache_index >= 0, written, lambda array: array, array)
    return array if layer is None else LayerCache(array, layer)
