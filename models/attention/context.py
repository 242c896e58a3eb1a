"""Describes what the tokens of a row see: masks, segments and positions that layers share."""

import dataclasses
from typing import Any

import jax
from jax import Array

from layouts.layout import Layout
from models.attention.bias import Bias
from models.attention.flash import Kernel

STATIC = {"static": True}  # marks fields that are not arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Holds masks and positions, which all layers of a kind share."""

    mask_BLM: Array | None
    """Which keys a query sees; None if a kernel derives it from segments and causality."""
    causal: bool = dataclasses.field(metadata=STATIC)
    positions_BL: Array | None = None
    """Of the queries; in self-attention also of the keys."""
    prepared: Any = None
    """The result of `Positions.prepare`, such as the angles of rotary positions."""
    relative_positions: Array | None = None
    """Query position - key position, with axes "LM" or, with a cache, "BLM"."""
    bias: Bias | None = None
    """Added to the logits, if all layers share it."""
    memory_BMD: Array | None = None
    """The encoder's output, for cross-attention."""
    cache_index: Array | None = None
    """Slot of the cache where new keys and values are written."""
    segments_BL: Array | None = None
    """0 at padding; None if each row is one segment without padding, as in decoding."""
    segments_BM: Array | None = None
    """Of the keys, in cross-attention."""
    kernel: Kernel | None = dataclasses.field(default=None, metadata=STATIC)
    """The kernel that computes attention; None for plain attention."""
    drop_tokens: bool = dataclasses.field(default=True, metadata=STATIC)
    """Whether experts drop the tokens beyond their capacity."""


def packed_context(
    layout: Layout,
    positions_BL: Array,
    segments_BL: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    drop_tokens: bool = True,
    kernel: Kernel | None = None,
) -> AttentionContext:
    """Lets each token see its own segment: all of it, or in causal attention up to itself.

    With a window w, it sees itself and the w - 1 tokens before.
    """
    mask_BLM = relative_LM = None
    if kernel is None:
        length = segments_BL.shape[1]
        query_LM = layout.iota("LM", (length, length), "L")
        relative_LM = query_LM - layout.iota("LM", (length, length), "M")
        mask_BLM = same_segment(layout, segments_BL, segments_BL)
        if causal:
            mask_BLM &= layout.broadcast_like(relative_LM >= 0, "LM", "BLM")
        if window is not None:
            mask_BLM &= layout.broadcast_like(relative_LM < window, "LM", "BLM")
    return AttentionContext(
        mask_BLM,
        causal,
        positions_BL,
        relative_positions=relative_LM,
        segments_BL=segments_BL,
        kernel=kernel,
        drop_tokens=drop_tokens,
    )


def cross_context(
    layout: Layout,
    segments_BL: Array,
    segments_BM: Array,
    memory_BMD: Array | None = None,
    *,
    kernel: Kernel | None = None,
) -> AttentionContext:
    """Lets each token see the complete source of its segment."""
    mask_BLM = same_segment(layout, segments_BL, segments_BM) if kernel is None else None
    return AttentionContext(
        mask_BLM,
        causal=False,
        memory_BMD=memory_BMD,
        segments_BL=segments_BL,
        segments_BM=segments_BM,
        kernel=kernel,
    )


def cached_context(
    layout: Layout,
    positions_BL: Array,
    positions_BM: Array,
    mask_BLM: Array,
    cache_index: Array,
    window: int | None,
) -> AttentionContext:
    """Lets new tokens see the slots of a cache that the mask marks; experts drop no tokens."""
    query_BL1 = layout.broadcast_like(positions_BL, "BL", "BLM")
    relative_BLM = query_BL1 - layout.broadcast_like(positions_BM, "BM", "BLM")
    if window is not None:
        mask_BLM &= relative_BLM < window
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
