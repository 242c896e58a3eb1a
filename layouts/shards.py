"""Provides what a function that runs on each device's shard (`Layout.shard_map`) needs."""

import jax
import jax.numpy as jnp

from layouts.layout import mesh_axes

Array = jax.Array


def shard_index(axes: tuple[str, ...]) -> Array:
    """Returns which shard of an axis that is split over these mesh axes the device has."""
    return jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)


def is_gatherable(before: jax.P, after: jax.P, over: tuple[str, ...]) -> bool:
    """Tells whether gathers over these mesh axes alone lead from one placement to the other.

    >>> whole, split, moved = jax.P(None, None), jax.P("x", None), jax.P(None, "x")
    >>> [is_gatherable(split, after, ("x",)) for after in (whole, split, moved)]
    [True, True, False]
    """
    entries = [(mesh_axes(old), mesh_axes(new)) for old, new in zip(before, after, strict=True)]
    return all(old[: len(new)] == new and set(old[len(new) :]) <= set(over) for old, new in entries)


def gather_shard(x: Array, before: jax.P, after: jax.P, over: tuple[str, ...]) -> Array:
    """Gathers a device's shard of a weight for products with tokens split over these mesh axes.

    Its gradient is scattered back.  That of an operand which is gathered before the function runs
    on each device is added up whole on every one.
    """
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if names := mesh_axes(old)[len(mesh_axes(new)) :]:
            x = jax.lax.all_gather(x, names, axis=axis, tiled=True)
    split = {name for entry in before for name in mesh_axes(entry)}
    return jax.lax.pcast(x, tuple(name for name in over if name not in split), to="varying")
