"""Greedy decoding and sampling: every hypothesis goes its own way."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from layouts.layout import Layout
from models.decoding.generate import END, DecodeInputs, DecodeOutput

Array = jax.Array


class Samples(NamedTuple):
    """Holds the texts so far."""

    tokens_BWT: Array
    score_BW: Array
    finished_BW: Array


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draws each next token.  Temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    width: int = 1
    """Samples a sentence."""
    flat: bool = True

    def start(self, layout: Layout, inputs: DecodeInputs, new_tokens: int) -> Samples:
        rows = inputs.prompt_lengths_B.shape[0]
        tokens_BWT = jnp.zeros((rows, self.width, new_tokens), jnp.int32)
        score_BW, finished_BW = jnp.zeros((rows, self.width)), jnp.zeros((rows, self.width), bool)
        return Samples(
            layout.reshard(tokens_BWT, "BWT"),
            layout.reshard(score_BW, "BW"),
            layout.reshard(finished_BW, "BW"),
        )

    def advance(
        self, layout: Layout, state: Samples, logits_BWV: Array, inputs: DecodeInputs, step: Array
    ) -> tuple[Samples, Array, None]:
        logits_BWV = without_early_end(layout, logits_BWV, inputs, step)
        token_BW, gain_BW = self.choose(layout, logits_BWV, inputs.seeds_B, step)
        token_BW = jnp.where(state.finished_BW, 0, token_BW)
        here_BWT = layout.iota("BWT", state.tokens_BWT.shape, "T") == step
        max_new_tokens_B1 = inputs.max_new_tokens_B[:, None]
        state = Samples(
            jnp.where(here_BWT, token_BW[:, :, None], state.tokens_BWT),
            state.score_BW + jnp.where(state.finished_BW, 0, gain_BW),
            state.finished_BW | (token_BW == END) | (step + 1 >= max_new_tokens_B1),
        )
        return state, token_BW, None

    def done(self, state: Samples, inputs: DecodeInputs, step: Array) -> Array:
        return jnp.all(state.finished_BW, axis=1)

    def output(self, layout: Layout, state: Samples) -> DecodeOutput:
        """Sorts the texts, the likeliest first."""
        score_BW, order_BW = layout.top_k(state.score_BW, self.width, "BW")
        return DecodeOutput(
            layout.take_along_axis(state.tokens_BWT, order_BW, "BWT"), score_BW, score_BW
        )

    def choose(
        self, layout: Layout, logits_BWV: Array, seeds_B: Array, step: Array
    ) -> tuple[Array, Array]:
        """Chooses the next tokens; returns also their log-probabilities under the model."""
        log_z_BW = jax.nn.logsumexp(logits_BWV, axis=-1)
        best_BWU, index_BWU = self.candidates(layout, logits_BWV)
        at_BW1 = jnp.zeros_like(index_BWU[:, :, :1])
        if self.temperature > 0:
            cut_BWU = best_BWU / self.temperature
            if self.top_p is not None:
                cut_BWU = nucleus(layout, cut_BWU, self.top_p)
            noise_BWU = gumbel(layout, seeds_B, step, cut_BWU.shape)
            at_BW1 = jnp.argmax(cut_BWU + noise_BWU, axis=-1, keepdims=True)
        logit_BW, token_BW = (
            jnp.take_along_axis(x, at_BW1, axis=-1, mode="clip")[:, :, 0]
            for x in (best_BWU, index_BWU)
        )
        return token_BW, logit_BW - log_z_BW

    def candidates(self, layout: Layout, logits_BWV: Array) -> tuple[Array, Array]:
        """Returns logits and ids to choose from, the likeliest first where that matters.

        The whole vocabulary is gathered only to draw from all of it, or for top_p alone.
        """
        vocab = layout.unpadded_shape("BWV", logits_BWV.shape)[-1]
        if self.temperature == 0:
            return layout.top_k(logits_BWV, 1, "BWV")
        if self.top_k is not None:
            return layout.top_k(logits_BWV, min(self.top_k, vocab), "BWV")
        logits_BWv = layout.reshard(logits_BWV, "BWv")
        if self.top_p is not None:
            return layout.top_k(logits_BWv, vocab, "BWv")
        return logits_BWv, layout.iota("BWv", logits_BWv.shape, "v")


def without_early_end(
    layout: Layout, logits_BWV: Array, inputs: DecodeInputs, step: Array
) -> Array:
    """Masks END before the minimum number of tokens."""
    if inputs.min_new_tokens_B is None:
        return logits_BWV
    is_end_BWV = layout.iota("BWV", logits_BWV.shape, "V") == END
    early_B11 = layout.broadcast_like(step + 1 < inputs.min_new_tokens_B, "B", "BWV")
    return jnp.where(is_end_BWV & early_B11, -jnp.inf, logits_BWV)


def nucleus(layout: Layout, sorted_BWU: Array, top_p: float) -> Array:
    """Masks what lies outside the likeliest p of the mass; the first always stays."""
    share_BWU = jax.nn.softmax(sorted_BWU, axis=-1)
    before_BWU = layout.cumsum(share_BWU, "BWU") - share_BWU
    return jnp.where(before_BWU < top_p, sorted_BWU, -jnp.inf)


def gumbel(layout: Layout, seeds_B: Array, step: Array, shape: tuple[int, ...]) -> Array:
    """Draws noise whose argmax, added to logits, is a sample, by a key for each sentence."""

    def noise(seed: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), shape[1:])

    return layout.reshard(jax.vmap(noise)(layout.reshard(seeds_B, "b")), "BWU")
