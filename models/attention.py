"""Attention for every head arrangement: packed, cached, grouped or multi-query."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.dropout import dropout
from models.initializers import Weights
from models.positions import RelativeBias, rotate
from models.spec import TransformerSpec

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Masks and positions, shared by all layers of a stack."""

    mask_BLM: Array
    """Which keys a query sees."""
    causal: bool
    positions_BL: Array | None = None
    """Of the queries; in self-attention also of the keys."""
    relative_positions: Array | None = None
    """Query position - key position, with axes "LM" or, with a cache, "BLM"."""
    bias: Array | None = None
    """Added to the logits, where all layers share it."""
    memory_BMD: Array | None = None
    """The encoder's output, for cross-attention."""
    cache_index: Array | None = None
    """Slot of the cache where new keys and values are written."""
    is_token_BL: Array | None = None
    """False at padding; None where every position holds a token, as in decoding."""
    drop_tokens: bool = True
    """Whether experts drop the tokens beyond their capacity."""


def packed_context(
    layout: Layout,
    positions_BL: Array,
    segments_BL: Array,
    *,
    causal: bool = True,
    drop_tokens: bool = True,
) -> AttentionContext:
    """Lets each token see its own segment: all of it, or in causal attention up to itself."""
    length = segments_BL.shape[1]
    query_LM = layout.iota("LM", (length, length), "L")
    relative_LM = query_LM - layout.iota("LM", (length, length), "M")
    mask_BLM = same_segment(layout, segments_BL, segments_BL)
    if causal:
        mask_BLM &= layout.broadcast_like(relative_LM >= 0, "LM", "BLM")
    return AttentionContext(
        mask_BLM,
        causal,
        positions_BL,
        relative_LM,
        is_token_BL=segments_BL > 0,
        drop_tokens=drop_tokens,
    )


def cross_context(
    layout: Layout, segments_BL: Array, segments_BM: Array, memory_BMD: Array | None = None
) -> AttentionContext:
    """Lets each token see the whole source of its segment."""
    mask_BLM = same_segment(layout, segments_BL, segments_BM)
    return AttentionContext(mask_BLM, causal=False, memory_BMD=memory_BMD)


def same_segment(layout: Layout, segments_BL: Array, segments_BM: Array) -> Array:
    query_BL1 = layout.broadcast_like(segments_BL, "BL", "BLM")
    return query_BL1 == layout.broadcast_like(segments_BM, "BM", "BLM")


class Attention(nnx.Module):
    """Multi-head attention with J key/value heads of Q queries each.

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
        biased = spec.positions == "relative" and not spec.shares_bias and self.is_self_attention
        self.bias = RelativeBias(spec, layout, weights) if biased else None

    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Attends within a row, or to the cache after the row is written to it."""
        q_BJQLK, k_BJMK, v_BJMK = self.project(x_BLD, context.positions_BL)
        if cache is None:
            y_BJQLK = self.attend_in_chunks(q_BJQLK, k_BJMK, v_BJMK, context, key)
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
        return self.layout.einsum("BLJQK,JQKD->BLD", y_BLJQK, self.wo_JQKD[...])

    def project(self, x_BLD: Array, positions_BL: Array | None) -> tuple[Array, Array, Array]:
        """Projects a row to queries, keys and values."""
        einsum, reshard = self.layout.einsum, self.layout.reshard
        if self.spec.combined_qkv:
            q_BLJQK, k_BMJK, v_BMJK = self.project_combined(x_BLD)
        else:
            q_BLJQK = einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
            k_BMJK = einsum("BMD,DJK->BMJK", x_BLD, self.wk_DJK[...])
            v_BMJK = einsum("BMD,DJK->BMJK", x_BLD, self.wv_DJK[...])
        q_BJQLK = einsum("BLJQK->BJQLK", q_BLJQK) * self.spec.scales[1]
        k_BJMK, v_BJMK = einsum("BMJK->BJMK", k_BMJK), einsum("BMJK->BJMK", v_BMJK)
        if self.spec.positions == "rotary":
            assert positions_BL is not None
            q_BJQLk, k_BJMk = reshard(q_BJQLK, "BJQLk"), reshard(k_BJMK, "BJMk")
            q_BJQLK = reshard(rotate(self.layout, q_BJQLk, "BJQLk", positions_BL), "BJQLK")
            k_BJMK = reshard(rotate(self.layout, k_BJMk, "BJMk", positions_BL), "BJMK")
        return q_BJQLK, k_BJMK, v_BJMK

    def project_combined(self, x_BLD: Array) -> tuple[Array, Array, Array]:
        """Computes the three projections as one product over Q + 2 columns of heads."""
        reshard, queries = self.layout.reshard, self.spec.queries
        parts = (self.wq_DJQK[...], self.wk_DJK[:, :, None], self.wv_DJK[:, :, None])
        w_DJqK = jnp.concatenate([reshard(part, "DJqK", stored=True) for part in parts], axis=2)
        qkv_BLJqK = self.layout.einsum("BLD,DJqK->BLJqK", x_BLD, w_DJqK)
        q_BLJqK, k_BLJ1K, v_BLJ1K = jax.lax.split(qkv_BLJqK, (queries, 1, 1), axis=3)
        k_BMJK, v_BMJK = (reshard(part[:, :, :, 0], "BMJK") for part in (k_BLJ1K, v_BLJ1K))
        return reshard(q_BLJqK, "BLJQK"), k_BMJK, v_BMJK

    def attend_in_chunks(
        self,
        q_BJQLK: Array,
        k_BJMK: Array,
        v_BJMK: Array,
        context: AttentionContext,
        key: Array | None,
    ) -> Array:
        """Attends with slices of queries, each over the keys up to its end.

        The causally masked keys beyond are not computed: with n slices, (n - 1) / 2n of the work.
        """
        chunks, length = self.spec.attention_chunks, q_BJQLK.shape[3]
        has_dropout = key is not None and self.spec.attention_dropout > 0
        if (
            chunks == 1 or has_dropout or not context.causal
        ):  # random bits are drawn for all weights at once
            return self.attend(q_BJQLK, k_BJMK, v_BJMK, context, key)
        reshard, step, parts = self.layout.reshard, -(-length // chunks), []
        q_BJQlK, k_BJmK, v_BJmK = (
            reshard(q_BJQLK, "BJQlK"),
            reshard(k_BJMK, "BJmK"),
            reshard(v_BJMK, "BJmK"),
        )
        assert context.relative_positions is not None
        mask_Blm, relative_lm = (
            reshard(context.mask_BLM, "Blm"),
            reshard(context.relative_positions, "lm"),
        )
        for start in range(0, length, step):
            queries, keys = slice(start, start + step), slice(0, start + step)
            part = AttentionContext(
                mask_Blm[:, queries, keys],
                causal=True,
                relative_positions=relative_lm[queries, keys],
                bias=None
                if context.bias is None
                else reshard(context.bias, "BJQlm")[..., queries, keys],
            )
            k_part, v_part = k_BJmK[:, :, keys], v_BJmK[:, :, keys]
            parts.append(self.attend(q_BJQlK[:, :, :, queries], k_part, v_part, part, None))
        return reshard(jnp.concatenate(parts, axis=3), "BJQLK")

    def attend(
        self,
        q_BJQLK: Array,
        k_BJMK: Array,
        v_BJMK: Array,
        context: AttentionContext,
        key: Array | None,
    ) -> Array:
        """Averages the values by the softmax of query-key products."""
        layout, rate = self.layout, self.spec.attention_dropout
        bias = context.bias
        if self.bias is not None:
            assert context.relative_positions is not None
            bias = self.bias(context.relative_positions, context.causal)
        mask_B11LM = layout.broadcast_like(context.mask_BLM, "BLM", "BJQLM")
        if key is None or not rate:
            return dot_product_attention(layout, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)
        probs_BJQLM, sum_BJQL1 = unnormalized_probs(layout, q_BJQLK, k_BJMK, bias, mask_B11LM)
        weights_BJQLM = (probs_BJQLM / sum_BJQL1).astype(v_BJMK.dtype)
        weights_BJQLM = dropout(layout, key, rate, weights_BJQLM, "BJQLM")
        return layout.einsum("BJQLM,BJMK->BJQLK", weights_BJQLM, v_BJMK)


class CrossAttention(Attention):
    """Attention to an encoded source: queries of the row, keys and values of the source."""

    is_self_attention = False

    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Attends to the source, whose keys and values are in the cache where there is one."""
        q_BLJQK = self.layout.einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
        q_BJQLK = self.layout.einsum("BLJQK->BJQLK", q_BLJQK) * self.spec.scales[1]
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
        return einsum("BMJK->BJMK", k_BMJK), einsum("BMJK->BJMK", v_BMJK)


def write(cache_BJMK: Array, new_BJMK: Array, cache_index: Array | None) -> Array:
    """Writes a row's keys (or values) to the cache, whose slots are never split over devices."""
    assert cache_index is not None
    return jax.lax.dynamic_update_slice_in_dim(cache_BJMK, new_BJMK, cache_index, axis=2)


def unnormalized_probs(
    layout: Layout, q_BJQLK: Array, k_BJMK: Array, bias: Array | None, mask_B11LM: Array
) -> tuple[Array, Array]:
    """Returns exp(logits - max) and its sum over the keys, both in float32."""
    scores_BJQLM = layout.einsum("BJQLK,BJMK->BJQLM", q_BJQLK, k_BJMK, dtype=jnp.float32)
    if bias is not None:
        scores_BJQLM = scores_BJQLM + bias
    scores_BJQLM = jnp.where(mask_B11LM, scores_BJQLM, -1e9)
    probs_BJQLM = jnp.exp(scores_BJQLM - jnp.max(scores_BJQLM, axis=-1, keepdims=True))
    return probs_BJQLM, jnp.sum(probs_BJQLM, axis=-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dot_product_attention(
    layout: Layout,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Array | None,
    mask_B11LM: Array,
) -> Array:
    """Attends without dropout; the gradient keeps the unnormalized probabilities and nothing else.

    They are divided by their sum after the product, along the head instead of along the keys.
    The sum over the keys that the softmax's gradient needs equals the product of the output and
    its gradient along the head (Dao et al. 2022, appendix B.2).
    """
    return _attention_forward(layout, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)[0]


def _attention_forward(
    layout: Layout,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Array | None,
    mask_B11LM: Array,
) -> tuple[Array, tuple[Array | None, ...]]:
    probs_BJQLM, sum_BJQL1 = unnormalized_probs(layout, q_BJQLK, k_BJMK, bias, mask_B11LM)
    probs_BJQLM = probs_BJQLM.astype(v_BJMK.dtype)
    y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", probs_BJQLM, v_BJMK, dtype=jnp.float32)
    y_BJQLK = (y_BJQLK / sum_BJQL1).astype(v_BJMK.dtype)
    return y_BJQLK, (q_BJQLK, k_BJMK, v_BJMK, bias, probs_BJQLM, sum_BJQL1, y_BJQLK)


def _attention_backward(
    layout: Layout, residuals: tuple[Array, ...], dy_BJQLK: Array
) -> tuple[Array | None, ...]:
    einsum = layout.einsum
    q_BJQLK, k_BJMK, v_BJMK, bias, probs_BJQLM, sum_BJQL1, y_BJQLK = residuals
    wide_BJQLK = dy_BJQLK.astype(jnp.float32) / sum_BJQL1
    dot_BJQL1 = jnp.sum(wide_BJQLK * y_BJQLK.astype(jnp.float32), axis=-1, keepdims=True)
    dy_BJQLK = wide_BJQLK.astype(dy_BJQLK.dtype)
    dprobs_BJQLM = einsum("BJQLK,BJMK->BJQLM", dy_BJQLK, v_BJMK, dtype=jnp.float32)
    dscores_BJQLM = probs_BJQLM.astype(jnp.float32) * (dprobs_BJQLM - dot_BJQL1)
    dbias = None if bias is None else dscores_BJQLM
    if bias is not None and bias.shape[0] == 1:  # all rows share it
        dbias = jnp.sum(dscores_BJQLM, axis=0, keepdims=True)
    dscores_BJQLM = dscores_BJQLM.astype(q_BJQLK.dtype)
    return (
        einsum("BJQLM,BJMK->BJQLK", dscores_BJQLM, k_BJMK),
        einsum("BJQLM,BJQLK->BJMK", dscores_BJQLM, q_BJQLK),
        einsum("BJQLM,BJQLK->BJMK", probs_BJQLM, dy_BJQLK),
        dbias,
        None,
    )


dot_product_attention.defvjp(_attention_forward, _attention_backward)
