"""A stack of equal blocks, stored stacked; run by a scan or one by one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.attention import View
from models.blocks import Block, Blocks, Norm
from models.initializers import Weights
from models.positions import RelativeBias
from models.spec import BlockKind, TransformerSpec

Array = jax.Array
Stepper = Callable[[Array, Any, View, View | None], tuple[Array, Any]]
Views = tuple[View, View | None]
# A Load with a leading axis for the turns, or several by block; None where there are no experts.
Loads = Any
REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nnx.Module):
    """All layers, as turns of a pattern of blocks.

    Each weight has a leading axis N, one for each turn, whatever way the layers are run.
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
        reads_source: bool = False,
    ):
        self.spec = spec
        self.layout = layout
        self.turns = layers // len(pattern)
        self.causal = causal
        stacked = weights.with_sizes(N=self.turns).stacked("N")
        self.layers_N: Block | Blocks
        if len(pattern) == 1:
            kind = pattern[0]
            self.layers_N = Block(spec, layout, stacked, kind=kind, reads_source=reads_source)
        else:
            self.layers_N = Blocks(spec, layout, stacked, pattern, reads_source=reads_source)
        shares_bias = spec.positions == "relative" and spec.shares_bias
        self.bias = RelativeBias(spec, layout, weights) if shares_bias else None
        self.norm = Norm(layout, weights)

    def __call__(
        self, x_BLD: Array, view: View, source: View | None = None, key: Array | None = None
    ) -> tuple[Array, Loads]:
        """Whole rows, from first to last layer; and how experts were loaded, turn by turn."""
        view = self.biased(view)
        graph, weights = nnx.split(self.layers_N)

        def layer(x_BLD: Array, own: tuple[Any, Any]) -> tuple[Array, Loads]:
            weights, index = own
            block = nnx.merge(graph, self.spec.precision.to_compute(weights))
            layer_key = None if key is None else jax.random.fold_in(key, index)
            x_BLD, _, load = block(x_BLD, view, source, key=layer_key)
            return x_BLD, load

        if self.spec.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.spec.remat])
        if self.spec.scan:
            x_BLD, loads = jax.lax.scan(layer, x_BLD, (weights, jnp.arange(self.turns)))
        else:
            each = []
            for index, own in enumerate(self.layout.unstack(weights)):
                x_BLD, load = layer(x_BLD, (own, index))
                each.append(load)
            loads = jax.tree.map(lambda *turns: jnp.stack(turns), *each)
        return self.norm(x_BLD), loads

    def biased(self, view: View) -> View:
        """The view with the relative bias that all layers share, where they do."""
        if self.bias is None:
            return view
        assert view.behind is not None
        return dataclasses.replace(view, bias=self.bias(view.behind, self.causal))

    def start(
        self, batch_sequences: int, places: int, memory_BMD: Array | None
    ) -> tuple[Stepper, Any]:
        """A function that runs rows through cached layers, and their caches, empty as yet.

        What can be done with the weights and the source beforehand is done here, once.
        """
        graph, stored = nnx.split(self.layers_N)
        weights = self.spec.precision.to_compute(stored)
        sizes = {"B": batch_sequences, "M": places, **self.spec.sizes}
        empty_BJMK = jnp.zeros([sizes[letter] for letter in "BJMK"], self.spec.precision.compute)
        empty_BJMK = self.layout.reshard(empty_BJMK, "BJMK")

        def empty(block: Block | Blocks) -> Cache:
            if isinstance(block, Blocks):
                return {name: empty(own) for name, own in block.each().items()}
            cache = {"keys_BJMK": empty_BJMK, "values_BJMK": empty_BJMK}
            if memory_BMD is None:
                return cache
            k_BJMK, v_BJMK = block.source_attention.remember(memory_BMD)
            return {**cache, "source_keys_BJMK": k_BJMK, "source_values_BJMK": v_BJMK}

        def run_scanned(x_BLD: Array, caches: Any, views: Views) -> tuple[Array, Any]:
            def layer(x_BLD: Array, own: tuple[Any, Any]) -> tuple[Array, Any]:
                return nnx.merge(graph, own[0])(x_BLD, *views, own[1])[:2]

            return jax.lax.scan(layer, x_BLD, (weights, caches))

        def run_in_a_row(x_BLD: Array, caches: Any, views: Views) -> tuple[Array, Any]:
            filled = []
            for block, cache in zip(blocks, caches, strict=True):
                x_BLD, cache, _ = block(x_BLD, *views, cache)
                filled.append(cache)
            return x_BLD, filled

        if self.spec.scan:
            run, caches = (
                run_scanned,
                jax.lax.map(lambda own: empty(nnx.merge(graph, own)), weights),
            )
        else:
            blocks = [nnx.merge(graph, own) for own in self.layout.unstack(weights)]
            run, caches = run_in_a_row, [empty(block) for block in blocks]

        def step(x_BLD: Array, caches: Any, view: View, source: View | None) -> tuple[Array, Any]:
            x_BLD, caches = run(x_BLD, caches, (self.biased(view), source))
            return self.norm(x_BLD), caches

        return step, caches
