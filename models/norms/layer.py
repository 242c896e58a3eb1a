"""Subtracts the mean of hidden states, and divides them by their standard deviation."""

from configs.spec import Positive, spec
from layouts.layout import Layout
from models.initializers import Weights
from models.norms.rms import NormNetwork
from models.parts import Norm


@spec
class LayerNorm(Norm):
    """Normalizes mean and variance, scales, and adds a bias.  Ba et al. 2016, section 3.1."""

    epsilon: Positive = 1e-5
    """Added to the variance."""
    bias: bool = True
    """Adds a learned bias."""

    def build(self, layout: Layout, weights: Weights) -> NormNetwork:
        return NormNetwork(layout, weights, self.epsilon, centered=True, biased=self.bias)
