"""A stack of equal blocks, stored stacked; run by a scan or one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.attention import View
from models.blocks import Block, Norm
from models.spec import Transformer
from models.weights import Weights

Array = jax.Array
REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nnx.Module):
    """All layers.  Each weight has a leading axis N, whatever way the layers are run."""

    def __init__(self, spec: Transformer, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.layers_N = Block(spec, layout, weights.stacked("N"))
        self.norm = Norm(layout, weights)

    def __call__(
        self, x_BLD: Array, view: View, cache: Cache | None = None, key: Array | None = None
    ) -> tuple[Array, Cache | None]:
        graph, weights = nnx.split(self.layers_N)
        index_N = jnp.arange(self.spec.layers)

        def layer(x_BLD: Array, own: tuple[Any, Any, Any]) -> tuple[Array, Cache | None]:
            weights, cache, index = own
            block = nnx.merge(graph, self.spec.precision.to_compute(weights))
            layer_key = None if key is None else jax.random.fold_in(key, index)
            return block(x_BLD, view, cache, layer_key)

        if self.spec.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.spec.remat])
        if self.spec.scan or cache is not None:
            x_BLD, cache = jax.lax.scan(layer, x_BLD, (weights, cache, index_N))
        else:
            for index, own in enumerate(self.layout.unstack(weights)):
                x_BLD, _ = layer(x_BLD, (own, None, index))
        return self.norm(x_BLD), cache
