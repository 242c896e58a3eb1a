"""Computes attention on Hopper GPUs with tokamax's Mosaic kernel, which stores no logits."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PACKAGE = "tokamax"


@functools.partial(jax.jit, static_argnames=("causal", "window", "logit_cap"))  # traced once
def mosaic_attention(
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMV: Array,
    segments_BL: Array,
    segments_BM: Array,
    *,
    causal: bool,
    window: int | None,
    logit_cap: float | None,
) -> Array:
    """Computes self-attention within the segments of rows, on one device."""
    kernel, Mask = tokamax_kernel()
    rows, kv_heads, queries, length, width = q_BJQLK.shape
    q_BLHK = jnp.swapaxes(q_BJQLK.reshape(rows, kv_heads * queries, length, width), 1, 2)
    first_BL, end_BL = key_ranges(segments_BL, window)
    ends = {"is_causal": True} if causal else {"k_end": end_BL[:, None]}
    mask = Mask(k_start=first_BL[:, None], **ends)
    k_BMJK, v_BMJV = (jnp.swapaxes(x, 1, 2) for x in (k_BJMK, v_BJMV))
    y_BLHV = kernel(q_BLHK, k_BMJK, v_BMJV, mask=mask, logits_scale=1.0, logits_soft_cap=logit_cap)
    return jnp.swapaxes(y_BLHV, 1, 2).reshape(*q_BJQLK.shape[:-1], -1)


@functools.cache
def tokamax_kernel() -> tuple[Callable[..., Array], Any]:
    """Imports the kernel and its mask class, when they are needed."""
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    # Each call warns that its block sizes come from rules and not from a table.
    logging.getLogger("absl").addFilter(lambda record: "Autotuning cache" not in str(record.msg))
    return PallasMosaicGpuFlashAttention(), Mask


def key_ranges(segments_BL: Array, window: int | None) -> tuple[Array, Array]:
    """Returns the first key that each query sees, and the end of its segment.

    The tokens of a segment must be adjacent.
    """
    length = segments_BL.shape[1]
    positions_L = jnp.arange(length, dtype=jnp.int32)
    is_other_BL = segments_BL[:, 1:] != segments_BL[:, :-1]  # from the token before
    first_BL = jnp.pad(jnp.where(is_other_BL, positions_L[None, 1:], 0), ((0, 0), (1, 0)))
    end_BL = jnp.where(is_other_BL, positions_L[None, 1:], length)
    end_BL = jnp.pad(end_BL, ((0, 0), (0, 1)), constant_values=length)
    first_BL = jax.lax.cummax(first_BL, axis=1)
    if window is not None:
        first_BL = jnp.maximum(first_BL, positions_L[None] + (1 - window))
    return first_BL, jax.lax.cummin(end_BL, axis=1, reverse=True)


def missing_mosaic() -> str | None:
    """Returns why tokamax's kernel cannot be used, or None.  The kernel queries the GPU."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed, whose kernel is faster"
    if jax.default_backend() != "gpu":
        return f"{PACKAGE}'s kernel needs the GPU"
    return None
