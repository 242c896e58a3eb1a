"""Greedy decoding and sampling over any model with a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from layouts.layout import Layout
from models.api import Cache, Model, Params

Array = jax.Array
BEGIN, END = 0, 1  # ids that every vocabulary of `data.vocab` has


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.  Temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def sample(
    model: Model,
    sampling: Sampling,
    new_tokens: int,
    params: Params,
    prompts_BL: Array,
    lengths_B: Array,
    seeds_B: Array,
) -> tuple[Array, Array]:
    """Continues each prompt until it ends or has this many new tokens.

    A row's numbers follow from its own prompt and seed, whatever else is in the batch.

    Args:
        prompts_BL: prompt tokens, filled up at the end with anything.
        lengths_B: how many of them count, at least 0.
        seeds_B: a number for each row, the seed of its random choices.

    Returns:
        The new tokens, END and then zeros where a row ended, and their log-probability by row
        under the model (at temperature 1, without cutting).
    """
    layout = model.layout
    rows, length = prompts_BL.shape
    places = length + 1 + new_tokens
    begin_B1 = jnp.zeros_like(prompts_BL[:, :1])
    inputs_Bl = layout.to(jnp.concatenate([begin_B1, layout.to(prompts_BL, "Bl")], axis=1), "Bl")
    positions_Bl = layout.iota("Bl", inputs_Bl.shape, "l")
    cache = model.start(params, rows, places)
    cache, logits_BLV = model.step(params, cache, inputs_Bl, positions_Bl)
    last_BL = (positions_Bl == lengths_B[:, None]).astype(jnp.float32)
    logits_BV = layout.einsum("Bl,BlV->BV", last_BL, layout.to(logits_BLV, "BlV"))

    def unfinished(carry: tuple) -> Array:
        step, ended_B = carry[0], carry[1]
        return (step < new_tokens) & ~jnp.all(ended_B)

    def extend(carry: tuple[Array, Array, Cache, Array, Array, Array]) -> tuple:
        step, ended_B, cache, logits_BV, tokens_Bl, score_B = carry
        token_B, gain_B = choose(layout, sampling, logits_BV, seeds_B, step)
        token_B = jnp.where(ended_B, 0, token_B)
        score_B = score_B + jnp.where(ended_B, 0, gain_B)
        here_BL = layout.iota("Bl", tokens_Bl.shape, "l") == step
        tokens_Bl = jnp.where(here_BL, token_B[:, None], tokens_Bl)
        ended_B = ended_B | (token_B == END)
        position_BL = (lengths_B + 1 + step)[:, None]
        cache, logits_BLV = model.step(params, cache, token_B[:, None], position_BL)
        logits_BV = layout.to(logits_BLV[:, 0], "BV")
        return step + 1, ended_B, cache, logits_BV, tokens_Bl, score_B

    ended_B = layout.to(jnp.zeros((rows,), bool), "B")
    tokens_Bl = layout.to(jnp.zeros((rows, new_tokens), jnp.int32), "Bl")
    score_B = layout.to(jnp.zeros((rows,)), "B")
    start = (jnp.zeros((), jnp.int32), ended_B, cache, logits_BV, tokens_Bl, score_B)
    _, _, _, _, tokens_Bl, score_B = jax.lax.while_loop(unfinished, extend, start)
    return tokens_Bl, score_B


def choose(
    layout: Layout, sampling: Sampling, logits_BV: Array, seeds_B: Array, step: Array
) -> tuple[Array, Array]:
    """The next token of each row and its log-probability under the model."""
    logits_Bv = layout.to(logits_BV, "Bv")
    scores_Bv = jax.nn.log_softmax(logits_Bv, axis=-1)
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_Bv, axis=-1)
    else:
        cut_Bv = cut(layout, sampling, scores_Bv / sampling.temperature)
        token_B = jnp.argmax(cut_Bv + gumbel(layout, seeds_B, step, cut_Bv.shape[-1]), axis=-1)
    token_B = token_B.astype(jnp.int32)
    hit_Bv = layout.iota("Bv", scores_Bv.shape, "v") == token_B[:, None]
    return token_B, jnp.sum(jnp.where(hit_Bv, scores_Bv, 0), axis=-1)


def gumbel(layout: Layout, seeds_B: Array, step: Array, vocab: int) -> Array:
    """Noise whose argmax, added to logits, is a sample.  Each row has a key of its own."""

    def noise(seed: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), (vocab,))

    return layout.to(jax.vmap(noise)(layout.to(seeds_B, "b")), "Bv")


def cut(layout: Layout, sampling: Sampling, logits_Bv: Array) -> Array:
    """Minus infinity for tokens outside the k likeliest or outside the likeliest p of the mass."""
    if sampling.top_k is None and sampling.top_p is None:
        return logits_Bv
    sorted_Bv = -jnp.sort(-logits_Bv, axis=-1)
    worst_B1 = sorted_Bv[:, -1:]
    if sampling.top_k is not None:
        k = min(sampling.top_k, logits_Bv.shape[-1])
        worst_B1 = sorted_Bv[:, k - 1 : k]
    if sampling.top_p is not None:
        kept_Bv = jnp.where(sorted_Bv >= worst_B1, sorted_Bv, -jnp.inf)
        share_Bv = jax.nn.softmax(kept_Bv, axis=-1)
        before_Bv = cumulative(layout, share_Bv) - share_Bv
        inside_Bv = jnp.where(before_Bv < sampling.top_p, sorted_Bv, jnp.inf)
        worst_B1 = jnp.maximum(worst_B1, jnp.min(inside_Bv, axis=-1, keepdims=True))
    return jnp.where(logits_Bv >= worst_B1, logits_Bv, -jnp.inf)


def cumulative(layout: Layout, x_Bv: Array) -> Array:
    """Running sums along the vocabulary, which must be whole."""
    summed = jax.sharding.auto_axes(
        lambda x: jnp.cumsum(x, axis=-1), out_sharding=layout.place("Bv")
    )
    return summed(x_Bv)
