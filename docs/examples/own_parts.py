"""Examples of your own parts: an attention, positions, a norm, a router and an optimizer.

A run file imports this module (docs/examples/own_parts.gin); Meshloom's own files stay unchanged.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from configs.spec import Fraction, spec
from layouts.layout import Layout
from models.api import WeightInfo
from models.attention.context import AttentionContext
from models.attention.multi_head import MultiHead, MultiHeadAttention
from models.feed_forward.moe.routing import TopK
from models.initializers import Weights
from models.parts import BlockParts, Norm, Positions
from models.positions.rotary import Rotary
from models.sizes import Sizes
from trainer.optimizers import chain
from trainer.optimizers.optimizer import OptimizerSpec
from trainer.optimizers.schedules import Cosine, ScheduleSpec

Array = jax.Array


@spec
class Tempered(MultiHead):
    """Learns a factor for the logits of each head."""

    def build(
        self, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ) -> MultiHeadAttention:
        return TemperedAttention(self, parts, sizes, layout, weights)


class TemperedAttention(MultiHeadAttention):
    """Multiplies the queries of each head by the head's factor."""

    def __init__(
        self, spec: Tempered, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ):
        super().__init__(spec, parts, sizes, layout, weights)
        self.factor_JQ = weights.ones("JQ")

    def project(self, x_BLD: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
        q_BJQLK, k_BJMK, v_BJMK = super().project(x_BLD, context)
        factor_BJQLK = self.layout.broadcast_like(self.factor_JQ[...], "JQ", "BJQLK")
        return q_BJQLK * factor_BJQLK, k_BJMK, v_BJMK


@spec
class PartialRotary(Positions):
    """Rotates the first columns of each head.  Black et al. 2022 (GPT-NeoX-20B), section 2.1.1."""

    share: Fraction = 0.5
    """Fraction of the columns that are rotated."""
    rotary: Rotary = Rotary()
    """Rotation of these columns."""

    def width(self, columns: int) -> int:
        """Returns the number of rotated columns, which is even."""
        return max(2, int(columns * self.share) // 2 * 2)

    def prepare(self, positions_BL: Array, width: int) -> Any:
        return self.rotary.prepare(positions_BL, self.width(width))

    def rotate(self, layout: Layout, x: Array, axes: str, prepared: Any) -> Array:
        whole = axes[:-1] + axes[-1].lower()
        x = layout.reshard(x, whole)
        width = self.width(x.shape[-1])
        rotated = self.rotary.rotate(layout, x[..., :width], whole, prepared)
        return layout.reshard(jnp.concatenate([rotated, x[..., width:]], axis=-1), axes)


@spec
class CenteredNorm(Norm):
    """Subtracts the mean and divides by the standard deviation.  Ba et al. 2016."""

    def build(self, layout: Layout, weights: Weights) -> "CenteredNormLayer":
        return CenteredNormLayer(layout, weights)


class CenteredNormLayer(nnx.Module):
    """Normalizes hidden states."""

    def __init__(self, layout: Layout, weights: Weights):
        self.layout = layout
        self.scale_D = weights.ones("D")
        self.bias_D = weights.zeros("D")

    def __call__(self, x_BLD: Array) -> Array:
        wide_BLD = x_BLD.astype(float)
        centred_BLD = wide_BLD - jnp.mean(wide_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(centred_BLD), axis=-1, keepdims=True)
        scale_BLD, bias_BLD = (
            self.layout.broadcast_like(weight[...].astype(float), "D", "BLD")
            for weight in (self.scale_D, self.bias_D)
        )
        normed_BLD = centred_BLD * jax.lax.rsqrt(variance_BL1 + 1e-6)
        return (normed_BLD * scale_BLD + bias_BLD).astype(x_BLD.dtype)


@spec
class SoftplusTopK(TopK):
    """Selects the k best experts, with gates that are not probabilities."""

    def gates(self, logits_Gse: Array) -> Array:
        return jax.nn.softplus(logits_Gse)

    def probabilities(self, gates_Gse: Array) -> Array:
        return gates_Gse / jnp.sum(gates_Gse, axis=-1, keepdims=True)


@spec
class Lion(OptimizerSpec):
    """Updates weights by the sign of the momentum.  Chen et al. 2023."""

    schedule: ScheduleSpec = Cosine()
    """Learning rate by step."""

    def transform(
        self, steps: int, weights: Mapping[str, WeightInfo], layout: Layout
    ) -> optax.GradientTransformation:
        return chain.finish([optax.scale_by_lion()], 0.01, self.schedule.rate(steps), weights)
