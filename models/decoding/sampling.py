"""Decodes greedily or by sampling: hypotheses are independent of each other."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from models.decoding.generate import DecodeInputs, DecodeOutput, is_end, ranked


def nucleus_of_sorted(layout: Layout, sorted_BWU: Array, top_p: float | Array) -> Array:
    """Does the same as `nucleus`, for logits that are sorted from the largest."""
    share_BWU = jax.nn.softmax(sorted_BWU, axis=-1)
    before_BWU = layout.cumsum(share_BWU, "BWU") - share_BWU
    rank_BWU = layout.iota("BWU", sorted_BWU.shape, "U")
    return jnp.where((before_BWU < top_p) | (rank_BWU == 0), sorted_BWU, -jnp.inf)


def nucleus(layout: Layout, logits_BWV: Array, top_p: float | Array) -> Array:
    """Masks logits outside the nucleus, the likeliest tokens with a probability of top_p in total.

    Holtzman et al. 2019, section 3.1.  Nothing is sorted; among equals the first is kept.

    A token is in the nucleus if the tokens ahead of it have a probability below top_p in total.
    Two bisections find the smallest logit in the nucleus, and the last token among its equals.
    They need only sums over the vocabulary, which may be split.
    """
    top_p = jnp.maximum(top_p, float(jnp.finfo(jnp.float32).tiny))  # the first is always kept
    share_BWV = jax.nn.softmax(logits_BWV, axis=-1)
    key_BWV = ordered_integers(logits_BWV)
    id_BWV = layout.iota("BWV", logits_BWV.shape, "V")

    def mass_above(key_BW1: Array) -> Array:
        return jnp.sum(jnp.where(key_BWV > key_BW1, share_BWV, 0), axis=-1, keepdims=True)

    limits = (jnp.min(key_BWV, axis=-1, keepdims=True), jnp.max(key_BWV, axis=-1, keepdims=True))
    cut_BW1 = first_true(lambda key_BW1: mass_above(key_BW1) < top_p, *limits)
    tied_BWV = key_BWV == cut_BW1

    def tied_up_to(last_BW1: Array) -> Array:
        return jnp.sum(jnp.where(tied_BWV & (id_BWV <= last_BW1), 1.0, 0), axis=-1, keepdims=True)

    end_BW1 = jnp.full_like(cut_BW1, logits_BWV.shape[-1] - 1)
    tied_BW1 = tied_up_to(end_BW1)
    share_BW1 = jnp.max(jnp.where(tied_BWV, share_BWV, 0), axis=-1, keepdims=True)
    room_BW1 = jnp.ceil((top_p - mass_above(cut_BW1)) / share_BW1)
    kept_BW1 = jnp.minimum(room_BW1, tied_BW1)
    start_BW1 = jnp.where(kept_BW1 < tied_BW1, 0, end_BW1)  # usually all are kept: no search
    last_BW1 = first_true(lambda id_BW1: tied_up_to(id_BW1) >= kept_BW1, start_BW1, end_BW1)
    inside_BWV = (key_BWV > cut_BW1) | (tied_BWV & (id_BWV <= last_BW1))
    return jnp.where(inside_BWV, logits_BWV, -jnp.inf)


def ordered_integers(x: Array) -> Array:
    """Maps floats to integers in the same order."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0 is not below 0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def first_true(is_true: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Returns the smallest integers from `low` on for which it is true; it must be for `high`."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        below = is_true(middle)
        return jnp.where(below, low, jnp.minimum(middle + 1, high)), jnp.where(below, middle, high)

    return jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))[1]


class Samples(NamedTuple):
    """Holds the texts so far."""

    tokens_BWT: Array
    score_BW: Array
    finished_BW: Array


LOWEST_TEMPERATURE = 1e-6
"""Below it, the likeliest token is chosen: logits divided by less may overflow."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Samples each next token.  Temperature 0 chooses the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    width: int = 1
    """Number of samples per sentence."""
    flat: bool = True
    min_p: float = 0.0
    """Minimum probability of a token, relative to the likeliest one."""

    def start(self, layout: Layout, inputs: DecodeInputs, new_tokens: int) -> Samples:
        rows = inputs.prompt_lengths_B.shape[0]
        return Samples(
            layout.zeros((rows, self.width, new_tokens), "BWT", jnp.int32),
            layout.zeros((rows, self.width), "BW", float),
            layout.zeros((rows, self.width), "BW", bool),
        )

    def advance(
        self, layout: Layout, state: Samples, logits_BWV: Array, inputs: DecodeInputs, step: Array
    ) -> tuple[Samples, Array, None]:
        # Reports the model's probabilities, which include END before the minimum length.
        log_z_BW = jax.nn.logsumexp(logits_BWV, axis=-1)
        tokens_BWV = layout.iota("BWV", logits_BWV.shape, "V")
        logits_BWV = allowed(layout, logits_BWV, tokens_BWV, inputs, step, "BWV")
        token_BW, logit_BW = self.choose(layout, logits_BWV, inputs.seeds_B, step)
        gain_BW = logit_BW - layout.reshard(log_z_BW, "BW")
        token_BW = jnp.where(state.finished_BW, 0, token_BW)
        here_BWT = layout.iota("BWT", state.tokens_BWT.shape, "T") == step
        max_new_tokens_B1 = inputs.max_new_tokens_B[:, None]
        state = Samples(
            jnp.where(here_BWT, token_BW[:, :, None], state.tokens_BWT),
            state.score_BW + jnp.where(state.finished_BW, 0, gain_BW),
            state.finished_BW | is_end(token_BW, inputs.stop_ids) | (step + 1 >= max_new_tokens_B1),
        )
        return state, token_BW, None

    def done(self, state: Samples, inputs: DecodeInputs, step: Array) -> Array:
        return jnp.all(state.finished_BW, axis=1)

    def output(self, layout: Layout, state: Samples) -> DecodeOutput:
        """Sorts the texts, the likeliest first."""
        return ranked(layout, self.cached(state), state.score_BW, self.width)

    def cached(self, state: Samples) -> DecodeOutput:
        return DecodeOutput(state.tokens_BWT, state.score_BW, state.score_BW)

    def choose(
        self, layout: Layout, logits_BWV: Array, seeds_B: Array, step: Array
    ) -> tuple[Array, Array]:
        """Chooses the next tokens; also returns their logits."""
        if self.temperature < LOWEST_TEMPERATURE:
            return likeliest(layout, logits_BWV)
        draw = Draw(seeds_B, step, self.temperature, self.top_p, self.min_p or None)
        if self.top_k is None:
            return sampled(layout, logits_BWV, draw)
        vocab = layout.unpadded_shape("BWV", logits_BWV.shape)[-1]
        return sampled_of_best(layout, logits_BWV, min(self.top_k, vocab), draw)


Chosen = tuple[Array, Array]  # token_BW, logit_BW
Setting = float | Array  # for all sentences, or with axes "B11"


class Draw(NamedTuple):
    """Holds how the next tokens are sampled."""

    seeds_B: Array
    step: Array
    """One for all sentences, or one for each."""
    temperature: Setting
    top_p: Setting | None
    min_p: Setting | None
    top_k: Array | None = None
    """Keeps fewer than all candidates."""


def likeliest(layout: Layout, logits_BWV: Array) -> Chosen:
    """Returns the likeliest tokens and their logits."""
    logit_BW1, token_BW1 = layout.top_k(logits_BWV, 1, "BWV")
    return squeezed(layout, token_BW1, logit_BW1)


def with_noise(layout: Layout, weight: Array, draw: Draw, axes: str) -> Array:
    """Adds noise to logits, so that the largest is a sample; if min_p is given, of tokens with at
    least min_p times the largest probability (Nguyen et al. 2024)."""
    if draw.min_p is not None:
        top = jnp.max(weight, axis=-1, keepdims=True)
        weight = jnp.where(weight < top + jnp.log(draw.min_p), -jnp.inf, weight)
    return weight + gumbel(layout, draw.seeds_B, draw.step, axes, weight.shape)


def sampled(layout: Layout, logits_BWV: Array, draw: Draw) -> Chosen:
    """Samples from the vocabulary, which may be split, or from its nucleus."""
    weight_BWV = logits_BWV / draw.temperature
    if draw.top_p is not None:
        weight_BWV = nucleus(layout, weight_BWV, draw.top_p)
    _, token_BW1 = layout.top_k(with_noise(layout, weight_BWV, draw, "BWV"), 1, "BWV")
    return squeezed(layout, token_BW1, layout.take_last(logits_BWV, token_BW1, "BWV"))


def sampled_of_best(layout: Layout, logits_BWV: Array, candidates: int, draw: Draw) -> Chosen:
    """Samples from the `candidates` likeliest tokens; `draw.top_k` may keep fewer.

    The vocabulary may be split; only the candidates are gathered.
    """
    top = layout.top_k(logits_BWV, candidates, "BWV")
    best_BWU, id_BWU = (layout.reshard(x, "BWU") for x in top)
    weight_BWU = best_BWU / draw.temperature
    if draw.top_k is not None:
        rank_BWU = layout.iota("BWU", weight_BWU.shape, "U")
        weight_BWU = jnp.where(rank_BWU < draw.top_k, weight_BWU, -jnp.inf)
    if draw.top_p is not None:
        weight_BWU = nucleus_of_sorted(layout, weight_BWU, draw.top_p)
    weight_BWU = with_noise(layout, weight_BWU, draw, "BWU")
    at_BW1 = jax.lax.argmax(weight_BWU, 2, jnp.int32)[:, :, None]
    return squeezed(layout, *(layout.take_last(x, at_BW1, "BWU") for x in (id_BWU, best_BWU)))


def squeezed(layout: Layout, token_BW1: Array, logit_BW1: Array) -> Chosen:
    """Drops the last axis of tokens and of their logits."""
    return layout.reshard(token_BW1[:, :, 0], "BW"), layout.reshard(logit_BW1[:, :, 0], "BW")


def allowed(
    layout: Layout, logits: Array, tokens: Array, inputs: DecodeInputs, step: Array, axes: str
) -> Array:
    """Masks the logits of banned tokens, and of END in texts that may not end at this step."""
    if inputs.banned_ids:
        logits = jnp.where(is_end(tokens, inputs.banned_ids), -jnp.inf, logits)
    if inputs.min_new_tokens_B is None:
        return logits
    is_early = layout.broadcast_like(step + 1 < inputs.min_new_tokens_B, "B", axes)
    return without_end(logits, tokens, is_early, inputs.stop_ids)


def without_end(logits: Array, tokens: Array, is_early: Array, stop_ids: tuple[int, ...]) -> Array:
    """Masks the logit of END in texts that may not end yet."""
    return jnp.where(is_end(tokens, stop_ids) & is_early, -jnp.inf, logits)


def gumbel(layout: Layout, seeds_B: Array, step: Array, axes: str, shape: tuple[int, ...]) -> Array:
    """Draws noise with a key for each sentence; the argmax of logits plus noise is a sample.

    The step is one for all sentences, or one for each.  The last axis is drawn as the first, so
    that its padding does not change other numbers.
    """

    def noise(seed: Array, step: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.gumbel(key, (shape[2], shape[1])).T

    draw = jax.vmap(noise, in_axes=(0, 0 if step.ndim else None))
    return layout.auto_axes(draw, axes)(seeds_B, step)
