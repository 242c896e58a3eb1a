"""Decodes by beam search."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from models.decoding.generate import DecodeInputs, DecodeOutput, is_end, ranked
from models.decoding.sampling import allowed


class Beams(NamedTuple):
    """Holds the unfinished hypotheses, and the best of the finished ones."""

    tokens_BWT: Array
    score_BW: Array  # log-probability
    ended: DecodeOutput
    count_B: Array  # how many have ended


@dataclasses.dataclass(frozen=True)
class Beam:
    """Keeps the likeliest texts; a sentence is done when `width` texts have ended.

    An END counts only among the `width` best continuations, so that a beam of 1 is greedy.  A text
    that reaches its maximum length is cut there and ends.
    """

    width: int = 4
    alpha: float = 0.6
    """Exponent of the length that log-probabilities are divided by; 0 means no division."""
    penalty: Literal["gnmt", "power"] = "gnmt"
    """The length is (5 + n) / 6 (Wu et al. 2016, equation 14), or the plain number of tokens n."""
    flat: bool = True

    def start(self, layout: Layout, inputs: DecodeInputs, new_tokens: int) -> Beams:
        rows = inputs.prompt_lengths_B.shape[0]
        tokens_BWT = layout.reshard(jnp.zeros((rows, self.width, new_tokens), jnp.int32), "BWT")
        nothing_BW = layout.reshard(jnp.full((rows, self.width), -jnp.inf), "BW")
        first_BW = layout.iota("BW", nothing_BW.shape, "W") == 0  # at first all are equal
        count_B = layout.reshard(jnp.zeros((rows,), jnp.int32), "B")
        ended = DecodeOutput(tokens_BWT, nothing_BW, nothing_BW)
        return Beams(tokens_BWT, jnp.where(first_BW, 0.0, nothing_BW), ended, count_B)

    def advance(
        self, layout: Layout, state: Beams, logits_BWV: Array, inputs: DecodeInputs, step: Array
    ) -> tuple[Beams, Array, Array]:
        # Scores use the model's probabilities, which include END before the minimum length.
        log_z_BW1 = layout.reshard(jax.nn.logsumexp(logits_BWV, axis=-1), "BW")[:, :, None]
        # Keeps the best texts one token longer: as many as the beam is wide, and for each
        # hypothesis its ENDs, which may be the best.
        rows, width, vocab = layout.unpadded_shape("BWV", logits_BWV.shape)
        ends = len(inputs.stop_ids)
        best = (1 + ends) * width
        # Takes more than the beam can need, as END and banned tokens may be masked.
        k = min(best + ends + len(inputs.banned_ids), vocab)
        best_BWU, token_BWU = layout.top_k(logits_BWV, k, "BWV")
        best_BWU, token_BWU = layout.reshard(best_BWU, "BWU"), layout.reshard(token_BWU, "BWU")
        best_BWU = allowed(layout, best_BWU, token_BWU, inputs, step, "BWU")
        score_BWU = state.score_BW[:, :, None] + best_BWU - log_z_BW1
        score_BU = layout.reshape(score_BWU, (rows, width * k), "BU")
        token_BU = layout.reshape(token_BWU, (rows, width * k), "BU")
        score_BU, at_BU = layout.top_k(score_BU, min(best, width * k), "BU")
        take = layout.take_along_axis
        token_BU, parent_BU = take(token_BU, at_BU, "BU"), at_BU // k
        tokens_BUT = take(state.tokens_BWT, parent_BU, "BUT")
        here_BUT = layout.iota("BUT", tokens_BUT.shape, "T") == step
        tokens_BUT = jnp.where(here_BUT, token_BU[:, :, None], tokens_BUT)
        ends_BU = is_end(token_BU, inputs.stop_ids) | (step + 1 >= inputs.max_new_tokens_B)[:, None]

        # An END counts if it is among the best `width`.  The best unfinished texts continue.
        rank_BU = layout.iota("BU", score_BU.shape, "U")
        done_B1 = self.done(state, inputs, step)[:, None]
        stops_BU = ends_BU & (rank_BU < self.width) & (score_BU > -jnp.inf) & ~done_B1
        final_BU = jnp.where(stops_BU, score_BU / self.divisor(step + 1), -jnp.inf)
        next_BW, at_BW = layout.top_k(jnp.where(ends_BU, -jnp.inf, score_BU), self.width, "BU")
        beams = Beams(
            take(tokens_BUT, at_BW, "BWT"),
            next_BW,
            merge_best(layout, state.ended, DecodeOutput(tokens_BUT, final_BU, score_BU)),
            state.count_B + jnp.sum(stops_BU, axis=1, dtype=jnp.int32),
        )
        return beams, take(token_BU, at_BW, "BW"), take(parent_BU, at_BW, "BW")

    def divisor(self, tokens: Array) -> Array:
        """Returns the divisor of the log-probability of a text of this length."""
        length = tokens.astype(float)
        return ((5 + length) / 6 if self.penalty == "gnmt" else length) ** self.alpha

    def done(self, state: Beams, inputs: DecodeInputs, step: Array) -> Array:
        return (state.count_B >= self.width) | (step >= inputs.max_new_tokens_B)

    def output(self, layout: Layout, state: Beams) -> DecodeOutput:
        return state.ended

    def cached(self, state: Beams) -> None:
        """Returns None: the cache has other hypotheses than those that have ended."""


def merge_best(layout: Layout, kept: DecodeOutput, more: DecodeOutput) -> DecodeOutput:
    """Merges two lists of texts; keeps the best, in order, as many as the first list has."""

    def joined(old: Array, new: Array, axes: str) -> Array:
        return jnp.concatenate([layout.reshard(old, axes), layout.reshard(new, axes)], axis=1)

    texts = DecodeOutput(*map(joined, kept, more, ("BUT", "BU", "BU")))
    return ranked(layout, texts, texts.score_BW, kept.score_BW.shape[1], "BU")
