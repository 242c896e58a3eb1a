"""Routes tokens: chooses the experts of each token, their gates, and slots in their buffers."""

import abc
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from configs.errors import UserError
from configs.spec import Count, Fraction, NotNegative, Positive, abstract_spec, spec
from layouts.layout import Layout
from models.dropout import Key


class Routing(NamedTuple):
    """Holds the experts of each token: its choices i, the best first."""

    expert_Gsi: Array
    gate_Gsi: Array
    """The weight of the expert's output; 0 if the token is not sent there."""
    position_Gsi: Array
    """The position of the token in the expert's buffer."""
    kept_Gsi: Array
    """Whether the token is sent there: chosen, and not beyond the capacity."""
    chosen_Gsi: Array
    """Whether the expert was chosen, regardless of its capacity."""


class Load(NamedTuple):
    """Holds statistics of a router, summed over tokens; microbatches and devices add up."""

    aux: Array
    """The auxiliary loss of each group, times its tokens."""
    z: Array
    """Squared log of the sum of exponentials."""
    entropy: Array
    """Entropy of the gates, in nats."""
    kept_e: Array
    """Choices of each expert that got a slot."""
    chosen_i: Array
    """Number of first, second, ... choices."""
    kept_i: Array
    """Number of these that got a slot."""
    tokens: Array


@abstract_spec
class Router(abc.ABC):
    """Holds what all routers share.  Gates are a softmax over the experts, unless it says so."""

    has_bias: ClassVar[bool] = False
    """Whether each expert has a bias, which `updated_bias` changes after a step."""

    capacity_factor: Positive = 1.0
    """Capacity of an expert in training, relative to an even share of the choices."""
    evaluation_capacity_factor: Positive = 2.0
    """The same in evaluation, and per round of decoding; later rounds process the other tokens."""
    least_capacity: Count = 4
    """Minimum capacity of an expert for a group of tokens."""
    jitter: Fraction = 0.0
    """In training, multiplies the router's input by random numbers within 1 +- jitter."""
    aux_loss: NotNegative = 0.01
    """Weight of the auxiliary load-balancing loss, which is 1 if all experts are used equally."""
    z_loss: NotNegative = 0.0
    """Weight of the mean squared log of the gates' denominator (Zoph et al. 2022, equation 5)."""

    @property
    def choices(self) -> int:
        """Returns the number of experts of a token."""
        raise NotImplementedError(f"{type(self).__name__} has no choices")

    def check(self, experts: int) -> None:
        """Raises UserError if the router cannot work with this number of experts."""
        if experts < self.choices:
            raise UserError(
                f"Moe.experts = {experts}: the router chooses {self.choices} per token.  Legal: at "
                "least as many experts, or a router of fewer choices."
            )

    def gates(self, logits_Gse: Array) -> Array:
        """Returns the weight of each expert's output."""
        return jax.nn.softmax(logits_Gse, axis=-1)

    def probabilities(self, gates_Gse: Array) -> Array:
        """Returns gates that add up to 1, for the auxiliary loss and the entropy."""
        return gates_Gse

    def updated_bias(self, bias: Array, choices: Array) -> Array:
        """Returns the biases after a step with these choices per expert, along the last axis."""
        raise NotImplementedError(f"{type(self).__name__} has no updated_bias")

    def capacity(self, group_tokens: int, experts: int, *, training: bool) -> int:
        """Returns the number of slots that each expert has for one group of tokens."""
        return min(group_tokens, self.slots(group_tokens, experts, training=training))

    def slots(self, tokens: int, parts: int, *, training: bool) -> int:
        """Returns the number of slots in each of several equal parts of the experts."""
        factor = self.capacity_factor if training else self.evaluation_capacity_factor
        return max(self.least_capacity, math.ceil(factor * self.choices * tokens / parts))

    def route(
        self,
        layout: Layout,
        gates_Gse: Array,
        segments_Gs: Array,
        capacity: int | None,
        key: Key,
        bias_e: Array | None = None,
    ) -> Routing:
        """Routes all tokens except padding.  With a key, a router may be random.

        `bias_e` is the bias of each expert, if the router has one.  Without a capacity, nothing is
        dropped.
        """
        gate_Gsi, expert_Gsi = self.choose(layout, gates_Gse, bias_e)
        chosen_Gsi = jnp.broadcast_to(segments_Gs[:, :, None] > 0, gate_Gsi.shape)
        # The position of each choice in its expert's buffer: first choices, then second ones, and
        # within one choice in the order of the tokens.
        shape = (*expert_Gsi.shape, gates_Gse.shape[-1])
        chosen_Gsie = layout.iota("Gsie", shape, "e") == expert_Gsi[..., None]
        chosen_Gsie = (chosen_Gsie & chosen_Gsi[..., None]).astype(jnp.int32)
        so_far_Gsie = jnp.cumsum(chosen_Gsie, axis=1)
        totals_G1ie = so_far_Gsie[:, -1:]
        before_G1ie = jnp.cumsum(totals_G1ie, axis=2) - totals_G1ie
        position_Gsie = jnp.where(chosen_Gsie > 0, so_far_Gsie - 1 + before_G1ie, 0)
        position_Gsi = jnp.sum(position_Gsie, axis=-1, dtype=jnp.int32)
        chosen_Gsi = self.sample(layout, gate_Gsi, chosen_Gsi, key)
        kept_Gsi = chosen_Gsi if capacity is None else chosen_Gsi & (position_Gsi < capacity)
        gate_Gsi = jnp.where(kept_Gsi, gate_Gsi, 0)
        return Routing(expert_Gsi, gate_Gsi, position_Gsi, kept_Gsi, chosen_Gsi)

    @abc.abstractmethod
    def choose(self, layout: Layout, gates_Gse: Array, bias_e: Array | None) -> tuple[Array, Array]:
        """Returns the gates and the experts of each token's choices, the best first."""

    def sample(self, layout: Layout, gate_Gsi: Array, chosen_Gsi: Array, key: Key) -> Array:
        """Returns which of the choices are used."""
        return chosen_Gsi


@spec
class Top2(Router):
    """Chooses the two best experts for each token.  Lepikhin et al. 2020 (GShard), algorithm 1.

    The two gates are normalized.  The second expert is used with probability min(1, 2 x its gate).
    """

    random_second: bool = True
    """Samples whether a token goes to its second expert; otherwise it always does."""

    choices = 2

    def choose(self, layout: Layout, gates_Gse: Array, bias_e: Array | None) -> tuple[Array, Array]:
        gate_Gsi, expert_Gsi = layout.top_k(gates_Gse, 2, "Gse")
        return normalized(gate_Gsi), expert_Gsi

    def sample(self, layout: Layout, gate_Gsi: Array, chosen_Gsi: Array, key: Key) -> Array:
        if key is None or not self.random_second:
            return chosen_Gsi
        drawn_Gs = layout.random(jax.random.uniform, key, "Gs", gate_Gsi.shape[:2])
        sent_Gs = 2 * gate_Gsi[:, :, 1] > drawn_Gs
        # A choice that is not sent keeps its place (algorithm 1, line 22).
        first_Gsi = layout.iota("Gsi", gate_Gsi.shape, "i") == 0
        return chosen_Gsi & (first_Gsi | sent_Gs[:, :, None])


@spec
class TopK(Router):
    """Sends each token to its k best experts (1: Switch).  Fedus et al. 2021; Jiang et al. 2024."""

    k: Count = 1
    """Number of experts per token."""
    normalises: bool = False
    """Divides the k gates by their sum, as in Mixtral."""

    @property
    def choices(self) -> int:
        return self.k

    def choose(self, layout: Layout, gates_Gse: Array, bias_e: Array | None) -> tuple[Array, Array]:
        gate_Gsi, expert_Gsi = layout.top_k(gates_Gse, self.k, "Gse")
        return normalized(gate_Gsi) if self.normalises else gate_Gsi, expert_Gsi


@spec
class SigmoidTopK(TopK):
    """Chooses the k best experts for each token by sigmoid gates, and balances load without a loss.

    DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2: each expert has a bias, which is added to its
    gate only for the choice.  After each step, the bias falls if the expert kept more choices than
    the mean, and rises if it kept fewer.
    """

    has_bias: ClassVar[bool] = True

    k: Count = 2
    normalises: bool = True
    scale: Positive = 1.0
    """Multiplies gates."""
    bias_rate: NotNegative = 0.001
    """Change of an expert's bias after each step."""
    expert_groups: Count = 1
    """Number of equal groups of consecutive experts."""
    groups_per_token: Count = 1
    """Number of groups that a token's experts may come from. The groups with the largest sums of
    their two largest biased gates are chosen."""
    aux_loss: NotNegative = 0.0

    def check(self, experts: int) -> None:
        Router.check(self, experts)
        groups, best = self.expert_groups, self.groups_per_token
        are_equal = not experts % groups and (groups == 1 or experts > groups)
        if not are_equal or not self.k * groups <= best * experts <= groups * experts:
            raise UserError(
                f"SigmoidTopK.expert_groups = {groups}, groups_per_token = {best}: found k = "
                f"{self.k} and Moe.experts = {experts}.  Legal: equal groups of at least 2 "
                "experts, of which a token has at least k."
            )

    def gates(self, logits_Gse: Array) -> Array:
        return jax.nn.sigmoid(logits_Gse)

    def probabilities(self, gates_Gse: Array) -> Array:
        return gates_Gse / jnp.sum(gates_Gse, axis=-1, keepdims=True)

    def updated_bias(self, bias: Array, choices: Array) -> Array:
        mean = jnp.mean(choices, axis=-1, keepdims=True)
        return bias + self.bias_rate * jnp.sign(mean - choices)

    def choose(self, layout: Layout, gates_Gse: Array, bias_e: Array | None) -> tuple[Array, Array]:
        assert bias_e is not None
        biased_Gse = gates_Gse + layout.broadcast_like(bias_e, "e", "Gse")
        if self.groups_per_token < self.expert_groups:
            biased_Gse = layout.shard_map(self.within_best_groups, "Gse->Gse")(biased_Gse)
        _, expert_Gsi = layout.top_k(jax.lax.stop_gradient(biased_Gse), self.k, "Gse")
        shape = (*expert_Gsi.shape, gates_Gse.shape[-1])
        here_Gsie = layout.iota("Gsie", shape, "e") == expert_Gsi[..., None]
        gate_Gsi = jnp.sum(jnp.where(here_Gsie, gates_Gse[:, :, None], 0), axis=-1)
        if self.normalises:
            gate_Gsi = normalized(gate_Gsi)
        return gate_Gsi * self.scale, expert_Gsi

    def within_best_groups(self, gates_Gse: Array) -> Array:
        """Sets gates to minus infinity, except those of experts in a token's best groups."""
        groups = self.expert_groups
        gates_Gsgm = gates_Gse.reshape(*gates_Gse.shape[:2], groups, -1)  # m: experts of a group
        score_Gsg = jnp.sum(jax.lax.top_k(gates_Gsgm, 2)[0], axis=-1)
        best_Gsi = jax.lax.top_k(score_Gsg, self.groups_per_token)[1]
        is_best_Gsg = jnp.sum(jax.nn.one_hot(best_Gsi, groups), axis=-2) > 0
        return jnp.where(is_best_Gsg[..., None], gates_Gsgm, -jnp.inf).reshape(gates_Gse.shape)


def normalized(gate_Gsi: Array) -> Array:
    """Divides the gates of a token by their sum."""
    return gate_Gsi / jnp.sum(gate_Gsi, axis=-1, keepdims=True)
