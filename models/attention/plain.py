"""Computes attention with products and a softmax: the reference, which supports everything."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from layouts.layout import Layout
from models.attention.bias import Bias, add_bias, bias_gradient
from models.dropout import dropout


class Operands(NamedTuple):
    """Holds queries, keys and values, and the bias, mask and sinks of their logits."""

    q_BJQLK: Array
    k_BJMK: Array
    v_BJMK: Array
    bias: Bias | None = None
    mask_B11LM: Array | None = None
    """None in a gradient, and before it is known."""
    sink_JQ: Array | None = None
    """A logit of each head that takes part in the softmax but has no value."""


def attend_in_chunks(layout: Layout, chunks: int, operands: Operands, cap: float | None) -> Array:
    """Attends with slices of queries, each to the keys up to its end.

    This skips later keys, which are causally masked: with n slices, (n - 1) / 2n of the work.
    """
    attend: Callable[[Layout, Operands], Array] = dot_product_attention
    if cap is not None or operands.sink_JQ is not None:
        attend = functools.partial(softmax_attention, logit_cap=cap)
    if chunks == 1:
        return attend(layout, operands)
    q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM, sink_JQ = operands
    assert mask_B11LM is not None
    replicated, length, parts = layout.without("length", "memory"), q_BJQLK.shape[3], []
    q_BJQLK = replicated.reshard(q_BJQLK, "BJQLK")
    k_BJMK, v_BJMK = (replicated.reshard(x_BJMK, "BJMK") for x_BJMK in (k_BJMK, v_BJMK))
    step = -(-length // chunks)
    for start in range(0, length, step):
        queries, keys = slice(start, start + step), slice(0, start + step)
        part = Operands(
            q_BJQLK[:, :, :, queries],
            k_BJMK[:, :, keys],
            v_BJMK[:, :, keys],
            None if bias is None else bias.part(replicated, queries, keys),
            mask_B11LM[..., queries, keys],
            sink_JQ,
        )
        parts.append(attend(replicated, part))
    return layout.reshard(jnp.concatenate(parts, axis=3), "BJQLK")


def attend_with_dropout(
    layout: Layout, key: Array, rate: float, operands: Operands, logit_cap: float | None
) -> Array:
    """Attends with dropout of the probabilities."""
    v_BJMK = operands.v_BJMK
    probs_BJQLM, sum_BJQL = unnormalized_probs(layout, operands, logit_cap)
    sum_BJQL1 = layout.broadcast_like(sum_BJQL, "BJQL", "BJQLM")
    weights_BJQLM = (probs_BJQLM / sum_BJQL1).astype(v_BJMK.dtype)
    weights_BJQLM = dropout(layout, key, rate, weights_BJQLM, "BJQLM")
    y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", weights_BJQLM, v_BJMK)
    return checkpoint_name(y_BJQLK, "context")


def unnormalized_probs(
    layout: Layout, operands: Operands, logit_cap: float | None = None
) -> tuple[Array, Array]:
    """Returns exp(logits - max) and its sum over the keys, both in JAX's float type."""
    q_BJQLK, k_BJMK, _, bias, mask_B11LM, sink_JQ = operands
    assert mask_B11LM is not None
    logits_BJQLM = layout.einsum("BJQLK,BJMK->BJQLM", q_BJQLK, k_BJMK, dtype=float)
    logits_BJQLM = capped(logits_BJQLM, logit_cap)
    if bias is not None:
        logits_BJQLM = add_bias(layout, logits_BJQLM, bias)
    if sink_JQ is None:
        return masked_probs(logits_BJQLM, mask_B11LM)
    sink_BJQL1 = layout.broadcast_like(sink_JQ.astype(float), "JQ", "BJQLM")
    return masked_probs(logits_BJQLM, mask_B11LM, sink_BJQL1)


def capped(logits: Array, cap: float | None) -> Array:
    """Bounds logits softly by cap * tanh(logits / cap); None means no bound."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def masked_probs(
    logits_BJQLM: Array, mask_B11LM: Array, sink_BJQL1: Array | None = None
) -> tuple[Array, Array]:
    """Returns exp(logits - max) where the mask is true, and its sum over the keys and a sink."""
    logits_BJQLM = jnp.where(mask_B11LM, logits_BJQLM, -1e9)
    max_BJQL1 = jnp.max(logits_BJQLM, axis=-1, keepdims=True)
    if sink_BJQL1 is not None:
        max_BJQL1 = jnp.maximum(max_BJQL1, sink_BJQL1)
    probs_BJQLM = jnp.exp(logits_BJQLM - max_BJQL1)
    sum_BJQL = jnp.sum(probs_BJQLM, axis=-1)
    if sink_BJQL1 is not None:
        sum_BJQL += jnp.exp(sink_BJQL1 - max_BJQL1)[..., 0]
    return probs_BJQLM, sum_BJQL


def softmax_attention(layout: Layout, operands: Operands, logit_cap: float | None) -> Array:
    """Attends with logits bounded by tanh (Gemma Team 2024, section 2), or with sinks.

    Unlike `dot_product_attention`, its gradient keeps the logits, too.
    """
    v_BJMK = operands.v_BJMK
    probs_BJQLM, sum_BJQL = unnormalized_probs(layout, operands, logit_cap)
    y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", probs_BJQLM.astype(v_BJMK.dtype), v_BJMK)
    y_BJQLK /= layout.broadcast_like(sum_BJQL, "BJQL", "BJQLK").astype(v_BJMK.dtype)
    return checkpoint_name(y_BJQLK, "context")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dot_product_attention(layout: Layout, operands: Operands) -> Array:
    """Attends without dropout; per query and key, the gradient keeps one unnormalized probability.

    The product with values is divided by their sum, along the head instead of along the keys.  The
    sum over keys that the softmax's gradient needs equals the product of the output and its
    gradient, summed along the head (Dao et al. 2022, appendix B.2).
    """
    return _attention_forward(layout, operands)[0]


Residuals = tuple[Operands, Array, Array, Array]  # and probs_BJQLM, sum_BJQL, y_BJQLK


def _attention_forward(layout: Layout, operands: Operands) -> tuple[Array, Residuals]:
    v_BJMK, bias = operands.v_BJMK, operands.bias
    probs_BJQLM, sum_BJQL = unnormalized_probs(layout, operands)
    probs_BJQLM = probs_BJQLM.astype(v_BJMK.dtype)
    y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", probs_BJQLM, v_BJMK, dtype=float)
    y_BJQLK = y_BJQLK / layout.broadcast_like(sum_BJQL, "BJQL", "BJQLK")
    y_BJQLK = checkpoint_name(y_BJQLK.astype(v_BJMK.dtype), "context")
    bias = None if bias is None else bias._replace(values=None)  # its gradient needs none
    kept = operands._replace(bias=bias, mask_B11LM=None)
    return y_BJQLK, (kept, probs_BJQLM, sum_BJQL, y_BJQLK)


def _attention_backward(layout: Layout, residuals: Residuals, dy_BJQLK: Array) -> tuple[Operands]:
    einsum, like = layout.einsum, layout.broadcast_like
    (q_BJQLK, k_BJMK, v_BJMK, bias, *_), probs_BJQLM, sum_BJQL, y_BJQLK = residuals
    wide_BJQLK = dy_BJQLK.astype(float) / like(sum_BJQL, "BJQL", "BJQLK")
    dot_BJQL = jnp.sum(wide_BJQLK * y_BJQLK.astype(float), axis=-1)
    dy_BJQLK = wide_BJQLK.astype(dy_BJQLK.dtype)
    dprobs_BJQLM = einsum("BJQLK,BJMK->BJQLM", dy_BJQLK, v_BJMK, dtype=float)
    dprobs_BJQLM = dprobs_BJQLM - like(dot_BJQL, "BJQL", "BJQLM")
    dlogits_BJQLM = probs_BJQLM.astype(float) * dprobs_BJQLM
    dbias = None if bias is None else bias_gradient(layout, bias, dlogits_BJQLM)
    dlogits_BJQLM = dlogits_BJQLM.astype(q_BJQLK.dtype)
    doperands = Operands(
        einsum("BJQLM,BJMK->BJQLK", dlogits_BJQLM, k_BJMK),
        einsum("BJQLM,BJQLK->BJMK", dlogits_BJQLM, q_BJQLK),
        einsum("BJQLM,BJQLK->BJMK", probs_BJQLM, dy_BJQLK),
        dbias,
    )
    return (doperands,)


dot_product_attention.defvjp(_attention_forward, _attention_backward)
