"""Stacks equal blocks: stores their weights stacked and runs them by a scan or a loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.attention.context import AttentionContext
from models.initializers import Weights
from models.layers.blocks import Block, Blocks
from models.layers.pipeline import has_repeats, in_stages, inside_stages
from models.norms import Norm
from models.positions import RelativeBias, rotation_of
from models.spec import BlockKind, TransformerSpec

Array = jax.Array
# A Load with a leading axis for the repeats, or several by block; None where there are no experts.
Loads = Any
# Weights of all blocks, with a leading axis for the repeats.
Stacked = Any
# Caches with a leading axis for the repeats, or a list of them.
Caches = Any
Inputs = tuple[AttentionContext, AttentionContext | None, Array | None]  # the last is a key


class Stack(nnx.Module):
    """Runs all layers: repeats of a pattern of blocks.

    Each weight has a leading axis N, the repeats, however the layers are run.
    """

    def __init__(
        self,
        spec: TransformerSpec,
        layout: Layout,
        weights: Weights,
        layers: int,
        pattern: tuple[BlockKind, ...],
        *,
        causal: bool = True,
        cross_attention: bool = False,
    ):
        self.spec = spec
        self.layout = layout
        self.repeats = layers // len(pattern)
        self.causal = causal
        stacked, inside = weights.with_sizes(N=self.repeats).stacked("N"), inside_stages(layout)
        self.layers_N: Block | Blocks
        if len(pattern) == 1:
            kind = pattern[0]
            self.layers_N = Block(spec, inside, stacked, kind=kind, cross_attention=cross_attention)
        else:
            self.layers_N = Blocks(spec, inside, stacked, pattern, cross_attention=cross_attention)
        shares_bias = spec.positions == "relative" and spec.shares_bias
        self.bias = RelativeBias(spec, layout, weights) if shares_bias else None
        self.norm = Norm(spec, layout, weights)

    def __call__(
        self,
        x_BLD: Array,
        context: AttentionContext,
        source_context: AttentionContext | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Loads]:
        """Runs whole rows through all layers and the norm; also returns the experts' loads."""
        context = self.with_shared_positions(context)
        _, weights = nnx.split(self.layers_N)
        run = in_stages(self.layout, self.run_layers, self.remat)
        x_BLD, loads = run(weights, x_BLD, (context, source_context, key))
        return self.norm(x_BLD), loads

    def run_layers(
        self, weights: Stacked, x_BLD: Array, inputs: Inputs, first: Array | int = 0
    ) -> tuple[Array, Loads]:
        """Runs whole rows through the layers with these weights; `first` is the first index."""
        context, source_context, key = inputs
        graph, _ = nnx.split(self.layers_N)

        @jax.named_scope("layers")  # the lint counts by it what stages split
        def layer(x_BLD: Array, numbered: tuple[Stacked, Array | int]) -> tuple[Array, Loads]:
            weights, index = numbered
            block = nnx.merge(graph, self.spec.precision.to_compute(weights))
            layer_key = None if key is None else jax.random.fold_in(key, index)
            x_BLD, _, load = block(x_BLD, context, source_context, key=layer_key)
            return x_BLD, load

        if not has_repeats(self.layout):
            layer = self.remat(layer)
        if self.spec.scan:
            stacked = self.layout.gather_stack(weights)
            numbers = first + jnp.arange(len(jax.tree.leaves(weights)[0]), dtype=jnp.int32)
            return jax.lax.scan(layer, x_BLD, (stacked, numbers))
        each = []
        for index, layer_weights in enumerate(self.layout.unstack(weights)):
            x_BLD, load = layer(x_BLD, (layer_weights, first + index))
            each.append(load)
        return x_BLD, jax.tree.map(lambda *arrays: jnp.stack(arrays), *each)

    def remat(self, run: Callable) -> Callable:
        """Returns the function with the rematerialization of the settings."""
        if self.spec.remat == "none":
            return run
        return jax.checkpoint(run, policy=remat_policy(self.spec))

    def with_shared_positions(self, context: AttentionContext) -> AttentionContext:
        """Adds what all layers share about positions: rotary angles, a shared relative bias."""
        if self.spec.positions == "rotary":
            assert context.positions_BL is not None
            rotation = rotation_of(context.positions_BL, self.spec)
            context = dataclasses.replace(context, rotation=rotation)
        if self.bias is None:
            return context
        assert context.relative_positions is not None
        return dataclasses.replace(context, bias=self.bias(context.relative_positions, self.causal))

    def init_cache(
        self,
        weights: Stacked | list[Stacked],
        batch_sequences: int,
        cache_length: int,
        memory_BMD: Array | None,
    ) -> Caches:
        """Makes the caches of all layers, stacked or in a list as their weights are."""
        sizes = {"B": batch_sequences, "M": cache_length, **self.spec.sizes}

        def of_layer(weights: Stacked) -> Cache:
            return self.layer(weights).init_cache(sizes, memory_BMD)

        if isinstance(weights, list):
            return list(map(of_layer, weights))
        return jax.lax.map(of_layer, weights)

    def step(
        self,
        weights: Stacked | list[Stacked],
        x_BLD: Array,
        caches: Caches,
        context: AttentionContext,
        source_context: AttentionContext | None,
    ) -> tuple[Array, Caches]:
        """Runs new tokens through all layers and the norm; returns the caches with them."""
        context = self.with_shared_positions(context)

        def run(x_BLD: Array, stored: tuple[Stacked, Cache]) -> tuple[Array, Cache | None]:
            weights, cache = stored
            return self.layer(weights)(x_BLD, context, source_context, cache)[:2]

        if isinstance(weights, list):
            updated = []
            for stored in zip(weights, caches, strict=True):
                x_BLD, cache = run(x_BLD, stored)
                updated.append(cache)
            caches = updated
        else:
            x_BLD, caches = jax.lax.scan(run, x_BLD, (weights, caches))
        return self.norm(x_BLD), caches

    def layer(self, weights: Stacked) -> Block | Blocks:
        """Returns one repeat of the blocks with these weights."""
        return nnx.merge(nnx.split(self.layers_N)[0], weights)


def remat_policy(spec: TransformerSpec) -> Callable[..., bool]:
    """Returns the checkpoint policy: what a layer saves for its backward pass."""
    if spec.remat == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint_policies.save_only_these_names(*spec.remat_saves)
