"""Joins attention, norms and feed-forward layers to residual blocks."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.attention.context import AttentionContext
from models.attention.layer import Attention, CrossAttention
from models.dropout import dropout
from models.feed_forward import Mlp
from models.initializers import Weights
from models.moe.layer import MoeLayer
from models.moe.routing import Load
from models.norms import Norm
from models.spec import BlockKind, TransformerSpec

Array = jax.Array


class FeedForward(Protocol):
    """Computes the part of a block that sees each token alone; reports the load of experts."""

    def __call__(
        self,
        x_BLD: Array,
        segments_BL: Array | None,
        key: Array | None = None,
        *,
        drop_tokens: bool = True,
    ) -> tuple[Array, Load | None]: ...


class Parts(NamedTuple):
    """Names the attention and the feed-forward layer of a kind of block."""

    attention: Callable[[TransformerSpec, Layout, Weights], Attention]
    feed_forward: Callable[[TransformerSpec, Layout, Weights], FeedForward]


# A new kind is a module, a line here, and its name in `models.spec.BlockKind`.
BLOCK_KINDS: dict[BlockKind, Parts] = {
    "dense": Parts(Attention, Mlp),
    "moe": Parts(Attention, MoeLayer),
}


class Block(nnx.Module):
    """Adds attention, attention to a source where there is one, and feed-forward or experts.

    Each reads the normed residual and is added to it.
    """

    def __init__(
        self,
        spec: TransformerSpec,
        layout: Layout,
        weights: Weights,
        *,
        kind: BlockKind = "dense",
        cross_attention: bool,
    ):
        self.spec = spec
        self.layout = layout
        parts = BLOCK_KINDS[kind]
        self.attention_norm = Norm(spec, layout, weights)
        self.attention = parts.attention(spec, layout, weights)
        if cross_attention:
            self.source_norm = Norm(spec, layout, weights)
            self.source_attention = CrossAttention(spec, layout, weights)
        self.mlp_norm = Norm(spec, layout, weights)
        self.mlp = parts.feed_forward(spec, layout, weights)

    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        source_context: AttentionContext | None = None,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None, Load | None]:
        """Returns the row after this block, the cache with it, and the load of its experts."""
        keys: list[Array | None] = [None] * 4
        source_keys: list[Array | None] = [None] * 2
        if key is not None:
            keys = list(jax.random.split(key, 4))
            source_keys = list(jax.random.split(jax.random.fold_in(key, 4)))
        y_BLD, cache = self.attention(self.attention_norm(x_BLD), context, cache, keys[0])
        x_BLD = x_BLD + self.drop(y_BLD, keys[1])
        if source_context is not None:
            y_BLD, cache = self.source_attention(
                self.source_norm(x_BLD), source_context, cache, source_keys[0]
            )
            x_BLD = x_BLD + self.drop(y_BLD, source_keys[1])
        y_BLD, load = self.mlp(
            self.mlp_norm(x_BLD), context.segments_BL, keys[2], drop_tokens=context.drop_tokens
        )
        return x_BLD + self.drop(y_BLD, keys[3]), cache, load

    def init_cache(self, sizes: Mapping[str, int], memory_BMD: Array | None) -> Cache:
        """Makes the caches of all attentions, for rows of these sizes, by letter."""
        cache = self.attention.init_cache(sizes, memory_BMD)
        if memory_BMD is None:
            return cache
        return {**cache, **self.source_attention.init_cache(sizes, memory_BMD)}

    def drop(self, y_BLD: Array, key: Array | None) -> Array:
        return dropout(self.layout, key, self.spec.dropout, y_BLD, "BLD")


class Blocks(nnx.Module):
    """Runs one repeat of a pattern of several blocks, as one block."""

    def __init__(
        self,
        spec: TransformerSpec,
        layout: Layout,
        weights: Weights,
        pattern: tuple[BlockKind, ...],
        *,
        cross_attention: bool,
    ):
        self.names = tuple(f"block{i}" for i in range(len(pattern)))
        for name, kind in zip(self.names, pattern, strict=True):
            setattr(
                self, name, Block(spec, layout, weights, kind=kind, cross_attention=cross_attention)
            )

    def each(self) -> dict[str, Block]:
        """Returns the blocks by name, in order."""
        return {name: getattr(self, name) for name in self.names}

    def init_cache(self, sizes: Mapping[str, int], memory_BMD: Array | None) -> Cache:
        """Makes the caches of all blocks, by name."""
        return {name: block.init_cache(sizes, memory_BMD) for name, block in self.each().items()}

    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        source_context: AttentionContext | None = None,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None, dict[str, Load | None]]:
        """Returns the row after all blocks; caches and loads by the name of each block."""
        caches: Cache = {}
        loads: dict[str, Load | None] = {}
        for index, (name, block) in enumerate(self.each().items()):
            block_key = None if key is None else jax.random.fold_in(key, index)
            block_cache = None if cache is None else cache[name]
            x_BLD, caches[name], loads[name] = block(
                x_BLD, context, source_context, block_cache, block_key
            )
        return x_BLD, caches if cache is not None else None, loads
