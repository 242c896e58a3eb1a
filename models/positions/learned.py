"""Adds a learned vector for each position to embeddings."""

from typing import ClassVar

import jax
from flax import nnx

from configs.spec import spec
from layouts.layout import Layout
from models.initializers import Weights
from models.parts import Positions
from models.sizes import Sizes

Array = jax.Array


@spec
class Learned(Positions):
    """Learns a vector for each of the first `Transformer.length` positions."""

    changes_embeddings: ClassVar[bool] = True

    def max_length(self, sizes: Sizes) -> int:
        return sizes.length

    def build_table(self, weights: Weights) -> nnx.Param:
        return weights.normal("LD", fan_in="D")

    def embed(
        self,
        layout: Layout,
        x_BLD: Array,
        positions_BL: Array,
        table_LD: Array | None,
        scale: float,
    ) -> Array:
        assert table_LD is not None
        return (x_BLD + layout.take(table_LD, positions_BL, "BLD").astype(x_BLD.dtype)) * scale
