"""Encodes positions: sinusoids, rotation of queries and keys, and relative biases."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.einsum import platform
from layouts.layout import Layout
from layouts.padding import with_axes
from layouts.segment_sum import segment_sum
from models.initializers import Weights
from models.rope import plain_rates
from models.spec import BUCKETS, TransformerSpec

Array = jax.Array


def sinusoids(layout: Layout, positions_BL: Array, d_model: int) -> Array:
    """Returns sines and cosines of growing wavelengths.  Vaswani et al. 2017, section 3.5."""
    half = d_model // 2
    rates_d = 10_000.0 ** (-jnp.arange(half) / max(half - 1, 1))
    angles_BLd = jnp.einsum("BL,d->BLd", positions_BL.astype(float), rates_d)
    waves_BLd = jnp.concatenate([jnp.sin(angles_BLd), jnp.cos(angles_BLd)], axis=-1)
    return layout.reshard(waves_BLd, "BLD")


class Rotation(NamedTuple):
    """Holds the angles by which positions rotate heads, in JAX's float type, of both halves."""

    cos_BLk: Array
    sin_BLk: Array
    """Negative for the left half."""


def rotation_of(positions_BL: Array, spec: TransformerSpec) -> Rotation:
    """Returns the angles position x rate.  Su et al. 2021 (RoFormer), section 3.2.2."""
    rates, magnitude = plain_rates(spec.rope_theta, spec.d_kv), 1.0
    if spec.rope_scaling is not None:
        rates, magnitude = (
            spec.rope_scaling.scaled(rates, spec.rope_theta),
            spec.rope_scaling.magnitude,
        )
    rates_k = jnp.asarray(rates, float)
    angles_BLk = jnp.einsum("BL,k->BLk", positions_BL.astype(float), rates_k)
    cos_BLk, sin_BLk = magnitude * jnp.cos(angles_BLk), magnitude * jnp.sin(angles_BLk)
    return Rotation(
        cos_BLk=jnp.concatenate([cos_BLk, cos_BLk], axis=-1),
        sin_BLk=jnp.concatenate([-sin_BLk, sin_BLk], axis=-1),
    )


def rotate(layout: Layout, x: Array, axes: str, rotation: Rotation) -> Array:
    """Rotates pairs of head columns, whose halves are paired.  RoFormer, equation 34.

    The last two axes are positions and the head width, which must be whole.
    """
    table_axes = axes[0] + axes[-2:]
    return _rotated(x, *(layout.broadcast_like(table, table_axes, axes) for table in rotation))


def swap_halves(x: Array) -> Array:
    """Swaps the halves of the last axis."""
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([right, left], axis=-1)


def swap_by_product(x: Array) -> Array:
    """Swaps the halves of the last axis, exactly, by the matrix unit.

    A TPU moves columns within a register slowly: on v5e a rotation takes 1.1 ms after this product,
    and 4.0 ms after `swap_halves`, by the compiler's cycles (67 million elements in bfloat16).
    """
    swap_kk = jnp.roll(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, axis=1)
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum(
        "...k,kj->...j", x, swap_kk, precision=precision, preferred_element_type=float
    )


@jax.custom_vjp
def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    swap = swap_by_product if platform() == "tpu" else swap_halves
    return (x.astype(float) * cos + swap(x).astype(float) * sin).astype(x.dtype)


def _rotated_forward(x: Array, cos: Array, sin: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rotated(x, cos, sin), (cos, sin)


def _rotated_backward(tables: tuple[Array, Array], dx: Array) -> tuple[Array, None, None]:
    """Rotates back: one pass, where the gradient of parts would add up padded arrays."""
    cos, sin = tables
    return _rotated(dx, cos, -sin), None, None


_rotated.defvjp(_rotated_forward, _rotated_backward)


class Bias(NamedTuple):
    """Holds a bias of logits by relative position, and the table that it was read from.

    The gradient goes to the table alone: the values are constants.
    """

    table_RJQ: Array
    buckets: Array | None
    """Rows of the table, with axes "LM" or, with a cache, "BLM".  None in a gradient."""
    values: Array | None
    """With axes "BJQLM", where rows that share them have a B of 1.  None in a gradient."""

    def part(self, layout: Layout, queries: slice, keys: slice) -> "Bias":
        """Returns the bias of some queries and keys, which the layout does not split."""
        assert self.buckets is not None and self.values is not None
        buckets = layout.reshard(self.buckets, "BLM"[-self.buckets.ndim :])
        buckets, values = buckets[..., queries, keys], self.values[..., queries, keys]
        return Bias(self.table_RJQ, buckets, values)


class RelativeBias(nnx.Module):
    """Learns a number per head and bucket of distance, which is added to the logits."""

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = with_axes(layout, BUCKETS)
        self.bias_RJQ = weights.with_axes(BUCKETS).with_sizes(R=spec.buckets).zeros("RJQ", "R")

    def __call__(self, relative_positions: Array, causal: bool) -> Bias:
        """Returns the bias by query position - key position, with axes "LM" or "BLM"."""
        buckets = relative_buckets(
            relative_positions, self.spec.buckets, self.spec.max_distance, causal
        )
        table_RJQ = self.bias_RJQ[...].astype(float)
        axes = "BLM"[-buckets.ndim :]
        rows = self.layout.take(jax.lax.stop_gradient(table_RJQ), buckets, axes + "JQ")
        placed = axes.replace("LM", "JQLM")
        values = self.layout.einsum(f"{axes}JQ->{placed}", rows)
        return Bias(table_RJQ, buckets, self.layout.broadcast_like(values, placed, "BJQLM"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_bias(layout: Layout, logits_BJQLM: Array, bias: Bias) -> Array:
    """Adds the bias to the logits."""
    return _add_forward(layout, logits_BJQLM, bias)[0]


def _add_forward(layout: Layout, logits_BJQLM: Array, bias: Bias) -> tuple[Array, Bias]:
    assert bias.values is not None
    return logits_BJQLM + bias.values, bias._replace(values=None)


def _add_backward(layout: Layout, bias: Bias, dlogits_BJQLM: Array) -> tuple[Array, Bias]:
    return dlogits_BJQLM, bias_gradient(layout, bias, dlogits_BJQLM)


add_bias.defvjp(_add_forward, _add_backward)


def bias_gradient(layout: Layout, bias: Bias, dlogits_BJQLM: Array) -> Bias:
    """Returns the gradient of a bias: sums into buckets before devices add them up.

    One number per head and bucket crosses devices, instead of one per head, query and key.
    """
    assert bias.buckets is not None
    layout = with_axes(layout, BUCKETS)
    equation = f"BJQLM,{'BLM'[-bias.buckets.ndim :]}->RJQ"
    count = bias.table_RJQ.shape[0]
    return Bias(segment_sum(layout, equation, dlogits_BJQLM, bias.buckets, count), None, None)


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
