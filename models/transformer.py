"""The Transformer as a model: weights, training loss and cached decoding."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Batch, Cache, Params
from models.attention import View, cached_view, packed_view
from models.dropout import dropout
from models.loss import Criterion, Sums, softmax_loss, token_losses
from models.positions import sinusoids
from models.spec import Transformer
from models.stack import Stack
from models.weights import Weights

Array = jax.Array


class Network(nnx.Module):
    """Embedding, decoder stack and softmax weights."""

    def __init__(self, spec: Transformer, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.embed_VD = weights.normal("VD", fan_in="D")
        if not spec.tied:
            self.softmax_VD = weights.normal("VD", fan_in="D")
        if spec.positions == "learned":
            self.positions_LD = weights.normal("LD", fan_in="D")
        self.decoder = Stack(spec, layout, weights)

    def __call__(
        self, tokens_BL: Array, view: View, cache: Cache | None = None, key: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """The last layer's normed output, and the cache with these tokens in it."""
        x_BLD = self.embed(tokens_BL, view.positions_BL)
        if key is not None:
            key, input_key = jax.random.split(key)
            x_BLD = dropout(self.layout, input_key, self.spec.dropout, x_BLD, "BLD")
        return self.decoder(x_BLD, view, cache, key)

    def embed(self, tokens_BL: Array, positions_BL: Array) -> Array:
        """Embeddings of tokens and places, scaled to variance 1 (Vaswani et al. 2017, 3.4)."""
        take, spec = self.layout.take, self.spec
        x_BLD = take(self.embed_VD[...], tokens_BL, "BLD")
        if spec.positions == "learned":
            x_BLD += take(self.positions_LD[...], positions_BL, "BLD")
        x_BLD *= spec.d_model**0.5
        if spec.positions == "sinusoidal":
            x_BLD += sinusoids(self.layout, positions_BL, spec.d_model)
        return x_BLD.astype(spec.precision.compute)

    def output_weights(self) -> Array:
        weights_VD = self.embed_VD if self.spec.tied else self.softmax_VD
        return weights_VD[...].astype(self.spec.precision.compute)


@dataclasses.dataclass(frozen=True)
class TransformerModel:
    """A Transformer under a layout, as `models.api.Model`."""

    spec: Transformer
    layout: Layout

    def build(self, key: Array) -> Network:
        spec = self.spec
        weights = Weights(self.layout, spec.sizes, nnx.Rngs(params=key), spec.precision.store)
        return Network(spec, self.layout, weights)

    def init(self, key: Array) -> Params:
        return nnx.to_pure_dict(nnx.split(self.build(key))[1])

    def network(self, params: Params) -> Network:
        """The network with these weights."""
        abstract = jax.eval_shape(lambda: self.build(jax.random.key(0)))
        return nnx.merge(nnx.split(abstract)[0], params)

    def hidden(self, params: Params, batch: Batch, key: Array | None) -> tuple[Network, Array]:
        network = self.network(params)
        view = packed_view(self.layout, batch["positions_BL"], batch["segments_BL"])
        x_BLD, _ = network(batch["inputs_BL"], view, key=key)
        return network, x_BLD

    def loss(
        self, params: Params, batch: Batch, criterion: Criterion, key: Array | None = None
    ) -> Sums:
        network, x_BLD = self.hidden(params, batch, key)
        return softmax_loss(
            self.layout,
            criterion,
            self.spec.loss_chunks,
            x_BLD,
            network.output_weights(),
            batch["targets_BL"],
            batch["segments_BL"] > 0,
        )

    def token_losses(self, params: Params, batch: Batch) -> Array:
        network, x_BLD = self.hidden(params, batch, None)
        targets_BL, counted_BL = batch["targets_BL"], batch["segments_BL"] > 0
        return token_losses(self.layout, x_BLD, network.output_weights(), targets_BL, counted_BL)

    def start(self, params: Params, batch_sequences: int, places: int) -> Cache:
        spec = self.spec
        shape = (spec.layers, batch_sequences, spec.sizes["J"], places, spec.d_kv)
        zeros_NBJMK = jnp.zeros(shape, spec.precision.compute)
        empty_NBJMK = self.decoding().layout.to(zeros_NBJMK, "NBJMK")
        return {"keys_BJMK": empty_NBJMK, "values_BJMK": empty_NBJMK}

    def step(
        self, params: Params, cache: Cache, tokens_BL: Array, positions_BL: Array
    ) -> tuple[Cache, Array]:
        model = self.decoding()
        network = model.network(params)
        view = cached_view(model.layout, positions_BL, cache["keys_BJMK"].shape[3])
        x_BLD, filled = network(tokens_BL, view, cache)
        assert filled is not None
        logits_BLV = model.layout.einsum(
            "BLD,VD->BLV", x_BLD, network.output_weights(), dtype=jnp.float32
        )
        return filled, logits_BLV

    def decoding(self) -> "TransformerModel":
        """The same model with rows whole along their length: one token cannot be split."""
        layout = self.layout.without("length").without("memory")
        return dataclasses.replace(self, layout=layout)
