"""Computes attention: packed or cached, with all, grouped or single key/value heads."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layouts.einsum import platform
from layouts.layout import Layout
from models.api import Cache
from models.attention.context import AttentionContext
from models.attention.flash import Kernel, flash_attention
from models.attention.plain import attend_in_chunks, attend_with_dropout
from models.initializers import Weights
from models.norms import HeadNorm
from models.positions import RelativeBias, Rotation, rotate
from models.spec import TransformerSpec

Array = jax.Array


class Attention(nnx.Module):
    """Computes attention with J key/value heads, each shared by Q query heads.

    Vaswani et al. 2017, section 3.2; grouped heads after Ainslie et al. 2023.
    """

    is_self_attention = True

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.wq_DJQK = weights.normal("DJQK", fan_in="D")
        self.wk_DJK = weights.normal("DJK", fan_in="D")
        self.wv_DJK = weights.normal("DJK", fan_in="D")
        self.wo_JQKD = weights.normal("JQKD", fan_in="JQK")
        if spec.attention_biases != "none":
            self.bq_JQK = weights.zeros("JQK")
            self.bk_JK = weights.zeros("JK")
            self.bv_JK = weights.zeros("JK")
        if spec.attention_biases == "all":
            self.bo_D = weights.zeros("D")
        if spec.qk_norm:
            self.q_norm = HeadNorm(spec, layout, weights)
            self.k_norm = HeadNorm(spec, layout, weights)
        biased = spec.positions == "relative" and not spec.shares_bias and self.is_self_attention
        self.bias = RelativeBias(spec, layout, weights) if biased else None

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Attends within a row, or to the cache after the row is written to it."""
        q_BJQLK, k_BJMK, v_BJMK = self.project(x_BLD, context.rotation)
        if cache is None:
            y_BJQLK = self.attend(q_BJQLK, k_BJMK, v_BJMK, context, key)
        else:
            k_BJMK = write(cache["keys_BJMK"], k_BJMK, context.cache_index)
            v_BJMK = write(cache["values_BJMK"], v_BJMK, context.cache_index)
            cache = {**cache, "keys_BJMK": k_BJMK, "values_BJMK": v_BJMK}
            y_BJQLK = self.attend(q_BJQLK, k_BJMK, v_BJMK, context, None)
        return self.out(y_BJQLK), cache

    def init_cache(self, sizes: Mapping[str, int], memory_BMD: Array | None) -> Cache:
        """Makes an empty cache for rows of these sizes, by letter."""
        shape = [sizes[letter] for letter in "BJMK"]
        empty_BJMK = jnp.zeros(shape, self.spec.precision.compute)
        empty_BJMK = self.layout.reshard(empty_BJMK, "BJMK")
        return {"keys_BJMK": empty_BJMK, "values_BJMK": empty_BJMK}

    def out(self, y_BJQLK: Array) -> Array:
        y_BLJQK = self.layout.einsum("BJQLK->BLJQK", y_BJQLK)
        y_BLD = self.layout.einsum("BLJQK,JQKD->BLD", y_BLJQK, self.wo_JQKD[...])
        if self.spec.attention_biases == "all":
            y_BLD += self.layout.broadcast_like(self.bo_D[...], "D", "BLD")
        return checkpoint_name(y_BLD, "out_proj")

    def project(self, x_BLD: Array, rotation: Rotation | None) -> tuple[Array, Array, Array]:
        """Projects a row to queries, keys and values."""
        einsum, reshard = self.layout.einsum, self.layout.reshard
        if self.spec.combined_qkv:
            q_BLJQK, k_BMJK, v_BMJK = self.project_combined(x_BLD)
        else:
            q_BLJQK = einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
            k_BMJK = einsum("BMD,DJK->BMJK", x_BLD, self.wk_DJK[...])
            v_BMJK = einsum("BMD,DJK->BMJK", x_BLD, self.wv_DJK[...])
        q_BJQLK = self.to_queries(q_BLJQK)
        k_BJMK, v_BJMK = self.to_keys_and_values(k_BMJK, v_BMJK)
        if self.spec.positions == "rotary":
            assert rotation is not None
            q_BJQLk, k_BJMk = reshard(q_BJQLK, "BJQLk"), reshard(k_BJMK, "BJMk")
            q_BJQLK = reshard(rotate(self.layout, q_BJQLk, "BJQLk", rotation), "BJQLK")
            k_BJMK = reshard(rotate(self.layout, k_BJMk, "BJMk", rotation), "BJMK")
        return q_BJQLK, k_BJMK, v_BJMK

    def to_queries(self, q_BLJQK: Array) -> Array:
        """Adds the bias of queries, normalizes and scales them, and puts heads before positions."""
        q_BLJQK = checkpoint_name(q_BLJQK, "query_proj")
        if self.spec.attention_biases != "none":
            q_BLJQK += self.layout.broadcast_like(self.bq_JQK[...], "JQK", "BLJQK")
        q_BJQLK = self.layout.einsum("BLJQK->BJQLK", q_BLJQK)
        if self.spec.qk_norm:
            q_BJQLK = self.q_norm(q_BJQLK, "BJQLK")
        return q_BJQLK * self.spec.scales[1]

    def to_keys_and_values(self, k_BMJK: Array, v_BMJK: Array) -> tuple[Array, Array]:
        """Adds the biases of keys and values, normalizes keys, and puts heads before positions."""
        k_BMJK = checkpoint_name(k_BMJK, "key_proj")
        v_BMJK = checkpoint_name(v_BMJK, "value_proj")
        if self.spec.attention_biases != "none":
            k_BMJK += self.layout.broadcast_like(self.bk_JK[...], "JK", "BMJK")
            v_BMJK += self.layout.broadcast_like(self.bv_JK[...], "JK", "BMJK")
        k_BJMK, v_BJMK = (self.layout.einsum("BMJK->BJMK", x_BMJK) for x_BMJK in (k_BMJK, v_BMJK))
        return self.k_norm(k_BJMK, "BJMK") if self.spec.qk_norm else k_BJMK, v_BJMK

    def project_combined(self, x_BLD: Array) -> tuple[Array, Array, Array]:
        """Computes the three projections as one product over Q + 2 columns of heads."""
        reshard, queries = self.layout.reshard, self.spec.queries
        parts = (self.wq_DJQK[...], self.wk_DJK[:, :, None], self.wv_DJK[:, :, None])
        w_DJqK = jnp.concatenate([reshard(part, "DJqK", stored=True) for part in parts], axis=2)
        qkv_BLJqK = self.layout.einsum("BLD,DJqK->BLJqK", x_BLD, w_DJqK)
        q_BLJqK, k_BLJ1K, v_BLJ1K = jax.lax.split(qkv_BLJqK, (queries, 1, 1), axis=3)
        k_BMJK, v_BMJK = (reshard(part[:, :, :, 0], "BMJK") for part in (k_BLJ1K, v_BLJ1K))
        return reshard(q_BLJqK, "BLJQK"), k_BMJK, v_BMJK

    def attend(
        self,
        q_BJQLK: Array,
        k_BJMK: Array,
        v_BJMK: Array,
        context: AttentionContext,
        key: Array | None,
    ) -> Array:
        """Averages the values by the softmax of query-key products."""
        if context.kernel is not None:
            return self.attend_by_kernel(context.kernel, q_BJQLK, k_BJMK, v_BJMK, context)
        assert context.mask_BLM is not None
        layout, rate = self.layout, self.spec.attention_dropout
        bias = context.bias
        if self.bias is not None:
            assert context.relative_positions is not None
            bias = self.bias(context.relative_positions, context.causal)
        mask_B11LM = layout.broadcast_like(context.mask_BLM, "BLM", "BJQLM")
        if key is None or not rate:
            chunks = self.chunks(context)
            return attend_in_chunks(layout, chunks, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)
        return attend_with_dropout(layout, key, rate, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)

    def attend_by_kernel(
        self,
        kernel: Kernel,
        q_BJQLK: Array,
        k_BJMK: Array,
        v_BJMK: Array,
        context: AttentionContext,
    ) -> Array:
        """Does the same by a kernel, which needs segments in place of a mask."""
        segments_BL, segments_BM = context.segments_BL, context.segments_BM
        assert segments_BL is not None
        return flash_attention(
            self.layout,
            kernel,
            q_BJQLK,
            k_BJMK,
            v_BJMK,
            segments_BL,
            segments_BL if segments_BM is None else segments_BM,
            causal=context.causal,
        )

    def chunks(self, context: AttentionContext) -> int:
        """Returns the number of slices of queries: one where a slice would skip no keys.

        Each of the devices that share the length has few queries, of which the last see all keys.
        """
        is_split = any(self.layout.place("BJQLM")[-2:])
        is_causal_row = context.causal and context.cache_index is None
        return self.spec.attention_chunks if is_causal_row and not is_split else 1


class CrossAttention(Attention):
    """Attends to an encoded source: queries of the row, keys and values of the source."""

    is_self_attention = False

    @jax.named_scope("source_attention")
    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Attends to the source, whose keys and values are in the cache if there is one."""
        q_BLJQK = self.layout.einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
        q_BJQLK = self.to_queries(q_BLJQK)
        if cache is None:
            assert context.memory_BMD is not None
            k_BJMK, v_BJMK = self.project_source(context.memory_BMD)
        else:
            k_BJMK, v_BJMK = cache["source_keys_BJMK"], cache["source_values_BJMK"]
        return self.out(self.attend(q_BJQLK, k_BJMK, v_BJMK, context, key)), cache

    def init_cache(self, sizes: Mapping[str, int], memory_BMD: Array | None) -> Cache:
        """Makes a cache of the encoded source's keys and values."""
        assert memory_BMD is not None
        k_BJMK, v_BJMK = self.project_source(memory_BMD)
        return {"source_keys_BJMK": k_BJMK, "source_values_BJMK": v_BJMK}

    def project_source(self, memory_BMD: Array) -> tuple[Array, Array]:
        """Projects an encoded source to keys and values, once for all decoded tokens."""
        einsum = self.layout.einsum
        k_BMJK = einsum("BMD,DJK->BMJK", memory_BMD, self.wk_DJK[...])
        v_BMJK = einsum("BMD,DJK->BMJK", memory_BMD, self.wv_DJK[...])
        return self.to_keys_and_values(k_BMJK, v_BMJK)


def write(cache_BJMK: Array, new_BJMK: Array, cache_index: Array | None) -> Array:
    """Writes a row's keys (or values) to the cache, whose positions are never sharded."""
    assert cache_index is not None

    def write_row(cache_BJMK: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(cache_BJMK, new_BJMK, cache_index, axis=2)

    if platform() != "cpu":
        return write_row(cache_BJMK)
    # XLA's CPU backend fuses an update with each of its readers, and copies the cache for each; a
    # branch keeps them apart.
    return jax.lax.cond(cache_index >= 0, write_row, lambda cache_BJMK: cache_BJMK, cache_BJMK)
