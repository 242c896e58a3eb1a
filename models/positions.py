"""Where a token stands: sinusoids, rotation of queries and keys, and relative buckets."""

import jax
import jax.numpy as jnp

from layouts.layout import Layout

Array = jax.Array


def sinusoids(layout: Layout, positions_BL: Array, d_model: int) -> Array:
    """Sines and cosines of geometrically growing wavelengths.  Vaswani et al. 2017, section 3.5."""
    half = d_model // 2
    rates_d = 10_000.0 ** (-jnp.arange(half) / max(half - 1, 1))
    angles_BLd = jnp.einsum("BL,d->BLd", positions_BL.astype(jnp.float32), rates_d)
    waves_BLd = jnp.concatenate([jnp.sin(angles_BLd), jnp.cos(angles_BLd)], axis=-1)
    return layout.to(waves_BLd, "BLD")


def rotate(x_BLJQk: Array, positions_BL: Array) -> Array:
    """Turns each pair of head columns by position x rate.  Su et al. 2021 (RoFormer), eq. 34.

    The head width must be whole: its two halves are paired.  Works on keys, "BLJk", as well.
    """
    half = x_BLJQk.shape[-1] // 2
    rates_k = 10_000.0 ** (-jnp.arange(half) / half)
    angles_BLk = jnp.einsum("BL,k->BLk", positions_BL.astype(jnp.float32), rates_k)
    heads = tuple(range(2, x_BLJQk.ndim - 1))
    sin, cos = (jnp.expand_dims(wave, heads) for wave in (jnp.sin(angles_BLk), jnp.cos(angles_BLk)))
    left, right = jax.lax.split(x_BLJQk.astype(jnp.float32), (half, half), axis=x_BLJQk.ndim - 1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BLJQk.dtype)


def relative_buckets(behind: Array, buckets: int, max_distance: int) -> Array:
    """Bucket of a key that stands `behind` the query: exact while near, then logarithmic.

    Raffel et al. 2020 (T5), section 2.1, for causal attention; keys ahead get bucket 0.
    """
    behind = jnp.maximum(behind, 0)
    exact = buckets // 2
    scale = (buckets - exact) / jnp.log(max_distance / exact)
    far = exact + (jnp.log(jnp.maximum(behind, 1) / exact) * scale).astype(jnp.int32)
    return jnp.where(behind < exact, behind, jnp.minimum(far, buckets - 1))
