"""Attends for every head arrangement: packed, cached, grouped or multi-query."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.dropout import dropout
from models.initializers import Weights
from models.positions import Bias, RelativeBias, add_bias, bias_gradient, rotate
from models.spec import TransformerSpec

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Holds masks and positions, which all layers of a stack share."""

    mask_BLM: Array
    """Which keys a query sees."""
    causal: bool
    positions_BL: Array | None = None
    """Of the queries; in self-attention also of the keys."""
    relative_positions: Array | None = None
    """Query position - key position, with axes "LM" or, with a cache, "BLM"."""
    bias: Bias | None = None
    """Added to the logits, where all layers share it."""
    memory_BMD: Array | None = None
    """The encoder's output, for cross-attention."""
    cache_index: Array | None = None
    """Slot of the cache where new keys and values are written."""
    segments_BL: Array | None = None
    """0 at padding; None where each row is a segment without padding, as in decoding."""
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
        segments_BL=segments_BL,
        drop_tokens=drop_tokens,
    )


def cross_context(
    layout: Layout, segments_BL: Array, segments_BM: Array, memory_BMD: Array | None = None
) -> AttentionContext:
    """Lets each token see the whole source of its segment."""
    mask_BLM = same_segment(layout, segments_BL, segments_BM)
    return AttentionContext(mask_BLM, causal=False, memory_BMD=memory_BMD)


def cached_context(
    layout: Layout,
    positions_BL: Array,
    positions_BM: Array,
    mask_BLM: Array,
    cache_index: Array,
) -> AttentionContext:
    """Lets new tokens see what the mask says of a cache; experts drop none of them."""
    query_BL1 = layout.broadcast_like(positions_BL, "BL", "BLM")
    relative_BLM = query_BL1 - layout.broadcast_like(positions_BM, "BM", "BLM")
    return AttentionContext(
        mask_BLM,
        causal=True,
        positions_BL=positions_BL,
        relative_positions=relative_BLM,
        cache_index=cache_index,
        drop_tokens=False,
    )


def same_segment(layout: Layout, segments_BL: Array, segments_BM: Array) -> Array:
    query_BL1 = layout.broadcast_like(segments_BL, "BL", "BLM")
    return query_BL1 == layout.broadcast_like(segments_BM, "BM", "BLM")


class Attention(nnx.Module):
    """Attends with J key/value heads of Q queries each.

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

    @jax.named_scope("attention")
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
            chunks = self.chunks(context)
            return attend_in_chunks(layout, chunks, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)
        probs_BJQLM, sum_BJQL = unnormalized_probs(layout, q_BJQLK, k_BJMK, bias, mask_B11LM)
        sum_BJQL1 = layout.broadcast_like(sum_BJQL, "BJQL", "BJQLM")
        weights_BJQLM = (probs_BJQLM / sum_BJQL1).astype(v_BJMK.dtype)
        weights_BJQLM = dropout(layout, key, rate, weights_BJQLM, "BJQLM")
        return layout.einsum("BJQLM,BJMK->BJQLK", weights_BJQLM, v_BJMK)

    def chunks(self, context: AttentionContext) -> int:
        """Returns the number of slices of queries: one where a slice would leave out nothing.

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


def attend_in_chunks(
    layout: Layout,
    chunks: int,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Bias | None,
    mask_B11LM: Array,
) -> Array:
    """Attends with slices of queries, each over the keys up to its end.

    The causally masked keys beyond are not computed: with n slices, (n - 1) / 2n of the work.
    """
    if chunks == 1:
        return dot_product_attention(layout, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)
    replicated, length, parts = layout.without("length", "memory"), q_BJQLK.shape[3], []
    q_BJQLK = replicated.reshard(q_BJQLK, "BJQLK")
    k_BJMK, v_BJMK = (replicated.reshard(x_BJMK, "BJMK") for x_BJMK in (k_BJMK, v_BJMK))
    step = -(-length // chunks)
    for start in range(0, length, step):
        queries, keys = slice(start, start + step), slice(0, start + step)
        parts.append(
            dot_product_attention(
                replicated,
                q_BJQLK[:, :, :, queries],
                k_BJMK[:, :, keys],
                v_BJMK[:, :, keys],
                None if bias is None else bias.part(queries, keys),
                mask_B11LM[..., queries, keys],
            )
        )
    return layout.reshard(jnp.concatenate(parts, axis=3), "BJQLK")


def unnormalized_probs(
    layout: Layout, q_BJQLK: Array, k_BJMK: Array, bias: Bias | None, mask_B11LM: Array
) -> tuple[Array, Array]:
    """Returns exp(logits - max) and its sum over the keys, both in float32."""
    logits_BJQLM = layout.einsum("BJQLK,BJMK->BJQLM", q_BJQLK, k_BJMK, dtype=jnp.float32)
    if bias is not None:
        logits_BJQLM = add_bias(layout, logits_BJQLM, bias)
    logits_BJQLM = jnp.where(mask_B11LM, logits_BJQLM, -1e9)
    probs_BJQLM = jnp.exp(logits_BJQLM - jnp.max(logits_BJQLM, axis=-1, keepdims=True))
    return probs_BJQLM, jnp.sum(probs_BJQLM, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dot_product_attention(
    layout: Layout,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Bias | None,
    mask_B11LM: Array,
) -> Array:
    """Attends without dropout; the gradient keeps the unnormalized probabilities and nothing else.

    They are divided by their sum after the product, along the head instead of along the keys.
    The sum over the keys that the softmax's gradient needs equals the product of the output and
    its gradient along the head (Dao et al. 2022, appendix B.2).
    """
    return _attention_forward(layout, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)[0]


class Residuals(NamedTuple):
    """Holds what the gradient of attention needs of its forward pass."""

    q_BJQLK: Array
    k_BJMK: Array
    v_BJMK: Array
    bias: Bias | None
    probs_BJQLM: Array
    sum_BJQL: Array
    y_BJQLK: Array


def _attention_forward(
    layout: Layout,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Bias | None,
    mask_B11LM: Array,
) -> tuple[Array, Residuals]:
    probs_BJQLM, sum_BJQL = unnormalized_probs(layout, q_BJQLK, k_BJMK, bias, mask_B11LM)
    probs_BJQLM = probs_BJQLM.astype(v_BJMK.dtype)
    y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", probs_BJQLM, v_BJMK, dtype=jnp.float32)
    y_BJQLK = y_BJQLK / layout.broadcast_like(sum_BJQL, "BJQL", "BJQLK")
    y_BJQLK = y_BJQLK.astype(v_BJMK.dtype)
    bias = None if bias is None else bias._replace(values=None)  # its gradient needs none
    return y_BJQLK, Residuals(q_BJQLK, k_BJMK, v_BJMK, bias, probs_BJQLM, sum_BJQL, y_BJQLK)


def _attention_backward(
    layout: Layout, residuals: Residuals, dy_BJQLK: Array
) -> tuple[Array, Array, Array, Bias | None, None]:
    einsum, like = layout.einsum, layout.broadcast_like
    q_BJQLK, k_BJMK, v_BJMK, bias, probs_BJQLM, sum_BJQL, y_BJQLK = residuals
    wide_BJQLK = dy_BJQLK.astype(jnp.float32) / like(sum_BJQL, "BJQL", "BJQLK")
    dot_BJQL = jnp.sum(wide_BJQLK * y_BJQLK.astype(jnp.float32), axis=-1)
    dy_BJQLK = wide_BJQLK.astype(dy_BJQLK.dtype)
    dprobs_BJQLM = einsum("BJQLK,BJMK->BJQLM", dy_BJQLK, v_BJMK, dtype=jnp.float32)
    dprobs_BJQLM = dprobs_BJQLM - like(dot_BJQL, "BJQL", "BJQLM")
    dlogits_BJQLM = probs_BJQLM.astype(jnp.float32) * dprobs_BJQLM
    dbias = None if bias is None else bias_gradient(layout, bias, dlogits_BJQLM)
    dlogits_BJQLM = dlogits_BJQLM.astype(q_BJQLK.dtype)
    return (
        einsum("BJQLM,BJMK->BJQLK", dlogits_BJQLM, k_BJMK),
        einsum("BJQLM,BJQLK->BJMK", dlogits_BJQLM, q_BJQLK),
        einsum("BJQLM,BJQLK->BJMK", probs_BJQLM, dy_BJQLK),
        dbias,
        None,
    )


dot_product_attention.defvjp(_attention_forward, _attention_backward)
