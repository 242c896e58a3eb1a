"""Computes multi-head latent attention, whose cache is one small vector for each token.

DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.errors import UserError
from configs.spec import Count, spec
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import with_axes
from models.api import Cache
from models.attention.context import AttentionContext
from models.attention.layer_cache import read, write
from models.attention.multi_head import SoftmaxAttention
from models.attention.plain import Operands, capped, masked_probs
from models.dropout import Key
from models.initializers import Weights
from models.parts import BlockParts, Norm
from models.sizes import Sizes

Pair = tuple[Array, Array]  # plain and rotated columns, or the latent vector and rotated columns
LATENT = Axis("R", "latent", "compressed keys and values")
ROTATED = Axis("P", "rotated", "columns of a head that positions rotate")
QUERY_LATENT = Axis("O", "query_latent", "compressed queries")


@spec
class Latent(SoftmaxAttention):
    """Compresses keys and values of all heads into one vector per token (MLA).

    d_kv is the width of values, and of a head without its rotated columns.
    """

    axes: ClassVar[tuple[Axis, ...]] = (LATENT, ROTATED, QUERY_LATENT)
    has_narrow_values: ClassVar[bool] = True

    latent: Count
    """Width of the compressed keys and values."""
    rotated: Count = 64
    """Number of rotated columns per head; all heads share the rotated columns of keys."""
    query_latent: Count | None = None
    """Width of compressed queries. None: queries are not compressed."""
    norm: Norm | None = None
    """Normalizes compressed vectors. None: the norm of the block."""

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        SoftmaxAttention.check(self, sizes, block, causal=causal)
        if block.source_attention == self and causal and sizes.has_encoder:
            raise UserError(
                "@Latent(): used as cross-attention.  Legal: attention within a row; set "
                "Block.source_attention = @MultiHead()."
            )
        if block.positions.adds_bias:
            raise UserError(
                f"@Latent(): found positions = @{type(block.positions).__name__}(), which add a "
                "bias to the logits.  Legal: @Rotary() or others without."
            )
        if self.rotated % 2:
            raise UserError(f"Latent.rotated = {self.rotated}: rotation needs an even width.")

    def position_width(self, sizes: Sizes) -> int:
        return self.rotated

    def pair_flops(self, sizes: Sizes) -> int:
        return 2 * sizes.heads * (sizes.d_kv + self.rotated + sizes.d_kv)

    def build(
        self, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ) -> "LatentAttention":
        return LatentAttention(self, parts, sizes, layout, weights)


class LatentAttention(nnx.Module):
    """Attends to keys and values that are products of a compressed vector."""

    def __init__(
        self, spec: Latent, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ):
        self.spec = spec
        self.positions = parts.positions
        self.sizes = sizes
        # Heads are never split along their width: they have columns of two kinds side by side.
        self.layout = layout = with_axes(layout.without("d_kv"), *spec.axes)
        weights = weights.with_axes(*spec.axes)
        weights, source = weights.with_sizes(R=spec.latent, P=spec.rotated), "D"
        norm = spec.norm or parts.norm
        if spec.query_latent is not None:
            weights, source = weights.with_sizes(O=spec.query_latent), "O"
            self.wq_latent_DO = weights.normal("DO", fan_in="D")
            self.q_norm = norm.build_for_heads(layout, weights, "O")
        self.names = (f"wq_{source}JQK", f"wq_rotated_{source}JQP")
        for name in self.names:
            setattr(self, name, weights.normal(name.rpartition("_")[2], fan_in=source))
        self.wkv_latent_DR = weights.normal("DR", fan_in="D")
        self.kv_norm = norm.build_for_heads(layout, weights, "R")
        self.wk_rotated_DP = weights.normal("DP", fan_in="D")
        self.wk_RJK = weights.normal("RJK", fan_in="R")
        self.wv_RJK = weights.normal("RJK", fan_in="R")
        self.wo_JQKD = weights.normal("JQKD", fan_in="JQK")

    @jax.named_scope("latent_attention")
    def __call__(
        self, x_BLD: Array, context: AttentionContext, cache: Cache | None = None, key: Key = None
    ) -> tuple[Array, Cache | None]:
        """Attends within a row, or to the cache after writing the row to it."""
        queries, compressed = self.queries(x_BLD, context), self.compress(x_BLD, context)
        if cache is None:
            y_BJQLK = self.attend(queries, compressed, context, key)
        else:
            for name, new in zip(("latent_BMR", "rotated_BMP"), compressed, strict=True):
                cache = {**cache, name: write(cache[name], new, context.cache_index, axis=1)}
            y_BJQLK = self.attend_to_cache(queries, cache, context)
        y_BLJQK = self.layout.einsum("BJQLK->BLJQK", y_BJQLK)
        return self.layout.einsum("BLJQK,JQKD->BLD", y_BLJQK, self.placed("wo_JQKD")), cache

    def init_cache(self, rows: int, length: int, memory_BMD: Array | None) -> Cache:
        def empty(width: int) -> Array:
            return self.layout.zeros((rows, length, width), "BMr", self.sizes.precision.compute)

        return {"latent_BMR": empty(self.spec.latent), "rotated_BMP": empty(self.spec.rotated)}

    def placed(self, name: str, axes: str = "") -> Array:
        """Returns a weight, resharded by these axes or by the letters of its name."""
        return self.layout.reshard(getattr(self, name)[...], axes or name.rpartition("_")[2])

    def queries(self, x_BLD: Array, context: AttentionContext) -> Pair:
        """Returns the scaled queries: their plain columns, and the rotated ones."""
        einsum, spec, source, x = self.layout.einsum, self.spec, "D", x_BLD
        if spec.query_latent is not None:
            q_BLO = einsum("BLD,DO->BLO", x_BLD, self.wq_latent_DO[...])
            source, x = "O", self.q_norm(q_BLO, "BLO")
        plain, rotated = map(self.placed, self.names)
        q_BLJQK = einsum(f"BL{source},{source}JQK->BLJQK", x, plain)
        q_rotated_BLJQP = einsum(f"BL{source},{source}JQP->BLJQP", x, rotated)
        scale = spec.query_scale or (self.sizes.d_kv + spec.rotated) ** -0.5
        q_BJQLK = einsum("BLJQK->BJQLK", q_BLJQK) * scale
        q_rotated_BJQLP = einsum("BLJQP->BJQLP", q_rotated_BLJQP) * scale
        angles = context.prepared
        return q_BJQLK, self.positions.rotate(self.layout, q_rotated_BJQLP, "BJQLP", angles)

    def compress(self, x_BLD: Array, context: AttentionContext) -> Pair:
        """Returns what the cache keeps of each token; the last axis is never split."""
        einsum, reshard = self.layout.einsum, self.layout.reshard
        latent_BMR = einsum("BMD,DR->BMR", x_BLD, self.wkv_latent_DR[...])
        latent_BMr = self.kv_norm(reshard(latent_BMR, "BMr"), "BMr")
        rotated_BMP = einsum("BMD,DP->BMP", x_BLD, self.wk_rotated_DP[...])
        rotated_BMP = self.positions.rotate(self.layout, rotated_BMP, "BMP", context.prepared)
        return latent_BMr, reshard(rotated_BMP, "BMp")

    def attend(self, queries: Pair, compressed: Pair, context: AttentionContext, key: Key) -> Array:
        """Attends within a row, as in training: expands keys and values to heads."""
        layout = self.layout
        (q_BJQLK, q_rotated_BJQLP), (latent_BMr, rotated_BMp) = queries, compressed
        k_BJMK = layout.einsum("BMr,rJK->BJMK", latent_BMr, self.placed("wk_RJK", "rJK"))
        v_BJMK = layout.einsum("BMr,rJK->BJMK", latent_BMr, self.placed("wv_RJK", "rJK"))
        shape = (*k_BJMK.shape[:3], self.spec.rotated)
        shared_BJMk = layout.broadcast_in_dim(rotated_BMp, shape, (0, 2, 3), "BJMk")
        q_BJQLK = jnp.concatenate([q_BJQLK, layout.reshard(q_rotated_BJQLP, "BJQLk")], axis=-1)
        k_BJMK = jnp.concatenate([k_BJMK, shared_BJMk], axis=-1)
        return self.spec.attend(layout, Operands(q_BJQLK, k_BJMK, v_BJMK), context, key)

    def attend_to_cache(self, queries: Pair, cache: Cache, context: AttentionContext) -> Array:
        """Attends without expanding the cache: queries and outputs absorb the products instead."""
        layout, einsum = self.layout, self.layout.einsum
        q_BJQLK, q_rotated_BJQLP = queries
        latent_BMr, rotated_BMp = read(cache["latent_BMR"]), read(cache["rotated_BMP"])
        assert context.mask_BLM is not None
        wk_rJK, wv_rJK = (self.placed(name, "rJK") for name in ("wk_RJK", "wv_RJK"))
        q_BJQLr = einsum("BJQLK,rJK->BJQLr", q_BJQLK, wk_rJK)
        logits_BJQLM = einsum("BJQLr,BMr->BJQLM", q_BJQLr, latent_BMr, dtype=float)
        q_rotated_BJQLp = layout.reshard(q_rotated_BJQLP, "BJQLp")
        logits_BJQLM += einsum("BJQLp,BMp->BJQLM", q_rotated_BJQLp, rotated_BMp, dtype=float)
        mask_B11LM = layout.broadcast_like(context.mask_BLM, "BLM", "BJQLM")
        probs_BJQLM, sum_BJQL = masked_probs(capped(logits_BJQLM, self.spec.logit_cap), mask_B11LM)
        probs_BJQLM /= layout.broadcast_like(sum_BJQL, "BJQL", "BJQLM")
        y_BJQLr = einsum("BJQLM,BMr->BJQLr", probs_BJQLM.astype(latent_BMr.dtype), latent_BMr)
        return einsum("BJQLr,rJK->BJQLK", y_BJQLr, wv_rJK)
