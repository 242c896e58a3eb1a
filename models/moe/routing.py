"""Routers: which experts get a token, with which weight, at which place of their buffers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from configs.spec import Count, Fraction, NotNegative, Positive, abstract_spec, spec
from layouts.layout import Layout

Array = jax.Array


class Routing(NamedTuple):
    """The experts of each token: its choices I, the best first."""

    expert_GSI: Array
    gate_GSI: Array
    """The weight of the expert's output; 0 where the token does not go there."""
    place_GSI: Array
    """Where in the expert's buffer the token stands."""
    kept_GSI: Array
    """Whether the token goes there: chosen, and not beyond the capacity."""
    chosen_GSI: Array
    """Whether it was chosen, whatever the capacity."""


class Load(NamedTuple):
    """Sums over tokens of what a router did; microbatches and devices add up."""

    aux: Array
    """The auxiliary loss of each group, times its tokens."""
    z: Array
    """Squared log of the sum of exponentials."""
    entropy: Array
    """Of the gates, in nats."""
    kept_e: Array
    """Choices of each expert that found a place."""
    chosen_I: Array
    """First, second, ... choices."""
    kept_I: Array
    """Of these, the ones that found a place."""
    tokens: Array


@abstract_spec
class Router:
    """Holds what all routers share.  Gates are a softmax over the experts, in float32."""

    capacity_factor: Positive = 1.0
    """Places of an expert over its even share of the choices, in training."""
    evaluation_capacity_factor: Positive = 2.0
    """The same where nothing is trained."""
    least_capacity: Count = 4
    """Smallest number of slots that an expert has for a group of tokens."""
    jitter: Fraction = 0.0
    """In training the router reads its input times a random number within 1 +- jitter."""
    aux_loss: NotNegative = 0.01
    """Weight of the auxiliary loss, which is 1 where all experts are used alike."""
    z_loss: NotNegative = 0.0
    """Weight of the mean squared log of the gates' denominator (Zoph et al. 2022, equation 5)."""

    @property
    def choices(self) -> int:
        """Returns the number of experts of a token."""
        raise NotImplementedError

    @property
    def causal(self) -> bool:
        """Tells whether a token's experts depend on no later token."""
        return True

    def capacity(self, group_tokens: int, experts: int, *, training: bool) -> int:
        """Returns the slots that each expert has for one group of tokens."""
        factor = self.capacity_factor if training else self.evaluation_capacity_factor
        slots = math.ceil(factor * self.choices * group_tokens / experts)
        return min(group_tokens, max(self.least_capacity, slots))

    def route(
        self, layout: Layout, gates_GSe: Array, is_token_GS: Array, capacity: int, key: Array | None
    ) -> Routing:
        """Chooses the experts of each token but padding.  With a key, a router may be random."""
        raise NotImplementedError


@spec
class Top2(Router):
    """The two best experts of each token.  Lepikhin et al. 2020 (GShard), algorithm 1.

    Gates are normalised over the two; the second is used with probability min(1, 2 x its gate).
    """

    random_second: bool = True
    """Samples whether a token goes to its second expert; otherwise it always does."""

    @property
    def choices(self) -> int:
        return 2

    def route(
        self, layout: Layout, gates_GSe: Array, is_token_GS: Array, capacity: int, key: Array | None
    ) -> Routing:
        gate_GSI, expert_GSI = layout.top_k(gates_GSe, 2, "GSe")
        gate_GSI /= jnp.sum(gate_GSI, axis=-1, keepdims=True)
        chosen_GSI = jnp.broadcast_to(is_token_GS[:, :, None], gate_GSI.shape)
        place_GSI = buffer_positions(layout, expert_GSI, chosen_GSI, gates_GSe.shape[-1])
        if key is not None and self.random_second:
            drawn_GS = layout.random(jax.random.uniform, key, "GS", is_token_GS.shape)
            sent_GS = 2 * gate_GSI[:, :, 1] > drawn_GS
            # One that is not sent keeps its place (algorithm 1, line 22).
            first_GSI = layout.iota("GSI", gate_GSI.shape, "I") == 0
            chosen_GSI &= first_GSI | sent_GS[:, :, None]
        return drop_overflow(expert_GSI, gate_GSI, place_GSI, chosen_GSI, capacity)


@spec
class TopK(Router):
    """The k best experts of each token; 1 is the Switch.  Fedus et al. 2021; Jiang et al. 2024."""

    k: Count = 1
    """Experts of a token."""
    normalises: bool = False
    """Gates are divided by their sum over the k, as in Mixtral."""

    @property
    def choices(self) -> int:
        return self.k

    def route(
        self, layout: Layout, gates_GSe: Array, is_token_GS: Array, capacity: int, key: Array | None
    ) -> Routing:
        gate_GSI, expert_GSI = layout.top_k(gates_GSe, self.k, "GSe")
        if self.normalises:
            gate_GSI /= jnp.sum(gate_GSI, axis=-1, keepdims=True)
        chosen_GSI = jnp.broadcast_to(is_token_GS[:, :, None], gate_GSI.shape)
        place_GSI = buffer_positions(layout, expert_GSI, chosen_GSI, gates_GSe.shape[-1])
        return drop_overflow(expert_GSI, gate_GSI, place_GSI, chosen_GSI, capacity)


@spec
class ExpertChoice(Router):
    """Each expert takes the tokens with the largest gates.  Zhou et al. 2022, section 3.2.

    All experts are full, and a token has none to all of them.  It sees the whole group, later
    tokens included: not for decoders.
    """

    mean_choices: Count = 2
    """Experts of a token in the mean."""

    @property
    def choices(self) -> int:
        return self.mean_choices

    @property
    def causal(self) -> bool:
        return False

    def route(
        self, layout: Layout, gates_GSe: Array, is_token_GS: Array, capacity: int, key: Array | None
    ) -> Routing:
        is_token_GS1 = is_token_GS[:, :, None]
        gates_GeS = layout.einsum("GSe->GeS", jnp.where(is_token_GS1, gates_GSe, -1.0))
        _, token_GeC = layout.top_k(gates_GeS, capacity, "GeS")
        shape = (*token_GeC.shape, gates_GSe.shape[1])
        here_GeCS = layout.iota("GeCS", shape, "S") == token_GeC[..., None]
        taken_GSe = layout.einsum("GeS->GSe", jnp.any(here_GeCS, axis=2))
        place_GeCS = jnp.where(here_GeCS, layout.iota("GeCS", shape, "C"), 0)
        place_GSe = layout.einsum("GeS->GSe", jnp.sum(place_GeCS, axis=2))
        expert_GSe = layout.iota("GSe", gates_GSe.shape, "e")
        # Each expert is one choice.
        return drop_overflow(expert_GSe, gates_GSe, place_GSe, taken_GSe & is_token_GS1, capacity)


def drop_overflow(
    expert_GSI: Array, gate_GSI: Array, place_GSI: Array, chosen_GSI: Array, capacity: int
) -> Routing:
    """Drops the choices that lie beyond the capacity."""
    kept_GSI = chosen_GSI & (place_GSI < capacity)
    return Routing(expert_GSI, jnp.where(kept_GSI, gate_GSI, 0), place_GSI, kept_GSI, chosen_GSI)


def buffer_positions(layout: Layout, expert_GSI: Array, chosen_GSI: Array, experts: int) -> Array:
    """Returns the position of each choice in its expert's buffer: first choices, then second ones.

    Within one choice tokens keep their order.
    """
    shape = (*expert_GSI.shape, experts)
    chosen_GSIe = layout.iota("GSIe", shape, "e") == expert_GSI[..., None]
    chosen_GSIe = (chosen_GSIe & chosen_GSI[..., None]).astype(jnp.int32)
    so_far_GSIe = jnp.cumsum(chosen_GSIe, axis=1)
    totals_G1Ie = so_far_GSIe[:, -1:]
    before_G1Ie = jnp.cumsum(totals_G1Ie, axis=2) - totals_G1Ie
    place_GSIe = so_far_GSIe - 1 + before_G1Ie
    return jnp.sum(jnp.where(chosen_GSIe > 0, place_GSIe, 0), axis=-1)
