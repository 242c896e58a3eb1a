"""Replaces a feed-forward layer with a mixture of experts."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.spec import Count, spec
from layouts.layout import Layout
from layouts.low_rank import merged
from layouts.padding import resized, with_padding
from models.dropout import Key, split_key
from models.feed_forward.mlp import Mlp, MlpLayer
from models.feed_forward.moe.dispatch import WITH_CAPACITY, Experts, in_blocks
from models.feed_forward.moe.routing import Load, Router, Routing, Top2
from models.initializers import Weights
from models.parts import FeedForward
from models.precision import FloatType
from models.sizes import Sizes

Dispatch = Literal["einsum", "gather", "dropless"]
WEIGHTS = ("wi_EDF", "wg_EDF", "wo_EFD", "bi_EF", "bg_EF", "bo_ED")
"""Weights of experts; those of gates, and biases, are not in all layers."""


@spec
class Moe(FeedForward):
    """Replaces a feed-forward layer with experts.  Lepikhin et al. 2020 (GShard), section 2.2."""

    free_on_resume: ClassVar[tuple[str, ...]] = ("dispatch",)

    experts: Count
    """Number of experts in a layer."""
    d_ff: Count | None = None
    """Width of an expert. None: Transformer.d_ff."""
    expert: Mlp = Mlp()
    """Settings of each expert. With `biases`, the router has one per expert, too."""
    router: Router = Top2()
    """Chooses the experts for each token."""
    dispatch: Dispatch = "gather"
    """How tokens reach their experts in training and evaluation: "einsum" multiplies with masks, as
    GShard does on TPUs (not measured there); "gather" uses indices, which is faster on CPUs;
    "dropless" uses indices into as many blocks as each expert needs. The results are equal, except
    that "dropless" drops no tokens."""
    shared_d_ff: Count | None = None
    """Width of the shared expert: a feed-forward layer that all tokens go through, in addition to
    their experts (Dai et al. 2024, section 3.2). None: no shared expert."""
    group_tokens: Count | None = None
    """Tokens that are routed together and share the experts' capacity. None: a row. Groups are
    smaller if an evaluation batch does not divide into groups of this size."""

    def __post_init__(self) -> None:
        self.router.check(self.experts)

    @property
    def drops_tokens(self) -> bool:
        return self.dispatch != "dropless"

    def dropout_rate(self, sizes: Sizes) -> float:
        return self.expert.dropout_rate(sizes)

    def width(self, sizes: Sizes) -> int:
        """Returns the width of an expert."""
        return self.d_ff or sizes.d_ff

    def active(self, sizes: Sizes) -> FeedForward:
        width = self.router.choices * self.width(sizes) + (self.shared_d_ff or 0)
        return ActiveExperts(expert=self.expert, width=width)

    def build(self, sizes: Sizes, layout: Layout, weights: Weights) -> "MoeLayer":
        return MoeLayer(self, sizes, layout, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveExperts(FeedForward):
    """Computes a dense layer as wide as the experts of one token together."""

    expert: Mlp
    width: int

    def build(self, sizes: Sizes, layout: Layout, weights: Weights) -> MlpLayer:
        wide = with_padding(layout, F=self.width)
        return self.expert.build(sizes, wide, weights.with_sizes(F=self.width))


class MoeLayer(nnx.Module):
    """Sends each token to a few of many feed-forward experts."""

    def __init__(self, spec: Moe, sizes: Sizes, layout: Layout, weights: Weights):
        self.spec = spec
        self.rate = spec.dropout_rate(sizes)
        self.layout = with_padding(layout, E=spec.experts, F=spec.width(sizes))
        weights = weights.with_sizes(E=spec.experts, F=spec.width(sizes))
        self.router_DE = weights.normal("DE", fan_in="D")
        self.wi_EDF = weights.normal("EDF", fan_in="D")
        if spec.expert.gated:
            self.wg_EDF = weights.normal("EDF", fan_in="D")
        self.wo_EFD = weights.normal("EFD", fan_in="F")
        if spec.expert.biases:
            self.router_bias_E = weights.zeros("E")
            self.bi_EF, self.bo_ED = weights.zeros("EF"), weights.zeros("ED")
            if spec.expert.gated:
                self.bg_EF = weights.zeros("EF")
        if spec.router.has_bias:
            # In 16 bits, a step of 0.001 is lost if the bias is above 0.25.
            wide: FloatType = "float64" if weights.dtype == "float64" else "float32"
            self.bias_E = dataclasses.replace(weights, dtype=wide).zeros("E")
        if spec.shared_d_ff is not None:
            weights = weights.with_sizes(F=spec.shared_d_ff)
            shared = with_padding(layout, F=spec.shared_d_ff)
            self.shared = spec.expert.build(sizes, shared, weights)

    @jax.named_scope("experts")
    def __call__(
        self, x_BLD: Array, segments_BL: Array | None, key: Key = None, *, drop_tokens: bool = True
    ) -> tuple[Array, Load]:
        """Runs each token through its experts; also returns the load of the experts.

        If no tokens are dropped, as in decoding, tokens do not depend on other segments.
        """
        layout, spec = self.layout, self.spec
        route_key, jitter_key, dropout_key = split_key(key, 3)
        router = spec.router
        x_BlD = layout.reshard(x_BLD, "BlD")  # rows without their padding
        (rows,), tokens = layout.unpadded_shape("B", x_BLD.shape[:1]), x_BlD.shape[1]
        if drop_tokens and spec.group_tokens is not None:  # else a row is a group
            tokens = math.gcd(rows * tokens, spec.group_tokens)
        groups = x_BlD.shape[0] * x_BlD.shape[1] // tokens
        x_GsD = layout.reshape(x_BlD, (groups, tokens, x_BlD.shape[2]), "GsD")
        if segments_BL is None:
            segments_BL = jnp.ones(x_BlD.shape[:2], jnp.int32)
        segments_Gs = self.regrouped(segments_BL, (groups, tokens), "Bl", "Gs")
        with jax.named_scope("gate"):
            logits_Gse = self.logits(x_GsD, jitter_key)
            gates_Gse = router.gates(logits_Gse)
        bias_e = layout.reshard(self.bias_E[...].astype(float), "e") if router.has_bias else None
        capacity = None
        if drop_tokens and spec.drops_tokens:
            capacity = router.capacity(tokens, spec.experts, training=key is not None)
        with jax.named_scope("gate"):
            routing = router.route(layout, gates_Gse, segments_Gs, capacity, route_key, bias_e)
        weights = {name: getattr(self, name)[...] for name in WEIGHTS if hasattr(self, name)}
        if capacity is None:  # products in blocks need ordinary arrays
            weights = {name: merged(weight) for name, weight in weights.items()}
        experts = Experts(layout, spec.expert, spec.experts, weights, self.rate, dropout_key)
        if capacity is None:
            y_GsD = in_blocks(experts, x_GsD, routing, None if drop_tokens else router)
        else:
            y_GsD = WITH_CAPACITY[spec.dispatch](experts, x_GsD, routing, capacity)
        y_BlD = self.regrouped(y_GsD, x_BlD.shape, "GsD", "BlD")
        if y_BlD.shape != x_BLD.shape:  # inside stages, the layout may have no rule that pads rows
            y_BlD = resized(y_BlD, x_BLD.shape, layout.place("BlD"))
        y_BLD = layout.reshard(y_BlD, "BLD")
        if spec.shared_d_ff is not None:
            shared_key = None if key is None else jax.random.fold_in(key, 3)
            y_BLD = y_BLD + self.shared(x_BLD, segments_BL, shared_key)[0]
        probs_Gse = router.probabilities(gates_Gse)
        return y_BLD, load_of(layout, logits_Gse, probs_Gse, routing, segments_Gs > 0)

    def regrouped(self, x: Array, shape: tuple[int, ...], axes: str, regrouped: str) -> Array:
        """Reshapes rows to groups, or back; a group is a part of a row, or several rows."""
        return self.layout.reshape(self.layout.reshard(x, axes), shape, regrouped)

    def logits(self, x_GsD: Array, key: Key) -> Array:
        """Returns the router's logits, in JAX's float type instead of the type of products."""
        rate, wide_GsD = self.spec.router.jitter, x_GsD.astype(float)
        if key is not None and rate:
            drawn_GsD = self.layout.random(jax.random.uniform, key, "GsD", x_GsD.shape)
            wide_GsD *= 1 + rate * (2 * drawn_GsD - 1)
        router_De = self.router_DE[...].astype(float)
        router_De = self.layout.reshard(router_De, "De", stored=True)
        logits_Gse = self.layout.einsum("GsD,De->Gse", wide_GsD, router_De)
        if self.spec.expert.biases:
            bias_E = self.router_bias_E[...].astype(float)
            bias_e = self.layout.reshard(bias_E, "e", stored=True)
            logits_Gse += self.layout.broadcast_like(bias_e, "e", "Gse")
        return logits_Gse


def load_of(
    layout: Layout, logits_Gse: Array, probs_Gse: Array, routing: Routing, is_token_Gs: Array
) -> Load:
    """Sums statistics of a router over all tokens except padding."""
    shape = (*routing.expert_Gsi.shape, probs_Gse.shape[-1])
    here_Gsie = layout.iota("Gsie", shape, "e") == routing.expert_Gsi[..., None]
    kept_Gsi = routing.kept_Gsi.astype(float)
    count_Gs = is_token_Gs.astype(float)
    count_Gs1 = count_Gs[:, :, None]
    tokens_G1 = jnp.sum(count_Gs1, axis=1)
    first_Gse = jnp.where(here_Gsie[:, :, 0], count_Gs1, 0)
    share_Ge = jnp.sum(first_Gse, axis=1) / jnp.maximum(tokens_G1, 1)
    mean_Ge = jnp.sum(probs_Gse * count_Gs1, axis=1) / jnp.maximum(tokens_G1, 1)
    # Algorithm 1 of GShard, line 13, which is 1 / experts^2 if all are used equally.
    aux_G1 = shape[-1] ** 2 * jnp.mean(share_Ge * mean_Ge, axis=-1, keepdims=True)
    log_z_Gs = jax.nn.logsumexp(logits_Gse, axis=-1)
    entropy_Gs = -jnp.sum(probs_Gse * jnp.log(jnp.maximum(probs_Gse, 1e-30)), axis=-1)
    return Load(
        aux=jnp.sum(aux_G1 * tokens_G1),
        z=jnp.sum(jnp.square(log_z_Gs) * count_Gs),
        entropy=jnp.sum(entropy_Gs * count_Gs),
        kept_e=layout.einsum("Gsie->e", jnp.where(here_Gsie, kept_Gsi[..., None], 0)),
        chosen_i=layout.einsum("Gsi->i", routing.chosen_Gsi.astype(float)),
        kept_i=layout.einsum("Gsi->i", kept_Gsi),
        tokens=jnp.sum(tokens_G1),
    )
