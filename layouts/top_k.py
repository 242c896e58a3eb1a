"""The largest numbers along an axis that may be split: each device ranks its own, then the few
winners are gathered and ranked again."""

import functools

import jax
import jax.numpy as jnp

Array = jax.Array


def top_k(x: Array, k: int, place: jax.P) -> tuple[Array, Array]:
    """The k largest numbers along the last axis of x, in order, and their indices.

    Among equals the lower index goes first.  `place` is where x lives; the result is whole along
    its last axis.
    """
    mesh_axis = place[-1]
    kept = jax.P(*place[:-1], None)
    ranked = functools.partial(_own_and_gathered, k=k, mesh_axis=mesh_axis)
    return jax.shard_map(ranked, in_specs=place, out_specs=(kept, kept), check_vma=False)(x)


def _own_and_gathered(
    x: Array, k: int, mesh_axis: str | tuple[str, ...] | None
) -> tuple[Array, Array]:
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
