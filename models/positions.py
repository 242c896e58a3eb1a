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


def rotate(layout: Layout, x: Array, axes: str, positions_BL: Array) -> Array:
    """Turns each pair of head columns by position x rate.  Su et al. 2021 (RoFormer), eq. 34.

    The last two axes are positions and the head width, which must be whole: its two halves are
    paired.
    """
    half = x.shape[-1] // 2
    rates_k = 10_000.0 ** (-jnp.arange(half) / half)
    places = layout.align(positions_BL, axes[0] + axes[-2], axes).astype(jnp.float32)
    angles = places * jnp.expand_dims(rates_k, range(len(axes) - 1))
    left, right = jax.lax.split(x.astype(jnp.float32), (half, half), axis=x.ndim - 1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def relative_buckets(behind: Array, buckets: int, max_distance: int) -> Array:
    """Bucket of a key that stands `behind` the query: exact while near, then logarithmic.

    Raffel et al. 2020 (T5), section 2.1, for causal attention; keys ahead get bucket 0.
    """
    behind = jnp.maximum(behind, 0)
    exact = buckets // 2
    scale = (buckets - exact) / jnp.log(max_distance / exact)
    far = exact + (jnp.log(jnp.maximum(behind, 1) / exact) * scale).astype(jnp.int32)
    return jnp.where(behind < exact, behind, jnp.minimum(far, buckets - 1))
