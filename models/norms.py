"""Divides by the root mean square: of the residual width, or of each head."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.initializers import Weights
from models.spec import TransformerSpec

Array = jax.Array


class NormSettings(Protocol):
    """Holds the settings of all norms of a model."""

    @property
    def norm_epsilon(self) -> float:
        """Returns what is added to the mean square."""

    @property
    def norm_offset(self) -> bool:
        """Returns whether norms multiply by 1 + their scale."""


class Norm(nnx.Module):
    """Divides by the root mean square.  Zhang and Sennrich 2019 (RMSNorm), equation 4."""

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.scale_D = weights.zeros("D") if spec.norm_offset else weights.ones("D")

    @jax.named_scope("norm")
    def __call__(self, x_BLD: Array) -> Array:
        y_BLD = normed(self.spec, self.layout, x_BLD, self.scale_D[...], "BLD")
        # A TPU's compiler would compute the gradient of the norm tile by tile in a product.
        return jax.lax.optimization_barrier(y_BLD)


class HeadNorm(nnx.Module):
    """Divides each head by its root mean square.  Henry et al. 2020; one scale for all heads."""

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.scale_K = weights.zeros("K") if spec.norm_offset else weights.ones("K")

    @jax.named_scope("head_norm")
    def __call__(self, x: Array, axes: str) -> Array:
        return normed(self.spec, self.layout, x, self.scale_K[...], axes)


def normed(spec: NormSettings, layout: Layout, x: Array, scale: Array, axes: str) -> Array:
    """Divides by the root mean square along the last axis, in JAX's float type, and scales."""
    wide, wide_scale = x.astype(float), scale.astype(float)
    if spec.norm_offset:
        wide_scale = 1 + wide_scale
    power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    factor = layout.broadcast_like(wide_scale, axes[-1], axes)
    return (wide * jax.lax.rsqrt(power + spec.norm_epsilon) * factor).astype(x.dtype)
