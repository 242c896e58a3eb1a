"""Finds the largest numbers along an axis that may be split: each device ranks its shard, and the
few that are left are gathered and ranked again."""

import functools

import jax
import jax.numpy as jnp

Array = jax.Array


def top_k(x: Array, k: int, place: jax.P) -> tuple[Array, Array]:
    """Returns the k largest numbers along the last axis of x, in order, and their indices.

    Among equals the lower index goes first.  `place` is the placement of x; the result is
    replicated along its last axis.
    """
    mesh_axis = place[-1]
    replicated = jax.P(*place[:-1], None)
    ranked = functools.partial(_rank_shards, k=k, mesh_axis=mesh_axis)
    return jax.shard_map(
        ranked, in_specs=place, out_specs=(replicated, replicated), check_vma=False
    )(x)


def _rank_shards(x: Array, k: int, mesh_axis: str | tuple[str, ...] | None) -> tuple[Array, Array]:
    best, index = jax.lax.top_k(x, min(k, x.shape[-1]))
    if mesh_axis is None:
        return best, index
    index += jax.lax.axis_index(mesh_axis) * x.shape[-1]
    best, index = (
        jax.lax.all_gather(part, mesh_axis, axis=part.ndim - 1, tiled=True)
        for part in (best, index)
    )
    best, at = jax.lax.top_k(best, k)
    return best, jnp.take_along_axis(index, at, axis=-1)
