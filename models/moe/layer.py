"""A mixture of experts in place of a feed-forward layer."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.dropout import dropout
from models.feed_forward import activate_hidden
from models.initializers import Weights
from models.moe.dispatch import KINDS
from models.moe.grouped_matmul import grouped_product
from models.moe.routing import Load, Routing
from models.spec import TransformerSpec

Array = jax.Array


class MoeLayer(nnx.Module):
    """Feed-forward experts, of which each token gets few.  Lepikhin et al. 2020 (GShard), 2.2."""

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

    def __call__(
        self,
        x_BLD: Array,
        is_token_BL: Array | None,
        key: Array | None = None,
        *,
        drop_tokens: bool = True,
    ) -> tuple[Array, Load]:
        """Runs each token through its experts; returns also the load of the experts.

        Without dropped tokens, as in decoding, no token depends on another.
        """
        router, layout = self.moe.router, self.layout
        route_key, jitter_key, dropout_key = (
            (None,) * 3 if key is None else jax.random.split(key, 3)
        )
        batch, length, d_model = x_BLD.shape
        (rows,), tokens = layout.unpadded_shape("B", (batch,)), length
        if drop_tokens and self.moe.group_tokens is not None:
            tokens = math.gcd(rows * length, self.moe.group_tokens)
        shape = (batch * length // tokens, tokens)
        x_GSD = self.regrouped(x_BLD, (*shape, d_model), "BlD", "GSD")
        capacity = tokens
        if is_token_BL is None:
            is_token_GS = layout.iota("GS", shape, "G") >= 0
        else:
            is_token_GS = self.regrouped(is_token_BL, shape, "Bl", "GS")
        if drop_tokens and self.moe.dispatch != "dropless":
            training = key is not None
            capacity = router.capacity(tokens, self.moe.experts, training=training)
        logits_GSe = self.logits(x_GSD, jitter_key)
        gates_GSe = jax.nn.softmax(logits_GSe, axis=-1)
        routing = router.route(layout, gates_GSe, is_token_GS, capacity, route_key)
        experts = Experts(self, layout.with_sizes(G=rows * length // tokens), dropout_key)
        y_GSD = KINDS[self.moe.dispatch](experts, x_GSD, routing, capacity)
        y_BlD = self.regrouped(y_GSD, x_BLD.shape, "GSD", "BlD")
        return layout.reshard(y_BlD, "BLD"), load_of(
            layout, logits_GSe, gates_GSe, routing, is_token_GS
        )

    def regrouped(self, x: Array, shape: tuple[int, ...], axes: str, regrouped: str) -> Array:
        """Reshapes rows to groups, or back; a group is a part of a row, or some rows."""
        return self.layout.reshape(self.layout.reshard(x, axes), shape, regrouped)

    def logits(self, x_GSD: Array, key: Array | None) -> Array:
        """Returns the router's logits, in float32."""
        rate, wide_GSD = self.moe.router.jitter, x_GSD.astype(jnp.float32)
        if key is not None and rate:
            drawn_GSD = self.layout.random(jax.random.uniform, key, "GSD", x_GSD.shape)
            wide_GSD *= 1 + rate * (2 * drawn_GSD - 1)
        router_De = self.layout.reshard(self.router_DE[...].astype(jnp.float32), "De")
        return self.layout.einsum("GSD,De->GSe", wide_GSD, router_De)


class Experts:
    """The feed-forward layers of a mixture, as `models.moe.dispatch.Experts`."""

    def __init__(self, owner: MoeLayer, layout: Layout, key: Array | None):
        self.owner, self.layout, self.key = owner, layout, key
        self.count = owner.moe.experts

    def run(self, x_EGCD: Array) -> Array:
        einsum, own, gate_EGCF = self.layout.einsum, self.owner, None
        h_EGCF = einsum("EGCD,EDF->EGCF", x_EGCD, own.wi_EDF[...])
        if own.spec.gated:
            gate_EGCF = einsum("EGCD,EDF->EGCF", x_EGCD, own.wg_EDF[...])
        h_EGCF = activate_hidden(own.spec, h_EGCF, gate_EGCF)
        h_EGCF = dropout(self.layout, self.key, own.spec.dropout, h_EGCF, "EGCF")
        return einsum("EGCF,EFD->EGCD", h_EGCF, own.wo_EFD[...])

    def run_blocks(self, x_Glcd: Array, expert_Gl: Array) -> Array:
        layout, own = self.layout, self.owner

        def into(weights_EDF: Array) -> Array:
            weights_edF = layout.reshard(weights_EDF, "edF")
            return grouped_product(layout, "Glcd,edF->GlcF", x_Glcd, weights_edF, expert_Gl)

        gate_GlcF = into(own.wg_EDF[...]) if own.spec.gated else None
        h_GlcF = activate_hidden(own.spec, into(own.wi_EDF[...]), gate_GlcF)
        h_GlcF = dropout(layout, self.key, own.spec.dropout, h_GlcF, "GlcF")
        wo_eFd = layout.reshard(own.wo_EFD[...], "eFd")
        return grouped_product(layout, "GlcF,eFd->Glcd", h_GlcF, wo_eFd, expert_Gl)


def load_of(
    layout: Layout, logits_GSe: Array, gates_GSe: Array, routing: Routing, is_token_GS: Array
) -> Load:
    """Sums what a router did with the tokens, padding left out."""
    shape = (*routing.expert_GSI.shape, gates_GSe.shape[-1])
    here_GSIe = layout.iota("GSIe", shape, "e") == routing.expert_GSI[..., None]
    kept_GSI = routing.kept_GSI.astype(jnp.float32)
    count_GS = is_token_GS.astype(jnp.float32)
    count_GS1 = count_GS[:, :, None]
    tokens_G1 = jnp.sum(count_GS1, axis=1)
    first_GSe = jnp.where(here_GSIe[:, :, 0], count_GS1, 0)
    share_Ge = jnp.sum(first_GSe, axis=1) / jnp.maximum(tokens_G1, 1)
    mean_Ge = jnp.sum(gates_GSe * count_GS1, axis=1) / jnp.maximum(tokens_G1, 1)
    # Algorithm 1 of GShard, line 13, which is 1 / experts^2 where all are used alike.
    aux_G1 = shape[-1] ** 2 * jnp.mean(share_Ge * mean_Ge, axis=-1, keepdims=True)
    log_z_GS = jax.nn.logsumexp(logits_GSe, axis=-1)
    entropy_GS = -jnp.sum(gates_GSe * jnp.log(jnp.maximum(gates_GSe, 1e-30)), axis=-1)
    return Load(
        aux=jnp.sum(aux_G1 * tokens_G1),
        z=jnp.sum(jnp.square(log_z_GS) * count_GS),
        entropy=jnp.sum(entropy_GS * count_GS),
        kept_e=layout.einsum("GSIe->e", jnp.where(here_GSIe, kept_GSI[..., None], 0)),
        chosen_I=layout.einsum("GSI->I", routing.chosen_GSI.astype(jnp.float32)),
        kept_I=layout.einsum("GSI->I", kept_GSI),
        tokens=jnp.sum(tokens_G1),
    )
