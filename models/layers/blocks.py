"""Combines attention, norms and feed-forward layers into residual blocks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from configs.errors import UserError
from layouts.layout import Layout
from layouts.padding import of_rows
from models.api import Cache
from models.attention.context import AttentionContext
from models.dropout import Key, dropout, split_key
from models.feed_forward.moe.routing import Load
from models.initializers import Weights
from models.parts import BlockParts, NormLayer, NormPlaces
from models.sizes import Sizes


class Contexts(NamedTuple):
    """Holds what a block's attentions see: attention within the row, and to the source."""

    row: AttentionContext
    source: AttentionContext | None = None


ByKind = tuple[Contexts, ...]  # one for each kind of blocks in a stack


class BlockLayer(nnx.Module):
    """Computes attention, attention to a source if there is one, and feed-forward or experts.

    Each reads the residual and is added to it, with the norms of the block.  `kind` is the index of
    the block's contexts among those of its stack.
    """

    def __init__(
        self,
        parts: BlockParts,
        sizes: Sizes,
        layout: Layout,
        weights: Weights,
        *,
        kind: int = 0,
        cross_attention: bool = False,
    ):
        self.dropout = sizes.dropout
        self.residual_scale = parts.residual_scale
        self.norms_sum = parts.norm_places == "sum"
        self.layout = layout
        self.kind = kind

        def norm(*places: NormPlaces) -> NormLayer | None:
            if parts.norm_places not in places:
                return None
            built: Any = parts.norm.build(layout, weights)
            if not callable(built):
                name = f"@{type(parts.norm).__name__}().build"
                raise UserError(f"{name} returns {built!r}.  Legal: a function of x_BLD.")
            return built

        self.attention_norm = norm("before", "both")
        self.attention_post_norm = norm("after", "both", "sum")
        self.attention = parts.attention.build(parts, sizes, of_rows(layout, "length"), weights)
        if cross_attention:
            self.source_norm = norm("before", "both")
            self.source_post_norm = norm("after", "both", "sum")
            attention = parts.source_attention
            self.source_attention = attention.build_cross(parts, sizes, layout, weights)
        self.mlp_norm = norm("before", "both")
        self.mlp_post_norm = norm("after", "both", "sum")
        self.mlp = parts.feed_forward.build(sizes, layout, weights)

    def __call__(
        self, x_BLD: Array, contexts: ByKind, cache: Cache | None = None, key: Key = None
    ) -> tuple[Array, Cache | None, Load | None]:
        """Returns the row after this block, the updated cache, and the load of its experts."""
        context, source_context = contexts[self.kind]
        keys = split_key(key, 4)
        source_keys = split_key(None if key is None else jax.random.fold_in(key, 4))
        y_BLD = normed(self.attention_norm, x_BLD)
        y_BLD, cache = self.attention(y_BLD, context, cache, keys[0])
        x_BLD = self.add(x_BLD, y_BLD, self.attention_post_norm, keys[1])
        if source_context is not None:
            y_BLD = normed(self.source_norm, x_BLD)
            y_BLD, cache = self.source_attention(y_BLD, source_context, cache, source_keys[0])
            x_BLD = self.add(x_BLD, y_BLD, self.source_post_norm, source_keys[1])
        y_BLD = normed(self.mlp_norm, x_BLD)
        y_BLD, load = self.mlp(y_BLD, context.segments_BL, keys[2], drop_tokens=context.drop_tokens)
        return self.add(x_BLD, y_BLD, self.mlp_post_norm, keys[3]), cache, load

    def init_cache(self, rows: int, length: int, memory_BMD: Array | None) -> Cache:
        """Returns the caches of all attentions, for this number of rows of this length."""
        cache = self.attention.init_cache(rows, length, None)
        if memory_BMD is None:
            return cache
        return {**cache, **self.source_attention.init_cache(rows, length, memory_BMD)}

    def add(self, x_BLD: Array, y_BLD: Array, norm: NormLayer | None, key: Key) -> Array:
        """Adds y to the residual, scaled and with dropout; normalizes y or the sum."""
        y_BLD = y_BLD if self.norms_sum else normed(norm, y_BLD)
        if self.residual_scale != 1:
            y_BLD *= self.residual_scale
        x_BLD += dropout(self.layout, key, self.dropout, y_BLD, "BLD")
        return normed(norm, x_BLD) if self.norms_sum else x_BLD


def normed(norm: NormLayer | None, x_BLD: Array) -> Array:
    """Normalizes hidden states if the block has this norm."""
    return x_BLD if norm is None else norm(x_BLD)


class BlockSequence(nnx.Module):
    """Runs one repeat of a pattern of several blocks, as one block."""

    def __init__(self, blocks: Sequence[BlockLayer]):
        self.names = tuple(f"block{i}" for i in range(len(blocks)))
        for name, block in zip(self.names, blocks, strict=True):
            setattr(self, name, block)

    def each(self) -> dict[str, BlockLayer]:
        """Returns the blocks by name, in order."""
        return {name: getattr(self, name) for name in self.names}

    def init_cache(self, rows: int, length: int, memory_BMD: Array | None) -> Cache:
        """Returns the caches of all blocks, by name."""
        return {name: one.init_cache(rows, length, memory_BMD) for name, one in self.each().items()}

    def __call__(
        self, x_BLD: Array, contexts: ByKind, cache: Cache | None = None, key: Key = None
    ) -> tuple[Array, Cache | None, dict[str, Load | None]]:
        """Returns the row after all blocks; caches and loads by the name of each block."""
        caches: Cache = {}
        loads: dict[str, Load | None] = {}
        for index, (name, block) in enumerate(self.each().items()):
            block_key = None if key is None else jax.random.fold_in(key, index)
            block_cache = None if cache is None else cache[name]
            x_BLD, caches[name], loads[name] = block(x_BLD, contexts, block_cache, block_key)
        return x_BLD, caches if cache is not None else None, loads
