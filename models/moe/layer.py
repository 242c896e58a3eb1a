"""Replaces a feed-forward layer by a mixture of experts."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from layouts.random_bytes import random_bytes_of_rows, seed_of
from models.dropout import drop
from models.feed_forward import activate_hidden
from models.initializers import Weights
from models.moe.dispatch import WITH_CAPACITY, DrawBytes, in_blocks
from models.moe.grouped_matmul import grouped_product
from models.moe.routing import Load, Routing
from models.spec import TransformerSpec

Array = jax.Array


class MoeLayer(nnx.Module):
    """Sends each token to few of many feed-forward experts.  Lepikhin et al. 2020 (GShard), 2.2."""

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        assert spec.moe is not None
        self.spec = spec
        self.moe = spec.moe
        self.layout = layout
        weights = weights.with_sizes(F=spec.moe.d_ff or spec.d_ff)
        self.router_DE = weights.normal("DE", fan_in="D")
        self.wi_EDF = weights.normal("EDF", fan_in="D")
        if spec.gated:
            self.wg_EDF = weights.normal("EDF", fan_in="D")
        self.wo_EFD = weights.normal("EFD", fan_in="F")

    @jax.named_scope("experts")
    def __call__(
        self,
        x_BLD: Array,
        segments_BL: Array | None,
        key: Array | None = None,
        *,
        drop_tokens: bool = True,
    ) -> tuple[Array, Load]:
        """Runs each token through its experts; returns also the load of the experts.

        Without dropped tokens, as in decoding, no token depends on another segment.
        """
        layout = self.layout
        route_key, jitter_key, dropout_key = (
            (None,) * 3 if key is None else jax.random.split(key, 3)
        )
        groups, tokens = self.grouping(x_BLD.shape, drops=drop_tokens)
        x_GsD = self.regrouped(x_BLD, (groups, tokens, x_BLD.shape[2]), "BlD", "GsD")
        if segments_BL is None:
            segments_Gs = layout.reshard(jnp.ones((groups, tokens), jnp.int32), "Gs")
        else:
            segments_Gs = self.regrouped(segments_BL, (groups, tokens), "Bl", "Gs")
        logits_Gse = self.logits(x_GsD, jitter_key)
        gates_Gse = jax.nn.softmax(logits_Gse, axis=-1)
        capacity = None
        if drop_tokens and self.moe.dispatch != "dropless":
            training = key is not None
            capacity = self.moe.router.capacity(tokens, self.moe.experts, training=training)
        routing = self.moe.router.route(layout, gates_Gse, segments_Gs, capacity, route_key)
        experts = Experts(self, dropout_key)
        if capacity is None:
            y_GsD = in_blocks(experts, x_GsD, routing, at_experts=not drop_tokens)
        else:
            y_GsD = WITH_CAPACITY[self.moe.dispatch](experts, x_GsD, routing, capacity)
        y_BlD = self.regrouped(y_GsD, x_BLD.shape, "GsD", "BlD")
        return layout.reshard(y_BlD, "BLD"), load_of(
            layout, logits_Gse, gates_Gse, routing, segments_Gs > 0
        )

    def grouping(self, shape: tuple[int, ...], *, drops: bool) -> tuple[int, int]:
        """Returns the groups of a batch and their tokens; without drops, a row is a group."""
        batch, tokens, _ = shape
        (rows,) = self.layout.unpadded_shape("B", (batch,))
        if drops and self.moe.group_tokens is not None:
            tokens = math.gcd(rows * tokens, self.moe.group_tokens)
        return batch * shape[1] // tokens, tokens

    def regrouped(self, x: Array, shape: tuple[int, ...], axes: str, regrouped: str) -> Array:
        """Reshapes rows to groups, or back; a group is a part of a row, or some rows."""
        return self.layout.reshape(self.layout.reshard(x, axes), shape, regrouped)

    def logits(self, x_GsD: Array, key: Array | None) -> Array:
        """Returns the router's logits, in JAX's float type, not in that of products."""
        rate, wide_GsD = self.moe.router.jitter, x_GsD.astype(float)
        if key is not None and rate:
            drawn_GsD = self.layout.random(jax.random.uniform, key, "GsD", x_GsD.shape)
            wide_GsD *= 1 + rate * (2 * drawn_GsD - 1)
        router_De = self.router_DE[...].astype(float)
        router_De = self.layout.reshard(router_De, "De", stored=True)
        return self.layout.einsum("GsD,De->Gse", wide_GsD, router_De)


class Experts:
    """Implements `models.moe.dispatch.ExpertLayers` with the weights of a layer."""

    def __init__(self, layer: MoeLayer, key: Array | None):
        self.layer, self.layout = layer, layer.layout
        self.num_experts = layer.moe.experts
        self.has_dropout = key is not None and layer.spec.hidden_dropout_rate > 0
        self.seed = seed_of(key) if key is not None else jnp.zeros(2, jnp.uint32)

    def weights(self) -> dict[str, Array]:
        names = ["wi_EDF", "wg_EDF", "wo_EFD"] if self.layer.spec.gated else ["wi_EDF", "wo_EFD"]
        return {name: getattr(self.layer, name)[...] for name in names}

    def run(self, x_EGcD: Array, id_EGc: Array | None) -> Array:
        layout, spec, weights = self.layout, self.layer.spec, self.weights()

        def into(weights_EDF: Array) -> Array:
            return layout.einsum("EGcD,EDF->EGcF", x_EGcD, weights_EDF)

        gate_EGcF = into(weights["wg_EDF"]) if spec.gated else None
        h_EGcF = activate_hidden(spec, into(weights["wi_EDF"]), gate_EGcF)
        if id_EGc is not None:
            drawn_EGcF = random_bytes_of_rows(layout, self.seed, id_EGc, "EGcF", h_EGcF.shape[-1])
            h_EGcF = drop(h_EGcF, drawn_EGcF, spec.hidden_dropout_rate)
        return layout.einsum("EGcF,EFD->EGcD", h_EGcF, weights["wo_EFD"])

    def run_blocks(
        self, x_lcd: Array, expert_l: Array, draw: DrawBytes, weights: Mapping[str, Array]
    ) -> Array:
        spec = self.layer.spec

        def into(weights_edf: Array) -> Array:
            return grouped_product(x_lcd, weights_edf, expert_l)

        gate_lcf = into(weights["wg_EDF"]) if spec.gated else None
        h_lcf = activate_hidden(spec, into(weights["wi_EDF"]), gate_lcf)
        if self.has_dropout:
            h_lcf = drop(h_lcf, draw(width=h_lcf.shape[-1]), spec.hidden_dropout_rate)
        return grouped_product(h_lcf, weights["wo_EFD"], expert_l)


def load_of(
    layout: Layout, logits_Gse: Array, gates_Gse: Array, routing: Routing, is_token_Gs: Array
) -> Load:
    """Sums what a router did with the tokens, padding left out."""
    shape = (*routing.expert_Gsi.shape, gates_Gse.shape[-1])
    here_Gsie = layout.iota("Gsie", shape, "e") == routing.expert_Gsi[..., None]
    kept_Gsi = routing.kept_Gsi.astype(float)
    count_Gs = is_token_Gs.astype(float)
    count_Gs1 = count_Gs[:, :, None]
    tokens_G1 = jnp.sum(count_Gs1, axis=1)
    first_Gse = jnp.where(here_Gsie[:, :, 0], count_Gs1, 0)
    share_Ge = jnp.sum(first_Gse, axis=1) / jnp.maximum(tokens_G1, 1)
    mean_Ge = jnp.sum(gates_Gse * count_Gs1, axis=1) / jnp.maximum(tokens_G1, 1)
    # Algorithm 1 of GShard, line 13, which is 1 / experts^2 if all are used equally.
    aux_G1 = shape[-1] ** 2 * jnp.mean(share_Ge * mean_Ge, axis=-1, keepdims=True)
    log_z_Gs = jax.nn.logsumexp(logits_Gse, axis=-1)
    entropy_Gs = -jnp.sum(gates_Gse * jnp.log(jnp.maximum(gates_Gse, 1e-30)), axis=-1)
    return Load(
        aux=jnp.sum(aux_G1 * tokens_G1),
        z=jnp.sum(jnp.square(log_z_Gs) * count_Gs),
        entropy=jnp.sum(entropy_Gs * count_Gs),
        kept_e=layout.einsum("Gsie->e", jnp.where(here_Gsie, kept_Gsi[..., None], 0)),
        chosen_i=layout.einsum("Gsi->i", routing.chosen_Gsi.astype(float)),
        kept_i=layout.einsum("Gsi->i", kept_Gsi),
        tokens=jnp.sum(tokens_G1),
    )
