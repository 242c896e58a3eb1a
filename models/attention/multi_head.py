"""Computes packed or cached attention with multi-head, grouped or single keys and values."""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from configs.errors import UserError
from configs.spec import Count, Fraction, Positive, abstract_spec, spec
from layouts.layout import Layout
from layouts.low_rank import Adapted
from layouts.reduction import reduced_alike
from models.api import Cache
from models.attention.context import AttentionContext
from models.attention.flash import Call, Choice, Implementation, choose, flash_attention
from models.attention.layer_cache import read, write
from models.attention.plain import Operands, attend_in_chunks, attend_with_dropout
from models.dropout import Key
from models.initializers import Weights
from models.parts import Attention, BlockParts
from models.sizes import Sizes

AttentionBiases = Literal["none", "qkv", "all"]
QkNormOver = Literal["head", "heads"]


@abstract_spec
class SoftmaxAttention(Attention):
    """Holds the settings of attention by a softmax of query-key products."""

    free_on_resume: ClassVar[tuple[str, ...]] = ("implementation", "chunks")
    has_narrow_values: ClassVar[bool] = False
    """Whether keys have columns that values lack; no device then has a part of a head."""

    implementation: Implementation = "auto"
    """How attention is computed: with matmuls and a softmax ("plain"), with a kernel that keeps no
    logits in memory ("flash"), or with a kernel on devices that support one ("auto"). The results
    are the same. Cases that no kernel supports use "plain" (docs/attention.md). On CPUs, "flash"
    interprets a kernel, which is slow and meant for tests."""
    chunks: Count = 1
    """Slices of queries in plain attention; each slice skips the keys after its last query. The
    results are the same. No effect if the layout splits the length."""
    dropout: Fraction = 0.0
    """Dropout rate of attention probabilities."""
    window: Count | None = None
    """Number of tokens that a decoder token attends to, up to and including itself. None: all."""
    logit_cap: Positive | None = None
    """Bounds logits softly: cap * tanh(logits / cap), as in Gemma 2. None: no bound."""
    query_scale: Positive | None = None
    """Multiplies queries. None: 1 / the square root of their width."""

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def sinks(self) -> bool:
        """Returns whether each head has a sink, a logit in addition to those of its keys."""
        return False

    def kernel(self, call: Call) -> Choice:
        if self.has_narrow_values:
            call = call._replace(layout=call.layout.without("d_kv"))
        return choose(call)

    def attend(
        self, layout: Layout, operands: Operands, context: AttentionContext, key: Key
    ) -> Array:
        """Averages values by the softmax of query-key products, with or without a kernel."""
        if context.kernel is not None:  # kernels need segments instead of a mask
            segments_BL, segments_BM = context.segments_BL, context.segments_BM
            assert segments_BL is not None
            return flash_attention(
                layout,
                context.kernel,
                operands,
                segments_BL,
                segments_BL if segments_BM is None else segments_BM,
                causal=context.causal,
                window=self.window if context.causal else None,
                logit_cap=self.logit_cap,
            )
        assert context.mask_BLM is not None
        mask_B11LM = layout.broadcast_like(context.mask_BLM, "BLM", "BJQLM")
        operands = operands._replace(mask_B11LM=mask_B11LM)
        if key is not None and self.dropout:
            return attend_with_dropout(layout, key, self.dropout, operands, self.logit_cap)
        # Slices skip no keys of a cache, or if devices share the length: each device has few
        # queries, and the last ones see all keys.
        is_causal_row = context.causal and context.cache_index is None
        chunks = self.chunks if is_causal_row and not any(layout.place("BJQLM")[-2:]) else 1
        return attend_in_chunks(layout, chunks, operands, self.logit_cap)

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        if self.window is not None and sizes.has_encoder:
            raise UserError(
                f"{type(self).__name__}.window = {self.window}: found encoder_layers = "
                f"{sizes.encoder_layers}.  Legal: windows in models without an encoder."
            )


@spec
class MultiHead(SoftmaxAttention):
    """Computes multi-head attention; groups of query heads may share key/value heads.

    Vaswani et al. 2017, section 3.2; grouped heads: Ainslie et al. 2023.
    """

    free_on_resume: ClassVar[tuple[str, ...]] = ("implementation", "chunks", "combined_qkv")

    biases: AttentionBiases = "none"
    """Adds biases to queries, keys and values ("qkv"), or also to attention's output ("all")."""
    qk_norm: bool = False
    """Normalizes queries and keys before the rotation."""
    qk_norm_over: QkNormOver = "head"
    """What `qk_norm` normalizes: each head, or all heads of a token together, as in OLMo 2."""
    sinks: bool = False
    """Gives each head a learned logit that takes up part of the probability, as in gpt-oss."""
    combined_qkv: bool = False
    """Computes queries, keys and values in one matmul, unless their weights have adapters. The
    stored weights stay separate."""

    def build(
        self, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ) -> "MultiHeadAttention":
        return MultiHeadAttention(self, parts, sizes, layout, weights)

    def build_cross(
        self, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ) -> "SourceAttention":
        return SourceAttention(self, parts, sizes, layout, weights)


class MultiHeadAttention(nnx.Module):
    """Computes attention with J key/value heads, each shared by Q query heads."""

    is_self_attention = True

    def __init__(
        self, spec: MultiHead, parts: BlockParts, sizes: Sizes, layout: Layout, weights: Weights
    ):
        self.spec = spec
        self.positions = parts.positions
        self.sizes = sizes
        self.layout = layout
        self.wq_DJQK = weights.normal("DJQK", fan_in="D")
        self.wk_DJK = weights.normal("DJK", fan_in="D")
        self.wv_DJK = weights.normal("DJK", fan_in="D")
        self.wo_JQKD = weights.normal("JQKD", fan_in="JQK")
        if spec.biases != "none":
            self.bq_JQK = weights.zeros("JQK")
            self.bk_JK = weights.zeros("JK")
            self.bv_JK = weights.zeros("JK")
        if spec.biases == "all":
            self.bo_D = weights.zeros("D")
        self.sink_JQ = weights.zeros("JQ") if spec.sinks else None
        if spec.qk_norm:
            q_axes, k_axes = ("K", "K") if spec.qk_norm_over == "head" else ("JQK", "JK")
            self.q_norm = parts.norm.build_for_heads(layout, weights, q_axes)
            self.k_norm = parts.norm.build_for_heads(layout, weights, k_axes)
        has_bias = self.is_self_attention and not parts.positions.shares_bias
        self.bias = parts.positions.build_bias(layout, weights) if has_bias else None

    @jax.named_scope("attention")
    def __call__(
        self, x_BLD: Array, context: AttentionContext, cache: Cache | None = None, key: Key = None
    ) -> tuple[Array, Cache | None]:
        """Attends within a row, or to the cache after writing the row to it."""
        q_BJQLK, k_BJMK, v_BJMK = self.project(x_BLD, context)
        if cache is not None:
            keys = write(cache["keys_BJMK"], k_BJMK, context.cache_index, axis=2)
            values = write(cache["values_BJMK"], v_BJMK, context.cache_index, axis=2)
            cache, key = {**cache, "keys_BJMK": keys, "values_BJMK": values}, None
            k_BJMK, v_BJMK = read(keys), read(values)
        return self.out(self.attend(Operands(q_BJQLK, k_BJMK, v_BJMK), context, key)), cache

    def init_cache(self, rows: int, length: int, memory_BMD: Array | None) -> Cache:
        sizes = self.sizes.sizes
        shape = (rows, sizes["J"], length, sizes["K"])
        empty_BJMK = self.layout.zeros(shape, "BJMK", self.sizes.precision.compute)
        return {"keys_BJMK": empty_BJMK, "values_BJMK": empty_BJMK}

    def out(self, y_BJQLK: Array) -> Array:
        y_BLJQK = self.layout.einsum("BJQLK->BLJQK", y_BJQLK)
        y_BLD = self.layout.einsum("BLJQK,JQKD->BLD", y_BLJQK, self.wo_JQKD[...])
        if self.spec.biases == "all":
            y_BLD += self.layout.broadcast_like(self.bo_D[...], "D", "BLD")
        return checkpoint_name(y_BLD, "out_proj")

    def project(self, x_BLD: Array, context: AttentionContext) -> tuple[Array, Array, Array]:
        """Projects a row to queries, keys and values."""
        einsum, rotate = self.layout.einsum, self.positions.rotate
        wq_DJQK, wk_DJK, wv_DJK = self.wq_DJQK[...], self.wk_DJK[...], self.wv_DJK[...]
        is_adapted = any(isinstance(w, Adapted) for w in (wq_DJQK, wk_DJK, wv_DJK))
        # For one token, joining the weights costs as much as their products.
        if self.spec.combined_qkv and x_BLD.shape[1] > 1 and not is_adapted:
            q_BLJQK, k_BMJK, v_BMJK = self.project_combined(x_BLD, wq_DJQK, wk_DJK, wv_DJK)
        else:
            q_BLJQK = einsum("BLD,DJQK->BLJQK", x_BLD, wq_DJQK)
            k_BMJK = einsum("BMD,DJK->BMJK", x_BLD, wk_DJK)
            v_BMJK = einsum("BMD,DJK->BMJK", x_BLD, wv_DJK)
        q_BJQLK = self.to_queries(q_BLJQK)
        k_BJMK, v_BJMK = self.to_keys_and_values(k_BMJK, v_BMJK)
        q_BJQLK = rotate(self.layout, q_BJQLK, "BJQLK", context.prepared)
        k_BJMK = rotate(self.layout, k_BJMK, "BJMK", context.prepared)
        return q_BJQLK, k_BJMK, v_BJMK

    def to_queries(self, q_BLJQK: Array) -> Array:
        """Adds the bias of queries, normalizes and scales them, and puts heads before positions."""
        q_BLJQK = checkpoint_name(q_BLJQK, "query_proj")
        if self.spec.biases != "none":
            q_BLJQK += self.layout.broadcast_like(self.bq_JQK[...], "JQK", "BLJQK")
        q_BJQLK = self.layout.einsum("BLJQK->BJQLK", q_BLJQK)
        if self.spec.qk_norm:
            q_BJQLK = self.q_norm(q_BJQLK, "BJQLK")
        return q_BJQLK * (self.spec.query_scale or self.sizes.d_kv**-0.5)

    def to_keys_and_values(self, k_BMJK: Array, v_BMJK: Array) -> tuple[Array, Array]:
        """Adds the biases of keys and values, normalizes keys, and puts heads before positions."""
        k_BMJK = checkpoint_name(k_BMJK, "key_proj")
        v_BMJK = checkpoint_name(v_BMJK, "value_proj")
        if self.spec.biases != "none":
            k_BMJK += self.layout.broadcast_like(self.bk_JK[...], "JK", "BMJK")
            v_BMJK += self.layout.broadcast_like(self.bv_JK[...], "JK", "BMJK")
        k_BJMK, v_BJMK = (self.layout.einsum("BMJK->BJMK", x_BMJK) for x_BMJK in (k_BMJK, v_BMJK))
        return self.k_norm(k_BJMK, "BJMK") if self.spec.qk_norm else k_BJMK, v_BJMK

    def project_combined(
        self, x_BLD: Array, w_DJQK: Array, k_DJK: Array, v_DJK: Array
    ) -> tuple[Array, Array, Array]:
        """Computes the three projections as one product over Q + 2 columns of heads."""
        reshard, queries = self.layout.reshard, self.sizes.queries
        parts = (w_DJQK, k_DJK[:, :, None], v_DJK[:, :, None])
        whole = [reshard(part, "DJqK", stored=True) for part in parts]
        w_DJqK = jax.tree.map(lambda *x: jnp.concatenate(reduced_alike(x), axis=2), *whole)
        qkv_BLJqK = self.layout.einsum("BLD,DJqK->BLJqK", x_BLD, w_DJqK)
        q_BLJqK, k_BLJ1K, v_BLJ1K = jax.lax.split(qkv_BLJqK, (queries, 1, 1), axis=3)
        k_BMJK, v_BMJK = (reshard(part[:, :, :, 0], "BMJK") for part in (k_BLJ1K, v_BLJ1K))
        return reshard(q_BLJqK, "BLJQK"), k_BMJK, v_BMJK

    def attend(self, operands: Operands, context: AttentionContext, key: Key) -> Array:
        """Averages values by the softmax of query-key products."""
        bias = context.bias if self.is_self_attention else None
        if self.bias is not None:
            assert context.relative_positions is not None
            bias = self.bias(context.relative_positions, context.causal)
        sink_JQ = None if self.sink_JQ is None else self.sink_JQ[...]
        operands = operands._replace(bias=bias, sink_JQ=sink_JQ)
        return self.spec.attend(self.layout, operands, context, key)


class SourceAttention(MultiHeadAttention):
    """Attends to an encoded source, with queries of the row, keys and values of the source."""

    is_self_attention = False

    @jax.named_scope("source_attention")
    def __call__(
        self, x_BLD: Array, context: AttentionContext, cache: Cache | None = None, key: Key = None
    ) -> tuple[Array, Cache | None]:
        """Attends to the source, whose keys and values are in the cache if there is one."""
        q_BLJQK = self.layout.einsum("BLD,DJQK->BLJQK", x_BLD, self.wq_DJQK[...])
        q_BJQLK = self.to_queries(q_BLJQK)
        if cache is None:
            assert context.memory_BMD is not None
            k_BJMK, v_BJMK = self.project_source(context.memory_BMD)
        else:
            k_BJMK, v_BJMK = read(cache["source_keys_BJMK"]), read(cache["source_values_BJMK"])
        return self.out(self.attend(Operands(q_BJQLK, k_BJMK, v_BJMK), context, key)), cache

    def init_cache(self, rows: int, length: int, memory_BMD: Array | None) -> Cache:
        """Returns a cache of the encoded source's keys and values."""
        assert memory_BMD is not None
        k_BJMK, v_BJMK = self.project_source(memory_BMD)
        return {"source_keys_BJMK": k_BJMK, "source_values_BJMK": v_BJMK}

    def project_source(self, memory_BMD: Array) -> tuple[Array, Array]:
        """Projects an encoded source to keys and values, once for all decoded tokens."""
        einsum = self.layout.einsum
        k_BMJK = einsum("BMD,DJK->BMJK", memory_BMD, self.wk_DJK[...])
        v_BMJK = einsum("BMD,DJK->BMJK", memory_BMD, self.wv_DJK[...])
        return self.to_keys_and_values(k_BMJK, v_BMJK)
