"""Implements RMSNorm and LayerNorm, of the residual width or of heads."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from configs.spec import Positive, spec
from layouts.layout import Layout
from models.initializers import Weights
from models.parts import Norm

INVERSE, MEAN = "inverse_root_mean_square", "mean"


@spec
class RmsNorm(Norm):
    """Divides by the root mean square, and multiplies by a learned scale."""

    epsilon: Positive = 1e-6
    """Added to the mean square."""
    offset: bool = False
    """Multiplies by 1 + scale, as in Gemma, so that weight decay pulls the factor to 1."""

    def build(self, layout: Layout, weights: Weights) -> "NormNetwork":
        return self.build_for_heads(layout, weights, "D")

    def build_for_heads(self, layout: Layout, weights: Weights, axis: str = "K") -> "NormNetwork":
        return NormNetwork(layout, weights, self.epsilon, axis, offset=self.offset)


@spec
class LayerNorm(Norm):
    """Normalizes mean and variance, then scales and adds a bias.  Ba et al. 2016, section 3.1."""

    epsilon: Positive = 1e-5
    """Added to the variance."""
    bias: bool = True
    """Adds a learned bias."""

    def build(self, layout: Layout, weights: Weights) -> "NormNetwork":
        return NormNetwork(layout, weights, self.epsilon, centered=True, biased=self.bias)


class NormNetwork(nnx.Module):
    """Normalizes hidden states, each head with a scale that all share, or all heads together.

    Zhang and Sennrich 2019 (RMSNorm), equation 4; of heads Henry et al. 2020; Team OLMo 2024 (OLMo
    2), section 3.3.
    """

    def __init__(
        self, layout: Layout, weights: Weights, epsilon: float, axes: str = "D", *,
        offset: bool = False, centered: bool = False, biased: bool = False,
    ):  # fmt: skip
        self.layout, self.epsilon, self.axes = layout, epsilon, axes
        self.offset, self.centered, self.biased = offset, centered, biased
        scale = weights.zeros(axes) if offset else weights.ones(axes)  # multiplies by 1 at first
        setattr(self, f"scale_{axes}", scale)
        if biased:
            setattr(self, f"bias_{axes}", weights.zeros(axes))

    def __call__(self, x: Array, axes: str = "BLD") -> Array:
        y = normed(
            self.layout,
            x,
            getattr(self, f"scale_{self.axes}")[...],
            axes,
            self.epsilon,
            offset=self.offset,
            scale_axes=self.axes if len(self.axes) > 1 else None,
            centered=self.centered,
            shift=getattr(self, f"bias_{self.axes}")[...] if self.biased else None,
        )
        # Else a TPU's compiler computes the gradient of this norm again for each tile of a product.
        return jax.lax.optimization_barrier(y) if axes == "BLD" else y


@jax.named_scope("norm")
def normed(
    layout: Layout, x: Array, scale: Array, axes: str, epsilon: float, *, offset: bool = False,
    scale_axes: str | None = None, centered: bool = False, shift: Array | None = None,
) -> Array:  # fmt: skip
    """Divides by the root mean square along the scale's axes, in JAX's float type, and scales.

    The scale has the last axis of x, or several of its axes.  `centered` subtracts the mean first.
    A shift, which has the scale's axes, is added at the end.

    The gradient keeps the input in its original type, and one or two numbers for each vector.
    """
    wide_scale = scale.astype(float)
    if offset:
        wide_scale = 1 + wide_scale
    scale_axes = scale_axes or axes[-1]
    over = tuple(axes.index(letter) for letter in scale_axes)
    # Corrects the mean for zeros that pad an axis.
    padding = math.prod(scale.shape) / math.prod(layout.unpadded_shape(scale_axes, scale.shape))
    policy = jax.checkpoint_policies.save_only_these_names(INVERSE, MEAN)

    @functools.partial(jax.checkpoint, prevent_cse=False, policy=policy)
    def scaled(x: Array, factor: Array, term: Array | None) -> Array:
        wide = x.astype(float)
        if centered:
            assert padding == 1, "the zeros that pad would count"
            wide -= checkpoint_name(jnp.mean(wide, axis=over, keepdims=True), MEAN)
        power = jnp.mean(jnp.square(wide), axis=over, keepdims=True)
        if padding != 1:
            power *= padding
        inverse = checkpoint_name(jax.lax.rsqrt(power + epsilon), INVERSE)
        y = wide * inverse * factor
        return (y if term is None else y + term).astype(x.dtype)

    term = None if shift is None else layout.broadcast_like(shift.astype(float), scale_axes, axes)
    return scaled(x, layout.broadcast_like(wide_scale, scale_axes, axes), term)
