"""Adds sines and cosines of the position to embeddings."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from configs.errors import UserError
from configs.spec import CountOrZero, spec
from layouts.layout import Layout
from models.parts import BlockParts, Positions
from models.sizes import Sizes


@spec
class Sinusoidal(Positions):
    """Adds sinusoids to embeddings.  Vaswani et al. 2017, section 3.5."""

    changes_embeddings: ClassVar[bool] = True

    inclusive: bool = True
    """The longest wave has exactly 2 pi 10,000 positions, as in Tensor2Tensor; otherwise it is
    shorter, as in the paper and in Marian."""
    first: CountOrZero = 0
    """Position of the first token, as in M2M-100, where it is 2."""

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        if sizes.d_model % 2:
            raise UserError(f"Transformer.d_model = {sizes.d_model}: sinusoids need an even width.")

    def embed(
        self,
        layout: Layout,
        x_BLD: Array,
        positions_BL: Array,
        table_LD: Array | None,
        scale: float,
    ) -> Array:
        half = x_BLD.shape[-1] // 2
        steps = max(half - 1, 1) if self.inclusive else half
        rates_d = 10_000.0 ** (-jnp.arange(half) / steps)
        angles_BLd = jnp.einsum("BL,d->BLd", (positions_BL + self.first).astype(float), rates_d)
        waves_BLd = jnp.concatenate([jnp.sin(angles_BLd), jnp.cos(angles_BLd)], axis=-1)
        return x_BLD * scale + layout.reshard(waves_BLd, "BLD")
