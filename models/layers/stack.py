"""Stacks equal blocks: stores their weights stacked and runs them with a scan or a loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from layouts.layout import Layout
from models.api import Cache, Params
from models.attention.layer_cache import LayerCache
from models.dropout import Key
from models.initializers import Weights
from models.layers.blocks import BlockLayer, BlockSequence, ByKind, Contexts, normed
from models.layers.pipeline import before_stages, has_repeats, in_stages, inside_stages
from models.parts import BlockParts
from models.spec import TransformerSpec

# By the path of a block in its stack: a Load with a leading axis for the layers that use its
# weights, or None if there are no experts.
Loads = dict[str, Any]
# Weights of all blocks, with a leading axis for the repeats, or as a list with one item per repeat.
Stacked = Any
# Caches of the first blocks, by name, and of the repeats, as a list or with a leading axis.
Caches = tuple[Cache, Any]
Inputs = tuple[ByKind, Array | None]  # the last is a key

# Returns what a block with these parts sees.
MakeContexts = Callable[[BlockParts], Contexts]


class Stack(nnx.Module):
    """Runs all layers: the first blocks once, then the repeats of a pattern of blocks.

    Each weight of the pattern has a leading axis N, the repeats, both with a scan and a loop.
    """

    def __init__(
        self, spec: TransformerSpec, layout: Layout, weights: Weights, *, is_encoder: bool = False
    ):
        self.spec = spec
        self.layout = layout
        self.causal = not is_encoder
        cross_attention = spec.has_encoder and not is_encoder
        layers, blocks, first = spec.layers, spec.blocks, len(spec.first_blocks)
        if is_encoder:
            layers, blocks, first = spec.encoder_layers, spec.encoder_blocks, 0
        # Blocks of one kind share their contexts.
        keys = [(parts.attention, parts.source_attention, parts.positions) for parts in blocks]
        each_kind = list(dict.fromkeys(keys))
        self.kinds = tuple(blocks[keys.index(key)] for key in each_kind)
        kinds = [each_kind.index(key) for key in keys]
        inside, turn = inside_stages(layout), len(blocks) - first
        weights_N = weights.with_sizes(N=(layers - first) // turn).stacked("N")
        sources = [weights] * first + [weights_N] * turn
        built = [
            BlockLayer(parts, spec, inside, source, kind=kind, cross_attention=cross_attention)
            for parts, source, kind in zip(blocks, sources, kinds, strict=True)
        ]
        self.first, repeated = BlockSequence(built[:first]), built[first:]
        self.layers_N = repeated[0] if turn == 1 else BlockSequence(repeated)
        positions = spec.positions
        self.bias = positions.build_bias(layout, weights) if positions.shares_bias else None
        is_normed = blocks[-1].norm_places == "sum"
        self.norm = None if is_normed else spec.norm.build(layout, weights)

    def __call__(
        self, x_BLD: Array, make_contexts: MakeContexts, key: Key = None
    ) -> tuple[Array, Loads]:
        """Runs complete rows through all layers and the norm; also returns the experts' loads."""
        inputs, loads = (self.contexts(make_contexts), key), Loads()
        if self.first.names:
            _, weights = nnx.split(self.first)
            run = before_stages(self.layout, self.run_first)
            x_BLD, loads = run(weights, x_BLD, inputs)
        _, weights = nnx.split(self.layers_N)
        run = in_stages(self.layout, self.run_layers, self.remat)
        x_BLD, repeated = run(weights, x_BLD, inputs)
        if isinstance(self.layers_N, BlockSequence):
            loads |= {f"layers_N/{name}": load for name, load in repeated.items()}
        else:
            loads |= {"layers_N": repeated}
        return normed(self.norm, x_BLD), loads

    def contexts(self, make_contexts: MakeContexts) -> ByKind:
        """Returns the contexts of each kind of block, with shared rotary angles or biases."""
        shared = []
        for kind in self.kinds:
            contexts = make_contexts(kind)
            context = contexts.row
            if context.positions_BL is not None:
                width = kind.attention.position_width(self.spec)
                prepared = kind.positions.prepare(context.positions_BL, width)
                context = dataclasses.replace(context, prepared=prepared)
            if self.bias is not None and kind.positions == self.spec.positions:
                assert context.relative_positions is not None
                bias = self.bias(context.relative_positions, self.causal)
                context = dataclasses.replace(context, bias=bias)
            shared.append(contexts._replace(row=context))
        return tuple(shared)

    def run_first(self, weights: Params, x_BLD: Array, inputs: Inputs) -> tuple[Array, Loads]:
        """Runs complete rows through the first blocks."""
        loads = Loads()
        for index, (name, block) in enumerate(self.first.each().items()):
            layer = self.remat(self.layer_runner(block, inputs))
            # Repeats of the pattern use smaller numbers.
            x_BLD, load = layer(x_BLD, (weights[name], self.spec.layers + index))
            loads[f"first/{name}"] = jax.tree.map(lambda x: x[None], load)
        return x_BLD, loads

    def layer_runner(self, block: BlockLayer | BlockSequence, inputs: Inputs) -> Callable:
        """Returns a function that runs a layer, or a repeat, given its weights and its number."""
        contexts, key = inputs
        graph, _ = nnx.split(block)

        def layer(x_BLD: Array, numbered: tuple[Params, Array | int]) -> tuple[Array, Any]:
            weights, index = numbered
            block = nnx.merge(graph, self.spec.precision.to_products(weights))
            x_BLD = checkpoint_name(x_BLD, "layer_input")
            layer_key = None if key is None else jax.random.fold_in(key, index)
            x_BLD, _, load = block(x_BLD, contexts, key=layer_key)
            return x_BLD, load

        return layer

    def run_layers(
        self, weights: Stacked, x_BLD: Array, inputs: Inputs, first: Array | int = 0
    ) -> tuple[Array, Any]:
        """Runs complete rows through the layers with these weights; `first` is the first index."""
        layer = self.layer_runner(self.layers_N, inputs)
        layer = jax.named_scope("layers")(layer)  # the lint uses it to count what stages split
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
        """Wraps a function in the rematerialization of the settings."""
        if self.spec.remat == "none":
            return run
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.spec.remat_saves),
            names_which_can_be_offloaded=list(self.spec.remat_offloads),
            offload_src="device",
            offload_dst="pinned_host",
        )
        if self.spec.remat == "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(run, policy=policy)

    def init_cache(
        self, weights: Stacked, batch_sequences: int, cache_length: int, memory_BMD: Array | None
    ) -> Caches:
        """Returns the caches of all layers, stacked or in a list like their weights."""

        def of_layer(weights: Stacked) -> Cache:
            return self.layer(weights).init_cache(batch_sequences, cache_length, memory_BMD)

        first = self.first.init_cache(batch_sequences, cache_length, memory_BMD)
        if isinstance(weights, list):
            return first, list(map(of_layer, weights))
        return first, jax.lax.map(of_layer, weights)

    def step(
        self, weights: Stacked, x_BLD: Array, caches: Caches, make_contexts: MakeContexts
    ) -> tuple[Array, Caches]:
        """Runs new tokens through all layers and the norm; also returns the updated caches."""
        contexts = self.contexts(make_contexts)
        first, repeats = caches
        x_BLD, updated_first, _ = self.first(x_BLD, contexts, first)

        def run(carry: tuple[Array, Any], numbered: tuple[Stacked, Array]) -> tuple[Any, None]:
            (x_BLD, stacks), (weights, index) = carry, numbered
            cache = jax.tree.map(lambda stack: LayerCache(stack, index), stacks)
            x_BLD, cache, _ = self.layer(weights)(x_BLD, contexts, cache)
            return (x_BLD, jax.tree.map(lambda _, one: one.stack, stacks, cache)), None

        if isinstance(weights, list):
            updated = []
            for layer_weights, cache in zip(weights, repeats, strict=True):
                x_BLD, cache, _ = self.layer(layer_weights)(x_BLD, contexts, cache)
                updated.append(cache)
            repeats = updated
        else:
            numbers = jnp.arange(len(jax.tree.leaves(weights)[0]), dtype=jnp.int32)
            (x_BLD, repeats), _ = jax.lax.scan(run, (x_BLD, repeats), (weights, numbers))
        return normed(self.norm, x_BLD), (updated_first or {}, repeats)

    def layer(self, weights: Stacked) -> BlockLayer | BlockSequence:
        """Returns one repeat of the blocks with these weights."""
        return nnx.merge(nnx.split(self.layers_N)[0], weights)
