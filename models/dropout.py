"""Dropout whose bits follow from the key and the shape alone, never from the layout."""

import jax
import jax.numpy as jnp

from layouts.layout import Layout, num_shards

Array = jax.Array
LEVELS = 256  # a rate is rounded to a multiple of 1 / LEVELS
BYTES = 4  # in one random number


def dropout(layout: Layout, key: Array | None, rate: float, x: Array, axes: str) -> Array:
    """Zeroes a share of x and scales the rest up; without a key, x itself.

    Four elements share one random number, for drawing is what dropout costs.
    """
    if key is None or not rate:
        return x
    dropped = min(max(round(rate * LEVELS), 1), LEVELS - 1)
    kept = layout.random(random_bytes, key, axes, x.shape) >= dropped
    return jnp.where(kept, x * (LEVELS / (LEVELS - dropped)), 0)


def random_bytes(key: Array, *, shape: tuple[int, ...], out_sharding: jax.P) -> Array:
    """Even random numbers from 0 to 255."""
    numbers = -(-shape[-1] // BYTES)
    # Where a device would hold a part of a number, each draws all of a row, and keeps its own.
    even = shape[-1] % (BYTES * num_shards(out_sharding[-1])) == 0
    place = out_sharding if even else jax.P(*out_sharding[:-1], None)
    drawn = jax.random.bits(key, (*shape[:-1], numbers), out_sharding=place)
    spread = jax.lax.reshape(
        jax.lax.bitcast_convert_type(drawn, jnp.uint8),
        (*shape[:-1], numbers * BYTES),
        out_sharding=place,
    )
    return jax.sharding.reshard(spread[..., : shape[-1]], out_sharding)
