"""Implements dropout, whose bits depend only on the key and the shape, not on the layout."""

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from layouts.random_bytes import random_bytes

Key = Array | None
"""A key of `jax.random`; None if nothing is random."""
LEVELS = 256  # a rate is rounded to a multiple of 1 / LEVELS


def split_key(key: Key, count: int = 2) -> list[Key]:
    """Splits a key into `count` keys, or None into as many None."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def dropout(layout: Layout, key: Key, rate: float, x: Array, axes: str) -> Array:
    """Zeroes a share of x and scales the rest up; without a key, returns x.

    Four elements share one random number, because drawing dominates the cost of dropout.
    """
    if key is None or not rate:
        return x
    return drop(x, layout.random(random_bytes, key, axes, x.shape), rate)


def drop(x: Array, drawn: Array, rate: float) -> Array:
    """Zeroes the elements of x whose random byte is low, and scales the rest up."""
    dropped = min(max(round(rate * LEVELS), 1), LEVELS - 1)
    return jnp.where(drawn >= dropped, x * (LEVELS / (LEVELS - dropped)), 0)
