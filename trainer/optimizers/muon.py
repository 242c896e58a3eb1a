"""Makes Muon, which orthogonalizes the updates of matrices, from optax's parts."""

import math

import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from configs.spec import Count, Fraction, Positive, spec
from models.api import WeightInfo
from trainer.optimizers import chain
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.optimizer import Infos


@spec
class Muon(AdamW):
    """Orthogonalizes the momentum of each matrix in the layers; Adam updates all other weights.

    Jordan et al. 2024; update scale and weight decay follow Liu et al. 2025, section 2.2.
    """

    momentum: Fraction = 0.95
    """Decay of the first moment of matrices."""
    iterations: Count = 5
    """Newton-Schulz iterations."""
    update_rms: Positive = 0.2
    """RMS of a matrix's update before the learning rate. The default matches Adam, so that the same
    learning rate and weight decay suit both."""

    def scaling(self, weights: Infos) -> optax.GradientTransformation:
        matrices = {path: info for path, info in weights.items() if is_matrix(path, info)}
        orthogonalized = chain.placed_by_compiler(self.orthogonalize(matrices))
        return chain.split(matrices, orthogonalized, super().scaling(weights))

    def orthogonalize(self, matrices: Infos) -> optax.GradientTransformation:
        """Returns the update of matrices, by path, each with the same root mean square."""

        def dimensions(info: WeightInfo) -> MuonDimensionNumbers:
            axes = range(info.stacked, len(info.axes))
            reads = tuple(axis for axis in axes if info.axes[axis] in info.reads)
            return MuonDimensionNumbers(reads, tuple(axis for axis in axes if axis not in reads))

        def scale(info: WeightInfo) -> float:
            # The root mean square of orthogonal [m, n] is 1 / sqrt(max(m, n)).
            sizes = (math.prod(info.shape[axis] for axis in axes) for axes in dimensions(info))
            return self.update_rms * max(sizes) ** 0.5

        scales = {path: scale(info) for path, info in matrices.items()}
        muon = scale_by_muon(
            ns_steps=self.iterations,
            beta=self.momentum,
            mu_dtype=self.first_moment,
            weight_dimension_numbers={path: dimensions(info) for path, info in matrices.items()},
        )
        rescale = optax.stateless(
            lambda updates, _: {path: scales[path] * update for path, update in updates.items()}
        )
        return optax.chain(muon, rescale)


def is_matrix(path: str, info: WeightInfo) -> bool:
    """Returns whether a weight is a matrix of a layer; embeddings and the softmax are not."""
    reads_all = set(info.axes[info.stacked :]) <= set(info.reads)
    in_layers = info.axes[0] == "layers" or "/first/" in path
    return in_layers and bool(info.reads) and not reads_all
