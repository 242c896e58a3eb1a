"""One attention for every head arrangement: packed, cached, grouped or multi-query."""

import dataclasses
import functools

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
class View:
    """Who stands where and who may see whom, the same for every layer."""

    mask_BLM: Array
    causal: bool
    positions_BL: Array | None = None
    """Of the queries, and of the memory where that is the same row."""
    behind: Array | None = None
    """How many places a memory stands behind a query, with axes "LM" or, cached, "BLM"."""
    bias: Array | None = None
    """What to add to the scores, where all layers share it."""
    memory_BMD: Array | None = None
    """The other side, where it is not the row itself."""
    place: Array | None = None
    """Where in the cache the row goes."""
    real_BL: Array | None = None
    """Which places of the row hold a token; in decoding all do."""


def packed_view(
    layout: Layout, positions_BL: Array, segments_BL: Array, *, causal: bool = True
) -> View:
    """Each token sees its own segment: all of it, or in causal attention up to itself."""
    length = segments_BL.shape[1]
    query_LM = layout.iota("LM", (length, length), "L")
    behind_LM = query_LM - layout.iota("LM", (length, length), "M")
    same_BLM = same_segment(layout, segments_BL, segments_BL)
    if causal:
        same_BLM &= layout.broadcast_like(behind_LM >= 0, "LM", "BLM")
    return View(same_BLM, causal, positions_BL, behind_LM, real_BL=segments_BL > 0)


def source_view(
    layout: Layout, segments_BL: Array, segments_BM: Array, memory_BMD: Array | None = None
) -> View:
    """Each token sees the whole source of its segment."""
    mask_BLM = same_segment(layout, segments_BL, segments_BM)
    return View(mask_BLM, causal=False, memory_BMD=memory_BMD)


def same_segment(layout: Layout, segments_BL: Array, segments_BM: Array) -> Array:
    query_BL1 = layout.broadcast_like(segments_BL, "BL", "BLM")
    return query_BL1 == layout.broadcast_like(segments_BM, "BM", "BLM")


class Attention(nnx.Module):
    """Multi-head attention with J key/value heads of Q queries each.

    Vaswani et al. 2017, section 3.2; grouped heads after Ainslie et al. 2023.
    """

    sees_itself = True

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.wq_DJQK = weights.normal("DJQK", fan_in="D")
        self.wk_DJK = weights.normal("DJK", fan_in="D")
        self.wv_DJK = weights.normal("DJK", fan_in="D")
        self.wo_JQKD = weights.normal("JQKD", fan_in="JQK")
        biased = spec.positions == "relative" and not spec.shares_bias and self.sees_itself
        self.bias = RelativeBias(spec, layout, weights) if biased else None

    def __call__(
        self, x_BLD: Array, view: View, cache: Cache | None = None, key: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """What each token of a row takes from the row, and the cache with the row in it."""
        q_BJQLK, k_BJMK, v_BJMK = self.project(x_BLD, view.positions_BL)
        if cache is None:
            y_BJQLK = self.attend_in_chunks(q_BJQLK, k_BJMK, v_BJMK, view, key)
        else:
            k_BJMK = write(cache["keys_BJMK"], k_BJMK, view.place)
            v_BJMK = write(cache["values_BJMK"], v_BJMK, view.place)
            cache = {**cache, "keys_BJMK": k_BJMK, "values_BJMK": v_BJMK}
            y_BJQLK = self.attend(q_BJQLK, k_BJMK, v_BJMK, view, None)
        return self.out(y_BJQLK), cache

    def out(self, y_BJQLK: Array) -> Array:
        y_BLJQK = self.layout.einsum("BJQLK->BLJQK", y_BJQLK)
        return self.layout.einsum("BLJQK,JQKD->BLD", y_BLJQK, self.wo_JQKD[...])

    def project(self, x_BLD: Array, positions_BL: Array | None) -> tuple[Array, Array, Array]:
        """Queries, keys and values of a row."""
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
        """The three projections as one product over Q + 2 columns of heads."""
        reshard, queries = self.layout.reshard, self.spec.queries
        parts = (self.wq_DJQK[...], self.wk_DJK[:, :, None], self.wv_DJK[:, :, None])
        w_DJqK = jnp.concatenate([reshard(part, "DJqK", stored=True) for part in parts], axis=2)
        qkv_BLJqK = self.layout.einsum("BLD,DJqK->BLJqK", x_BLD, w_DJqK)
        q_BLJqK, k_BLJ1K, v_BLJ1K = jax.lax.split(qkv_BLJqK, (queries, 1, 1), axis=3)
        k_BMJK, v_BMJK = (reshard(part[:, :, :, 0], "BMJK") for part in (k_BLJ1K, v_BLJ1K))
        return reshard(q_BLJqK, "BLJQK"), k_BMJK, v_BMJK

    def attend_in_chunks(
        self, q_BJQLK: Array, k_BJMK: Array, v_BJMK: Array, view: View, key: Array | None
    ) -> Array:
        """Attention of slices of queries, each over the memory up to its end.

        What causality masks beyond it is not computed: of n slices, (n - 1) / 2n of the work.
        """
        chunks, length = self.spec.attention_chunks, q_BJQLK.shape[3]
        drops = key is not None and self.spec.attention_dropout > 0
        if chunks == 1 or drops or not view.causal:  # random bits are drawn for all weights at once
            return self.attend(q_BJQLK, k_BJMK, v_BJMK, view, key)
        reshard, step, parts = self.layout.reshard, -(-length // chunks), []
        q_BJQlK, k_BJmK, v_BJmK = (
            reshard(q_BJQLK, "BJQlK"),
            reshard(k_BJMK, "BJmK"),
            reshard(v_BJMK, "BJmK"),
        )
        assert view.behind is not None
        mask_Blm, behind_lm = reshard(view.mask_BLM, "Blm"), reshard(view.behind, "lm")
        for start in range(0, length, step):
            own, seen = slice(start, start + step), slice(0, start + step)
            part = View(
                mask_Blm[:, own, seen],
                causal=True,
                behind=behind_lm[own, seen],
                bias=None if view.bias is None else reshard(view.bias, "BJQlm")[..., own, seen],
            )
            k_part, v_part = k_BJmK[:, :, seen], v_BJmK[:, :, seen]
            parts.append(self.attend(q_BJQlK[:, :, :, own], k_part, v_part, part, None))
        return reshard(jnp.concatenate(parts, axis=3), "BJQLK")

    def attend(
        self, q_BJQLK: Array, k_BJMK: Array, v_BJMK: Array, view: View, key: Array | None
    ) -> Array:
        """Values averaged by the softmax of query-key products."""
        layout, rate = self.layout, self.spec.attention_dropout
        bias = view.bias
        if self.bias is not None:
            assert view.behind is not None
            bias = self.bias(view.behind, view.causal)
        mask_B11LM = layout.broadcast_like(view.mask_BLM, "BLM", "BJQLM")
        if key is None or not rate:
            return average(layout, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)
        shares_BJQLM, sum_BJQL1 = shares(layout, q_BJQLK, k_BJMK, bias, mask_B11LM)
        weights_BJQLM = (shares_BJQLM / sum_BJQL1).astype(v_BJMK.dtype)
        weights_BJQLM = dropout(layout, key, rate, weights_BJQLM, "BJQLM")
        return layout.einsum("BJQLM,BJMK->BJQLK", weights_BJQLM, v_BJMK)


class SourceAttention(Attention):
    """Attention over an encoded source: its queries come from the row, the rest from the source."""

    sees_itself = False

    def __call__(
        self, x_BLD: Array, view: View, cache: Cache | None = None, key: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """What each token of a row takes from the source; the cache holds keys and values of it."""
        q_BLJQK = self.layout.einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
        q_BJQLK = self.layout.einsum("BLJQK->BJQLK", q_BLJQK) * self.spec.scales[1]
        if cache is None:
            assert view.memory_BMD is not None
            k_BJMK, v_BJMK = self.remember(view.memory_BMD)
        else:
            k_BJMK, v_BJMK = cache["source_keys_BJMK"], cache["source_values_BJMK"]
        return self.out(self.attend(q_BJQLK, k_BJMK, v_BJMK, view, key)), cache

    def remember(self, memory_BMD: Array) -> tuple[Array, Array]:
        """Keys and values of a source, the same for every token that will look at it."""
        einsum = self.layout.einsum
        k_BMJK = einsum("BMD,DJK->BMJK", memory_BMD, self.wk_DJK[...])
        v_BMJK = einsum("BMD,DJK->BMJK", memory_BMD, self.wv_DJK[...])
        return einsum("BMJK->BJMK", k_BMJK), einsum("BMJK->BJMK", v_BMJK)


def write(cache_BJMK: Array, new_BJMK: Array, place: Array | None) -> Array:
    """The cache with a row's keys (or values) from a place on; its places are never split."""
    assert place is not None
    return jax.lax.dynamic_update_slice_in_dim(cache_BJMK, new_BJMK, place, axis=2)


def shares(
    layout: Layout, q_BJQLK: Array, k_BJMK: Array, bias: Array | None, mask_B11LM: Array
) -> tuple[Array, Array]:
    """What each query gives to each place of the memory, the most 1, and the sum; in float32."""
    scores_BJQLM = layout.einsum("BJQLK,BJMK->BJQLM", q_BJQLK, k_BJMK, dtype=jnp.float32)
    if bias is not None:
        scores_BJQLM = scores_BJQLM + bias
    scores_BJQLM = jnp.where(mask_B11LM, scores_BJQLM, -1e9)
    shares_BJQLM = jnp.exp(scores_BJQLM - jnp.max(scores_BJQLM, axis=-1, keepdims=True))
    return shares_BJQLM, jnp.sum(shares_BJQLM, axis=-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def average(
    layout: Layout,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Array | None,
    mask_B11LM: Array,
) -> Array:
    """Attention without dropout.  Its gradient reads the shares once, and keeps nothing else.

    Shares are divided by their sum only after the product, along the head in place of the memory.
    The sum that the softmax's gradient needs along the memory equals the product of the output and
    its gradient along the head (Dao et al. 2022, appendix B.2).
    """
    return _average_forward(layout, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)[0]


def _average_forward(
    layout: Layout,
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    bias: Array | None,
    mask_B11LM: Array,
) -> tuple[Array, tuple[Array | None, ...]]:
    shares_BJQLM, sum_BJQL1 = shares(layout, q_BJQLK, k_BJMK, bias, mask_B11LM)
    shares_BJQLM = shares_BJQLM.astype(v_BJMK.dtype)
    y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", shares_BJQLM, v_BJMK, dtype=jnp.float32)
    y_BJQLK = (y_BJQLK / sum_BJQL1).astype(v_BJMK.dtype)
    return y_BJQLK, (q_BJQLK, k_BJMK, v_BJMK, bias, shares_BJQLM, sum_BJQL1, y_BJQLK)


def _average_backward(
    layout: Layout, kept: tuple[Array, ...], dy_BJQLK: Array
) -> tuple[Array | None, ...]:
    einsum = layout.einsum
    q_BJQLK, k_BJMK, v_BJMK, bias, shares_BJQLM, sum_BJQL1, y_BJQLK = kept
    wide_BJQLK = dy_BJQLK.astype(jnp.float32) / sum_BJQL1
    dot_BJQL1 = jnp.sum(wide_BJQLK * y_BJQLK.astype(jnp.float32), axis=-1, keepdims=True)
    dy_BJQLK = wide_BJQLK.astype(dy_BJQLK.dtype)
    dshares_BJQLM = einsum("BJQLK,BJMK->BJQLM", dy_BJQLK, v_BJMK, dtype=jnp.float32)
    dscores_BJQLM = shares_BJQLM.astype(jnp.float32) * (dshares_BJQLM - dot_BJQL1)
    dbias = None if bias is None else dscores_BJQLM
    if bias is not None and bias.shape[0] == 1:  # all rows share it
        dbias = jnp.sum(dscores_BJQLM, axis=0, keepdims=True)
    dscores_BJQLM = dscores_BJQLM.astype(q_BJQLK.dtype)
    return (
        einsum("BJQLM,BJMK->BJQLK", dscores_BJQLM, k_BJMK),
        einsum("BJQLM,BJQLK->BJMK", dscores_BJQLM, q_BJQLK),
        einsum("BJQLM,BJQLK->BJMK", shares_BJQLM, dy_BJQLK),
        dbias,
        None,
    )


average.defvjp(_average_forward, _average_backward)
