"""Position encodings: sinusoids, rotation of queries and keys, and relative buckets."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.initializers import Weights
from models.spec import TransformerSpec

Array = jax.Array


def sinusoids(layout: Layout, positions_BL: Array, d_model: int) -> Array:
    """Returns sines and cosines of growing wavelengths.  Vaswani et al. 2017, section 3.5."""
    half = d_model // 2
    rates_d = 10_000.0 ** (-jnp.arange(half) / max(half - 1, 1))
    angles_BLd = jnp.einsum("BL,d->BLd", positions_BL.astype(jnp.float32), rates_d)
    waves_BLd = jnp.concatenate([jnp.sin(angles_BLd), jnp.cos(angles_BLd)], axis=-1)
    return layout.reshard(waves_BLd, "BLD")


def rotate(layout: Layout, x: Array, axes: str, positions_BL: Array) -> Array:
    """Rotates each pair of head columns by position x rate.  Su et al. 2021 (RoFormer), eq. 34.

    The last two axes are positions and the head width, which must be whole: its two halves are
    paired.
    """
    half = x.shape[-1] // 2
    rates_k = 10_000.0 ** (-jnp.arange(half) / half)
    places = layout.broadcast_like(positions_BL, axes[0] + axes[-2], axes).astype(jnp.float32)
    angles = places * jnp.expand_dims(rates_k, range(len(axes) - 1))
    left, right = jax.lax.split(x.astype(jnp.float32), (half, half), axis=x.ndim - 1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


class RelativeBias(nnx.Module):
    """A learned number per head and bucket of distance, added to the scores of attention."""

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.bias_RJQ = weights.zeros("RJQ")

    def __call__(self, relative_positions: Array, causal: bool) -> Array:
        """Returns the bias by query position - key position, with axes "LM" or "BLM"."""
        buckets = relative_buckets(
            relative_positions, self.spec.buckets, self.spec.max_distance, causal
        )
        axes = "BLM"[-relative_positions.ndim :]
        bias = self.layout.take(self.bias_RJQ[...].astype(jnp.float32), buckets, axes + "JQ")
        placed = axes.replace("LM", "JQLM")
        bias = self.layout.einsum(f"{axes}JQ->{placed}", bias)
        return self.layout.broadcast_like(bias, placed, "BJQLM")


def relative_buckets(
    relative_positions: Array, buckets: int, max_distance: int, causal: bool
) -> Array:
    """Returns the bucket of query position - key position: exact while near, then logarithmic.

    Raffel et al. 2020 (T5), section 2.1.  In causal attention keys ahead get bucket 0; otherwise
    the upper half of the buckets is theirs.
    """
    first = jnp.zeros_like(relative_positions)
    if causal:
        distance = jnp.maximum(relative_positions, 0)
    else:
        buckets //= 2
        first = jnp.where(relative_positions < 0, buckets, first)
        distance = jnp.abs(relative_positions)
    exact = buckets // 2
    share = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = exact + (share * (buckets - exact)).astype(jnp.int32)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
