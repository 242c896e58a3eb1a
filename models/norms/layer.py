"""Subtracts the mean of hidden states, and divides them by their standard deviation."""

import jax
from flax import nnx

from configs.spec import Positive, spec
from layouts.layout import Layout
from models.initializers import Weights
from models.norms.rms import normed
from models.parts import Norm

Array = jax.Array


@spec
class LayerNorm(Norm):
    """Normalizes mean and variance, scales, and adds a bias.  Ba et al. 2016, section 3.1."""

    epsilon: Positive = 1e-5
    """Added to the variance."""
    bias: bool = True
    """Adds a learned bias."""

    def build(self, layout: Layout, weights: Weights) -> "LayerNormLayer":
        return LayerNormLayer(self, layout, weights)


class LayerNormLayer(nnx.Module):
    """Normalizes hidden states."""

    def __init__(self, spec: LayerNorm, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.scale_D = weights.ones("D")
        if spec.bias:
            self.bias_D = weights.zeros("D")

    def __call__(self, x_BLD: Array) -> Array:
        scale_D, epsilon = self.scale_D[...], self.spec.epsilon
        bias_D = self.bias_D[...] if self.spec.bias else None
        y_BLD = normed(self.layout, x_BLD, scale_D, "BLD", epsilon, centered=True, shift=bias_D)
        # A TPU's compiler would compute the gradient of the norm tile by tile in a product.
        return jax.lax.optimization_barrier(y_BLD)
