"""Adds a learned vector for each position to embeddings."""

from typing import ClassVar

from flax import nnx
from jax import Array

from configs.errors import UserError
from configs.spec import CountOrZero, spec
from layouts.layout import Layout
from models.initializers import Weights
from models.parts import BlockParts, Positions
from models.sizes import Sizes


@spec
class Learned(Positions):
    """Learns a vector for each of the first `Transformer.length` positions."""

    changes_embeddings: ClassVar[bool] = True

    by_stack: bool = False
    """Encoder and decoder have a table each, as in BART."""
    scaled: bool = True
    """Transformer.embed_scale multiplies the vectors as it does the embeddings of tokens."""
    first: CountOrZero = 0
    """Row of the table for the first position, 2 in BART: the rows before it are not used."""

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        if self.by_stack and not sizes.has_encoder:
            raise UserError(
                "Learned.by_stack = True: the model has no encoder.  Set "
                "Transformer.encoder_layers, or unset Learned.by_stack."
            )

    def max_length(self, sizes: Sizes) -> int:
        return sizes.length

    def build_table(self, weights: Weights) -> nnx.Param:
        return weights.with_sizes(L=weights.sizes["L"] + self.first).normal("LD", fan_in="D")

    def build_source_table(self, weights: Weights) -> nnx.Param | None:
        return self.build_table(weights) if self.by_stack else None

    def embed(
        self,
        layout: Layout,
        x_BLD: Array,
        positions_BL: Array,
        table_LD: Array | None,
        scale: float,
    ) -> Array:
        assert table_LD is not None
        vectors_BLD = layout.take(table_LD, positions_BL + self.first, "BLD").astype(x_BLD.dtype)
        return (x_BLD + vectors_BLD) * scale if self.scaled else x_BLD * scale + vectors_BLD
