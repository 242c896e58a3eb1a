"""One attention for every head arrangement: packed, cached, grouped or multi-query."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.dropout import dropout
from models.positions import relative_buckets, rotate
from models.spec import Transformer
from models.weights import Weights

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class View:
    """Who stands where and who may see whom, the same for every layer."""

    positions_BL: Array
    mask_BLM: Array
    behind: Array
    """How many places a memory stands behind a query, with axes "LM" or, cached, "BLM"."""


def packed_view(layout: Layout, positions_BL: Array, segments_BL: Array) -> View:
    """Each token sees its own segment up to itself."""
    length = segments_BL.shape[1]
    query_LM = layout.iota("LM", (length, length), "L")
    behind_LM = query_LM - layout.iota("LM", (length, length), "M")
    query_BL1 = layout.align(segments_BL, "BL", "BLM")
    same_BLM = query_BL1 == layout.align(segments_BL, "BM", "BLM")
    return View(positions_BL, same_BLM & layout.align(behind_LM >= 0, "LM", "BLM"), behind_LM)


def cached_view(layout: Layout, positions_BL: Array, places: int) -> View:
    """Each token sees the cache up to its own place in it."""
    shape = (*positions_BL.shape, places)
    query_BL1 = layout.align(positions_BL, "BL", "BLM")
    behind_BLM = query_BL1 - layout.iota("BLM", shape, "M")
    return View(positions_BL, behind_BLM >= 0, behind_BLM)


class Attention(nnx.Module):
    """Multi-head attention with J key/value heads of Q queries each.

    Vaswani et al. 2017, section 3.2; grouped heads after Ainslie et al. 2023.
    """

    def __init__(self, spec: Transformer, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.wq_DJQK = weights.normal("DJQK", fan_in="D")
        self.wk_DJK = weights.normal("DJK", fan_in="D")
        self.wv_DJK = weights.normal("DJK", fan_in="D")
        self.wo_JQKD = weights.normal("JQKD", fan_in="JQK")
        if spec.positions == "relative":
            self.bias_RJQ = weights.zeros("RJQ")

    def __call__(
        self, x_BLD: Array, view: View, cache: Cache | None = None, key: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """The attended values of a row, and the cache with this row's keys and values in it."""
        q_BLJQK, k_BMJK, v_BMJK = self.project(x_BLD, view.positions_BL)
        if cache is not None:
            k_BMJK = self.write(cache["keys_BMJK"], k_BMJK, view)
            v_BMJK = self.write(cache["values_BMJK"], v_BMJK, view)
            cache = {"keys_BMJK": k_BMJK, "values_BMJK": v_BMJK}
        y_BLJQK = self.attend(q_BLJQK, k_BMJK, v_BMJK, view, key)
        return self.layout.einsum("BLJQK,JQKD->BLD", y_BLJQK, self.wo_JQKD[...]), cache

    def project(self, x_BLD: Array, positions_BL: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values of a row."""
        einsum = self.layout.einsum
        if self.spec.combined_qkv:
            q_BLJQK, k_BMJK, v_BMJK = self.project_combined(x_BLD)
        else:
            q_BLJQK = einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
            k_BMJK = einsum("BMD,DJK->BMJK", x_BLD, self.wk_DJK[...])
            v_BMJK = einsum("BMD,DJK->BMJK", x_BLD, self.wv_DJK[...])
        q_BLJQK = q_BLJQK * self.spec.d_kv**-0.5
        if self.spec.positions == "rotary":
            to = self.layout.to
            q_BLJQk, k_BMJk = to(q_BLJQK, "BLJQk"), to(k_BMJK, "BMJk")
            q_BLJQK = to(rotate(self.layout, q_BLJQk, "BLJQk", positions_BL), "BLJQK")
            k_BMJK = to(rotate(self.layout, k_BMJk, "BMJk", positions_BL), "BMJK")
        return q_BLJQK, k_BMJK, v_BMJK

    def project_combined(self, x_BLD: Array) -> tuple[Array, Array, Array]:
        """The three projections as one product over Q + 2 columns of heads."""
        to, queries = self.layout.to, self.spec.queries
        parts = (self.wq_DJQK[...], self.wk_DJK[:, :, None], self.wv_DJK[:, :, None])
        w_DJqK = jnp.concatenate([to(part, "DJqK", stored=True) for part in parts], axis=2)
        qkv_BLJqK = self.layout.einsum("BLD,DJqK->BLJqK", x_BLD, w_DJqK)
        q_BLJqK, k_BLJ1K, v_BLJ1K = jax.lax.split(qkv_BLJqK, (queries, 1, 1), axis=3)
        k_BMJK, v_BMJK = (to(part[:, :, :, 0], "BMJK") for part in (k_BLJ1K, v_BLJ1K))
        return to(q_BLJqK, "BLJQK"), k_BMJK, v_BMJK

    def write(self, cache_BMJK: Array, new_BLJK: Array, view: View) -> Array:
        """The cache with each row's keys (or values) at the places where its queries stand."""
        here_BLM = (view.behind == 0).astype(new_BLJK.dtype)
        new_BMJK = self.layout.einsum("BLM,BLJK->BMJK", here_BLM, new_BLJK)
        written_BM11 = self.layout.align(jnp.any(view.behind == 0, axis=1), "BM", "BMJK")
        return jnp.where(written_BM11, new_BMJK, cache_BMJK)

    def attend(
        self, q_BLJQK: Array, k_BMJK: Array, v_BMJK: Array, view: View, key: Array | None
    ) -> Array:
        """Values averaged by the softmax of query-key products."""
        layout = self.layout
        scores_BJQLM = layout.einsum("BLJQK,BMJK->BJQLM", q_BLJQK, k_BMJK, dtype=jnp.float32)
        if self.spec.positions == "relative":
            scores_BJQLM = scores_BJQLM + self.relative_bias(view.behind)
        mask_B11LM = layout.align(view.mask_BLM, "BLM", "BJQLM")
        scores_BJQLM = jnp.where(mask_B11LM, scores_BJQLM, -1e9)
        weights_BJQLM = jax.nn.softmax(scores_BJQLM, axis=-1).astype(v_BMJK.dtype)
        rate = self.spec.attention_dropout
        weights_BJQLM = dropout(layout, key, rate, weights_BJQLM, "BJQLM")
        return layout.einsum("BJQLM,BMJK->BLJQK", weights_BJQLM, v_BMJK)

    def relative_bias(self, behind: Array) -> Array:
        """A learned number per head and bucket of distance, added to the scores."""
        buckets = relative_buckets(behind, self.spec.buckets, self.spec.max_distance)
        axes = "BLM"[-behind.ndim :]
        bias = self.layout.take(self.bias_RJQ[...].astype(jnp.float32), buckets, axes + "JQ")
        placed = axes.replace("LM", "JQLM")
        bias = self.layout.einsum(f"{axes}JQ->{placed}", bias)
        return self.layout.align(bias, placed, "BJQLM")
