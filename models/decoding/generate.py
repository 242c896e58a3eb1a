"""Decoding over any model with a cache: one loop for greedy, sampling and beam search."""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from layouts.axes import letters_of
from layouts.layout import Layout
from models.api import Batch, Cache, Decodes, Step, step_layout

Array = jax.Array
BEGIN, END = 0, 1  # ids that every vocabulary of `data.vocab` has
NEW_TOKENS = "new_tokens"  # the scope of the loop over them, for who reads the program


class Asked(NamedTuple):
    """What is to be decoded, by sentence."""

    prompts_BL: Array
    """What each text begins with, filled up at the end with anything."""
    lengths_B: Array
    """How many tokens of the prompt count, at least 0."""
    seeds_B: Array
    """The seed of a sentence's random choices."""
    most_B: Array
    """New tokens after which a text is cut, END counted."""
    least_B: Array | None = None
    """New tokens before which no text ends, END counted."""


class Found(NamedTuple):
    """Texts by sentence, the best first: new tokens, with END and then zeros where a text ended."""

    tokens_BWT: Array
    score_BW: Array
    """What they are ranked by; minus infinity where there is no text."""
    log_probability_BW: Array
    """Under the model, at temperature 1 and without cutting."""


class Search(Protocol):
    """A way to choose tokens for some hypotheses of each sentence.  Frozen: part of the jit key."""

    @property
    def width(self) -> int:
        """Hypotheses a sentence."""

    @property
    def flat(self) -> bool:
        """Whether all hypotheses of a sentence share one cache."""

    def start(self, layout: Layout, asked: Asked, new_tokens: int) -> Any:
        """The state before the first token."""

    def advance(
        self, layout: Layout, state: Any, logits_BWV: Array, asked: Asked, step: Array
    ) -> tuple[Any, Array, Array | None]:
        """The state after one more token, the tokens, and whom each hypothesis continues."""

    def done(self, state: Any, asked: Asked, step: Array) -> Array:
        """Which sentences need no further token."""

    def found(self, layout: Layout, state: Any) -> Found: ...


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    model: Decodes,
    search: Search,
    new_tokens: int,
    params: Any,
    source: Batch | None,
    asked: Asked,
) -> Found:
    """Continues each prompt, or translates each source, with at most so many new tokens.

    What a sentence gets follows from itself and its seed, whatever else is in the batch.
    """
    layout = step_layout(model.layout)
    rows, prompt = asked.prompts_BL.shape
    buffer = buffer_of(layout, search, rows, prompt, new_tokens)
    feed, cache = model.start(params, source, rows, buffer.places)
    last_B, cache, seen_BM = read_prompt(layout, feed, cache, asked, buffer.places)
    cache, seen_BWM = buffer.expand(cache), spread(layout, seen_BM, search.width, "BWM")
    last_BW = spread(layout, last_B, search.width, "BW")
    state = search.start(layout, asked, new_tokens)

    def goes_on(carry: tuple) -> Array:
        step, state = carry[0], carry[1]
        return (step < new_tokens) & ~jnp.all(search.done(state, asked, step))

    def extend(carry: tuple[Array, Any, Cache, Array, Array]) -> tuple:
        step, state, cache, seen_BWM, last_BW = carry
        position_BW = spread(layout, asked.lengths_B + step, search.width, "BW")
        cache, seen_BWM, logits_BWV = buffer.feed(feed, cache, seen_BWM, last_BW, position_BW, step)
        state, last_BW, parents_BW = search.advance(layout, state, logits_BWV, asked, step)
        if parents_BW is not None:
            cache, seen_BWM = buffer.follow(cache, seen_BWM, parents_BW)
        return step + 1, state, cache, seen_BWM, last_BW

    start = (jnp.zeros((), jnp.int32), state, cache, seen_BWM, last_BW)
    with jax.named_scope(NEW_TOKENS):
        _, state, *_ = jax.lax.while_loop(goes_on, extend, start)
    return search.found(layout, state)


def cache_of(
    model: Decodes, search: Search, new_tokens: int, params: Any, source: Batch | None, asked: Asked
) -> Cache:
    """The cache that `generate` keeps through its steps, as it is before the first token."""
    layout = step_layout(model.layout)
    rows, prompt = asked.prompts_BL.shape
    buffer = buffer_of(layout, search, rows, prompt, new_tokens)
    return buffer.expand(model.start(params, source, rows, buffer.places)[1])


def read_prompt(
    layout: Layout, feed: Step, cache: Cache, asked: Asked, places: int
) -> tuple[Array, Cache, Array]:
    """Feeds BEGIN and all prompts but for their last token, which is returned.

    Also returned are the cache and which of its places hold a token of the sentence.
    """
    rows, prompt = asked.prompts_BL.shape
    begin_Bl = layout.reshard(jnp.full((rows, 1), BEGIN, jnp.int32), "Bl")
    tokens_Bl = jnp.concatenate([begin_Bl, layout.reshard(asked.prompts_BL, "Bl")], axis=1)
    last_Bl = layout.iota("Bl", tokens_Bl.shape, "l") == asked.lengths_B[:, None]
    last_B = jnp.sum(jnp.where(last_Bl, tokens_Bl, 0), axis=1)
    place_Bm = layout.iota("Bm", (rows, places), "m")
    seen_Bm = place_Bm < asked.lengths_B[:, None]
    if prompt:
        position_Bl = layout.iota("Bl", (rows, prompt), "l")
        seen_Blm = (place_Bm[:, None, :] <= position_Bl[:, :, None]) & seen_Bm[:, None, :]
        own_Blm = place_Bm[:, None, :] == position_Bl[:, :, None]
        start = jnp.zeros((), jnp.int32)
        cache, _ = feed(cache, tokens_Bl[:, :prompt], position_Bl, seen_Blm | own_Blm, start)
    return last_B, cache, seen_Bm


def spread(layout: Layout, x: Array, width: int, axes: str) -> Array:
    """The same for each hypothesis, which become the second axis."""
    shape = (x.shape[0], width, *x.shape[1:])
    return jax.lax.broadcast_in_dim(
        x, shape, (0, *range(2, len(shape))), out_sharding=layout.place(axes)
    )


class Flat:
    """One cache for all hypotheses of a sentence, a place for each at each step.

    Each sees its own ancestors; when they change, the mask is rearranged and not the cache.  GShard
    (Lepikhin et al. 2020), appendix A.1.
    """

    def __init__(self, layout: Layout, rows: int, width: int, prompt: int, new_tokens: int):
        self.layout, self.rows, self.width, self.prompt = layout, rows, width, prompt
        self.places = prompt + width * new_tokens

    def expand(self, cache: Cache) -> Cache:
        return cache

    def feed(
        self, feed: Step, cache: Cache, seen_BWM: Array, last_BW: Array, position_BW: Array,
        step: Array,
    ) -> tuple[Cache, Array, Array]:  # fmt: skip
        place = self.prompt + step * self.width
        shape = (self.rows, self.width, self.places)
        place_BWM, own_BWM = (self.layout.iota("BWM", shape, letter) for letter in "MW")
        seen_BWM = seen_BWM | (place_BWM == place + own_BWM)
        cache, logits_BWV = feed(cache, last_BW, position_BW, seen_BWM, place)
        return cache, seen_BWM, logits_BWV

    def follow(self, cache: Cache, seen_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        return cache, self.layout.take_along_axis(seen_BWM, parents_BW, "BWM")


class Apart:
    """A cache for each hypothesis, which moves when a hypothesis continues another."""

    def __init__(self, layout: Layout, rows: int, width: int, prompt: int, new_tokens: int):
        self.layout, self.rows, self.width, self.prompt = layout, rows, width, prompt
        self.places = prompt + new_tokens

    def expand(self, cache: Cache) -> Cache:
        return self._by_name(
            cache, lambda x, axes: self._merged(spread(self.layout, x, self.width, "BW" + axes[1:]))
        )

    def feed(
        self, feed: Step, cache: Cache, seen_BWM: Array, last_BW: Array, position_BW: Array,
        step: Array,
    ) -> tuple[Cache, Array, Array]:  # fmt: skip
        place = self.prompt + step
        shape = (self.rows, self.width, self.places)
        seen_BWM = seen_BWM | (self.layout.iota("BWM", shape, "M") == place)
        last, position, seen = (
            jnp.expand_dims(self._merged(x), 1) for x in (last_BW, position_BW, seen_BWM)
        )
        cache, logits_BLV = feed(cache, last, position, seen, place)
        return cache, seen_BWM, self._apart(logits_BLV[:, 0], "BWV")

    def follow(self, cache: Cache, seen_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        def moved(x: Array, axes: str) -> Array:
            axes = "BW" + axes[1:]
            return self._merged(self.layout.take_along_axis(self._apart(x, axes), parents_BW, axes))

        return self._by_name(cache, moved, but="source"), seen_BWM

    def _by_name(self, cache: Cache, change: Any, but: str = "-") -> Cache:
        """Changes the arrays of a cache, given their letters; stacked layers one after another."""

        def changed(path: Any, x: Array) -> Array:
            name = path[-1].key
            axes = letters_of(name)
            if name.startswith(but):
                return x
            if x.ndim > len(axes):
                return jax.lax.map(lambda own: change(own, axes), x)
            return change(x, axes)

        return jax.tree.map_with_path(changed, cache)

    def _merged(self, x: Array) -> Array:
        """Hypotheses as rows of their own."""
        places = jax.typeof(x).sharding.spec
        shape = (x.shape[0] * x.shape[1], *x.shape[2:])
        return jax.lax.reshape(x, shape, out_sharding=jax.P(places[0], *places[2:]))

    def _apart(self, x: Array, axes: str) -> Array:
        """Rows as hypotheses of their sentences."""
        shape = (self.rows, self.width, *x.shape[1:])
        return self.layout.reshape(x, shape, axes)


def buffer_of(
    layout: Layout, search: Search, rows: int, prompt: int, new_tokens: int
) -> Flat | Apart:
    """The places of the cache that a search needs."""
    return (Flat if search.flat else Apart)(layout, rows, search.width, prompt, new_tokens)
