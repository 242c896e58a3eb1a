"""Provides what a function that runs on each device's shard (`Layout.shard_map`) needs."""

import jax
import jax.numpy as jnp

Array = jax.Array


def shard_index(axes: tuple[str, ...]) -> Array:
    """Returns which shard of an axis that is split over these mesh axes the device has."""
    return jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)
