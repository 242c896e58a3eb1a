"""Dropout whose bits follow from the key and the shape alone, never from the layout."""

import jax
import jax.numpy as jnp

from layouts.layout import Layout

Array = jax.Array


def dropout(layout: Layout, key: Array | None, rate: float, x: Array, axes: str) -> Array:
    """Zeroes a share of x and scales the rest up; without a key, x itself."""
    if key is None or not rate:
        return x
    kept = layout.draw(
        lambda key, **place: jax.random.bernoulli(key, 1 - rate, **place), key, axes, x.shape
    )
    return jnp.where(kept, x / (1 - rate), 0)
