"""Draws random bytes that do not depend on how they are placed."""

import jax
import jax.numpy as jnp

from layouts.layout import num_shards

Array = jax.Array
BYTES = 4  # in one random number


def random_bytes(key: Array, *, shape: tuple[int, ...], out_sharding: jax.P) -> Array:
    """Draws evenly distributed numbers from 0 to 255, four from each random number."""
    numbers = -(-shape[-1] // BYTES)
    # Where a device would hold a part of a number, each draws all of a row, and keeps its part.
    even = shape[-1] % (BYTES * num_shards(out_sharding[-1])) == 0
    place = out_sharding if even else jax.P(*out_sharding[:-1], None)
    drawn = jax.random.bits(key, (*shape[:-1], numbers), out_sharding=place)
    spread = jax.lax.reshape(
        jax.lax.bitcast_convert_type(drawn, jnp.uint8),
        (*shape[:-1], numbers * BYTES),
        out_sharding=place,
    )
    return jax.sharding.reshard(spread[..., : shape[-1]], out_sharding)
