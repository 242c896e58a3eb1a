"""Adds a vector for each position to embeddings: learned, sinusoidal, or none."""

from typing import ClassVar

import jax.numpy as jnp
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
    """Encoder and decoder have separate tables, as in BART."""
    scaled: bool = True
    """Transformer.embed_scale also multiplies these vectors, not only token embeddings."""
    first: CountOrZero = 0
    """Row of the table for the first position; earlier rows are unused. BART uses 2."""

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
        self, layout: Layout, x_BLD: Array, positions_BL: Array, table_LD: Array | None,
        scale: float,
    ) -> Array:  # fmt: skip
        assert table_LD is not None
        vectors_BLD = layout.take(table_LD, positions_BL + self.first, "BLD").astype(x_BLD.dtype)
        return (x_BLD + vectors_BLD) * scale if self.scaled else x_BLD * scale + vectors_BLD


@spec
class Sinusoidal(Positions):
    """Adds sinusoids to embeddings.  Vaswani et al. 2017, section 3.5."""

    changes_embeddings: ClassVar[bool] = True

    inclusive: bool = True
    """The longest wavelength is exactly 2 pi 10,000 positions, as in Tensor2Tensor; otherwise it is
    shorter, as in the paper and in Marian."""
    first: CountOrZero = 0
    """Position of the first token; M2M-100 uses 2."""

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        if sizes.d_model % 2:
            raise UserError(f"Transformer.d_model = {sizes.d_model}: sinusoids need an even width.")

    def embed(
        self, layout: Layout, x_BLD: Array, positions_BL: Array, table_LD: Array | None,
        scale: float,
    ) -> Array:  # fmt: skip
        half = x_BLD.shape[-1] // 2
        steps = max(half - 1, 1) if self.inclusive else half
        rates_d = 10_000.0 ** (-jnp.arange(half) / steps)
        angles_BLd = jnp.einsum("BL,d->BLd", (positions_BL + self.first).astype(float), rates_d)
        waves_BLd = jnp.concatenate([jnp.sin(angles_BLd), jnp.cos(angles_BLd)], axis=-1)
        return x_BLD * scale + layout.reshard(waves_BLd, "BLD")


@spec
class NoPositions(Positions):
    """Lets a causal decoder infer positions from its mask.  Kazemnejad et al. 2023 (NoPE)."""
