"""Finds the largest numbers along an axis that may be sharded.

Each device ranks its shard; the few that are left are gathered and ranked again.  XLA's CPU backend
takes twenty times as long to rank numbers as to find their maximum.  Therefore, on CPUs, only the
blocks with the largest maxima are ranked.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from layouts.einsum import platform

SMALLEST_IN_BLOCKS = 1024
"""Size of an axis below which ranking all of it is about as fast (measured on a CPU)."""


def top_k(x: Array, k: int, place: jax.P) -> tuple[Array, Array]:
    """Returns the k largest numbers along the last axis of x, in order, and their indices.

    Among equals the lower index comes first.  `place` is the partition spec of x; the result is
    replicated along its last axis.
    """
    mesh_axis = place[-1]
    replicated = jax.P(*place[:-1], None)
    rank = rank_blocks_first if platform() == "cpu" else jax.lax.top_k

    def of_shard(x: Array) -> tuple[Array, Array]:
        best, index = rank(x, min(k, x.shape[-1]))
        if mesh_axis is None:
            return best, index
        index += jax.lax.axis_index(mesh_axis) * x.shape[-1]
        best = jax.lax.all_gather(best, mesh_axis, axis=best.ndim - 1, tiled=True)
        index = jax.lax.all_gather(index, mesh_axis, axis=index.ndim - 1, tiled=True)
        best, at = jax.lax.top_k(best, k)
        return best, jnp.take_along_axis(index, at, axis=-1)

    return jax.shard_map(of_shard, in_specs=place, out_specs=replicated, check_vma=False)(x)


def rank_blocks_first(x: Array, k: int) -> tuple[Array, Array]:
    """Ranks only the k blocks with the largest maxima, which contain the k largest numbers.

    A number in another block is below k maxima, or equal to some with lower indices.
    """
    *rows, size = x.shape
    ideal = math.sqrt(size / k)  # leaves about as many maxima to rank as numbers in k blocks
    sizes = range(math.ceil(ideal / 2), math.floor(2 * ideal) + 1)
    # A block that divides the axis saves a copy of it.
    block = min(sizes, key=lambda block: (size % block > 0, abs(block - ideal)))
    blocks = size // block
    if size < SMALLEST_IN_BLOCKS or blocks <= k:
        return jax.lax.top_k(x, k)
    whole, rest = jnp.split(x, [blocks * block], axis=-1)
    whole = whole.reshape(*rows, blocks, block)
    _, chosen = jax.lax.top_k(jnp.max(whole, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)[..., None]  # so that among equals the lower index is first
    numbers = jnp.take_along_axis(whole, chosen, axis=-2, mode="clip")
    index = chosen * block + index_along_last(numbers)
    numbers, index = (part.reshape(*rows, k * block) for part in (numbers, index))
    best, at = jax.lax.top_k(jnp.concatenate([numbers, rest], axis=-1), k)
    index = jnp.concatenate([index, blocks * block + index_along_last(rest)], axis=-1)
    return best, jnp.take_along_axis(index, at, axis=-1, mode="clip")


def index_along_last(x: Array) -> Array:
    """Returns the index along the last axis of x, in its shape."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
