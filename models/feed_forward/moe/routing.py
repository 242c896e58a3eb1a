"""Routes tokens: chooses the experts of each, their gates, and the slots of their buffers."""

import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from configs.errors import UserError
from configs.spec import Count, Fraction, NotNegative, Positive, abstract_spec, spec
from layouts.layout import Layout
from models.dropout import Key

Array = jax.Array


class Routing(NamedTuple):
    """Holds the experts of each token: its choices i, the best first."""

    expert_Gsi: Array
    gate_Gsi: Array
    """The weight of the expert's output; 0 where the token does not go there."""
    position_Gsi: Array
    """The position of the token in the expert's buffer."""
    kept_Gsi: Array
    """Whether the token goes there: chosen, and not beyond the capacity."""
    chosen_Gsi: Array
    """Whether it was chosen, whatever the capacity."""


class Load(NamedTuple):
    """Holds sums over tokens of what a router did; microbatches and devices add up."""

    aux: Array
    """The auxiliary loss of each group, times its tokens."""
    z: Array
    """Squared log of the sum of exponentials."""
    entropy: Array
    """Of the gates, in nats."""
    kept_e: Array
    """Choices of each expert that got a slot."""
    chosen_i: Array
    """First, second, ... choices."""
    kept_i: Array
    """Of these, the ones that got a slot."""
    tokens: Array


@abstract_spec
class Router:
    """Holds what all routers share.  Gates are a softmax over the experts, unless it says so."""

    has_bias: ClassVar[bool] = False
    """Whether each expert has a bias, which `updated_bias` changes after a step."""
    causal: ClassVar[bool] = True
    """Whether a token's experts depend on no later token."""
    balanced: ClassVar[bool] = False
    """Whether all experts take equally many tokens, so that the auxiliary loss is 1."""

    capacity_factor: Positive = 1.0
    """Slots of an expert, relative to an even share of the choices, in training."""
    evaluation_capacity_factor: Positive = 2.0
    """The same in evaluation, and in one round of decoding: the rest is sent in further rounds."""
    least_capacity: Count = 4
    """Smallest number of slots that an expert has for a group of tokens."""
    jitter: Fraction = 0.0
    """In training, multiplies the router's input by a random number within 1 +- jitter."""
    aux_loss: NotNegative = 0.01
    """Weight of the auxiliary loss, which is 1 if all experts are used equally."""
    z_loss: NotNegative = 0.0
    """Weight of the mean squared log of the gates' denominator (Zoph et al. 2022, equation 5)."""

    @property
    def choices(self) -> int:
        """Returns the number of experts of a token."""
        raise NotImplementedError

    @property
    def mean_experts(self) -> float:
        """Returns how many experts compute a token, in the mean, if none drops any."""
        return self.choices

    def check(self, experts: int) -> None:
        """Refuses a number of experts."""
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
        """Returns the biases after a step in which experts, the last axis, had these choices."""
        raise NotImplementedError

    def capacity(self, group_tokens: int, experts: int, *, training: bool) -> int:
        """Returns the slots that each expert has for one group of tokens."""
        return min(group_tokens, self.slots(group_tokens, experts, training=training))

    def slots(self, tokens: int, parts: int, *, training: bool) -> int:
        """Returns the slots of one of several equal parts of the experts."""
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
        dropped, and the experts of a token depend on no other segment.
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
        return drop_overflow(expert_Gsi, gate_Gsi, position_Gsi, chosen_Gsi, capacity)

    def choose(self, layout: Layout, gates_Gse: Array, bias_e: Array | None) -> tuple[Array, Array]:
        """Returns the gates and the experts of each token's choices, the best first."""
        raise NotImplementedError

    def sample(self, layout: Layout, gate_Gsi: Array, chosen_Gsi: Array, key: Key) -> Array:
        """Returns which of the choices are used."""
        return chosen_Gsi


@spec
class Top2(Router):
    """Takes the two best experts of each token.  Lepikhin et al. 2020 (GShard), algorithm 1.

    Gates are normalized over the two; the second is used with probability min(1, 2 x its gate).
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
    """Takes the k best experts of each token (1: Switch).  Fedus et al. 2021; Jiang et al. 2024."""

    k: Count = 1
    """Number of experts per token."""
    normalises: bool = False
    """Divides gates by their sum over the k, as in Mixtral."""

    @property
    def choices(self) -> int:
        return self.k

    def choose(self, layout: Layout, gates_Gse: Array, bias_e: Array | None) -> tuple[Array, Array]:
        gate_Gsi, expert_Gsi = layout.top_k(gates_Gse, self.k, "Gse")
        return normalized(gate_Gsi) if self.normalises else gate_Gsi, expert_Gsi


@spec
class SigmoidTopK(TopK):
    """Takes the k best experts of each token by sigmoid gates and balances them without a loss.

    DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2: a bias of each expert is added to its gate in the
    choice alone.  After a step it falls where an expert kept more choices than the mean, and
    rises where it kept fewer.
    """

    has_bias: ClassVar[bool] = True

    k: Count = 2
    normalises: bool = True
    scale: Positive = 1.0
    """Multiplies gates."""
    bias_rate: NotNegative = 0.001
    """Changes the bias of an expert by this much after a step."""
    expert_groups: Count = 1
    """Equal groups that consecutive experts form."""
    groups_per_token: Count = 1
    """Groups that the experts of a token are in: the best by the sum of their two largest biased
    gates."""
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
        """Makes the gates of experts in other groups than a token's best minus infinity."""
        groups = self.expert_groups
        gates_Gsgm = gates_Gse.reshape(*gates_Gse.shape[:2], groups, -1)  # m: those of a group
        score_Gsg = jnp.sum(jax.lax.top_k(gates_Gsgm, 2)[0], axis=-1)
        best_Gsi = jax.lax.top_k(score_Gsg, self.groups_per_token)[1]
        is_best_Gsg = jnp.sum(jax.nn.one_hot(best_Gsi, groups), axis=-2) > 0
        return jnp.where(is_best_Gsg[..., None], gates_Gsgm, -jnp.inf).reshape(gates_Gse.shape)


@spec
class ExpertChoice(Router):
    """Lets each expert take its tokens with the largest gates.  Zhou et al. 2022, section 3.2.

    All experts are full; a token goes to any number of them.  It depends on the whole group,
    later tokens included: not for decoders.  Decoding and scoring choose within each source.
    """

    mean_choices: Count = 2
    """Mean number of experts per token."""

    @property
    def choices(self) -> int:
        return self.mean_choices

    @property
    def mean_experts(self) -> float:
        return self.mean_choices * self.capacity_factor

    causal, balanced = False, True

    def route(
        self,
        layout: Layout,
        gates_Gse: Array,
        segments_Gs: Array,
        capacity: int | None,
        key: Key,
        bias_e: Array | None = None,
    ) -> Routing:
        experts, is_token_Gs = gates_Gse.shape[-1], segments_Gs > 0
        if capacity is None:
            share = functools.partial(self.shares, experts=experts, training=key is not None)
            limit_Gs = layout.shard_map(share, "Gs->Gs")(segments_Gs)
        else:
            segments_Gs = is_token_Gs.astype(jnp.int32)
            limit_Gs = jnp.full_like(segments_Gs, capacity)
        rank = layout.shard_map(rank_in_segment, "Gse,Gs->Gse")
        rank_Gse = rank(jax.lax.stop_gradient(gates_Gse), segments_Gs)
        taken_Gse = is_token_Gs[:, :, None] & (rank_Gse < limit_Gs[:, :, None])
        # Each expert is one choice.
        expert_Gse = layout.iota("Gse", gates_Gse.shape, "e")
        return drop_overflow(expert_Gse, gates_Gse, rank_Gse, taken_Gse, capacity)

    def shares(self, segments_Gs: Array, experts: int, *, training: bool) -> Array:
        """Returns how many tokens of its segment an expert takes, as if it were a group."""
        sizes = range(segments_Gs.shape[1] + 1)
        by_size = [self.capacity(size, experts, training=training) for size in sizes]
        same_Gsc = segments_Gs[:, :, None] == segments_Gs[:, None, :]
        return jnp.array(by_size, jnp.int32)[jnp.sum(same_Gsc, axis=2)]


def rank_in_segment(gates_Gse: Array, segments_Gs: Array) -> Array:
    """Returns how many tokens of its segment each expert prefers to a token: the first of equals.

    >>> gates_Gse = jnp.array([[[0.2], [0.5], [0.1], [0.5]]])
    >>> rank_in_segment(gates_Gse, jnp.array([[1, 1, 2, 1]]))[0, :, 0].tolist()
    [2, 0, 0, 1]
    """
    segments_Gse = jnp.broadcast_to(segments_Gs[:, :, None], gates_Gse.shape)
    order_Gse = jnp.lexsort((-gates_Gse, segments_Gse), axis=1)
    earlier_Gsc = segments_Gs[:, None, :] < segments_Gs[:, :, None]
    start_Gs1 = jnp.sum(earlier_Gsc, axis=2)[:, :, None]
    return (jnp.argsort(order_Gse, axis=1) - start_Gs1).astype(jnp.int32)


def normalized(gate_Gsi: Array) -> Array:
    """Divides the gates of a token by their sum."""
    return gate_Gsi / jnp.sum(gate_Gsi, axis=-1, keepdims=True)


def drop_overflow(
    expert_Gsi: Array, gate_Gsi: Array, position_Gsi: Array, chosen_Gsi: Array, capacity: int | None
) -> Routing:
    """Drops the choices beyond the capacity."""
    kept_Gsi = chosen_Gsi if capacity is None else chosen_Gsi & (position_Gsi < capacity)
    return Routing(expert_Gsi, jnp.where(kept_Gsi, gate_Gsi, 0), position_Gsi, kept_Gsi, chosen_Gsi)
