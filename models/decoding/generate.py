"""Decodes with any model that has a cache: one loop for greedy, sampling and beam search."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from layouts.axes import letters_of
from layouts.layout import Layout
from models.api import Batch, Cache, Decodable, Step, step_layout

Array = jax.Array
BEGIN, END = 0, 1  # ids of the vocabularies that `data` trains
NEW_TOKENS = "new_tokens"  # the scope of the loop over them, for who reads the program


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "prompts_BL",
        "prompt_lengths_B",
        "seeds_B",
        "max_new_tokens_B",
        "min_new_tokens_B",
        "begins_B",
    ],
    meta_fields=["begin_id", "end_id"],
)
@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """Holds what to decode, by sentence."""

    prompts_BL: Array
    """The beginning of each text, padded at the end with anything."""
    prompt_lengths_B: Array
    """Tokens of the prompt, without padding; may be 0."""
    seeds_B: Array
    """The seed of a sentence's random choices."""
    max_new_tokens_B: Array
    """New tokens after which a text is cut, END counted."""
    min_new_tokens_B: Array | None = None
    """New tokens before which no text ends, END counted."""
    begins_B: Array | None = None
    """The token before each prompt, where they differ."""
    begin_id: int = BEGIN
    """What the model reads before each text."""
    end_id: int = END
    """What ends a text; called END in this folder."""


class DecodeOutput(NamedTuple):
    """Holds texts by sentence, the best first: new tokens, then END and zeros where one ended."""

    tokens_BWT: Array
    score_BW: Array
    """What they are ranked by; minus infinity where there is no text."""
    log_probability_BW: Array
    """Under the model, at temperature 1 and without cutting."""


class Search(Protocol):
    """Chooses tokens for some hypotheses of each sentence.  Frozen: part of the jit key."""

    @property
    def width(self) -> int:
        """Returns the number of hypotheses per sentence."""

    @property
    def flat(self) -> bool:
        """Returns whether all hypotheses of a sentence share one cache."""

    def start(self, layout: Layout, inputs: DecodeInputs, new_tokens: int) -> Any:
        """Returns the state before the first token."""

    def advance(
        self, layout: Layout, state: Any, logits_BWV: Array, inputs: DecodeInputs, step: Array
    ) -> tuple[Any, Array, Array | None]:
        """Adds one token; returns the state, the tokens and the parent of each hypothesis."""

    def done(self, state: Any, inputs: DecodeInputs, step: Array) -> Array:
        """Returns which sentences need no further token."""

    def output(self, layout: Layout, state: Any) -> DecodeOutput: ...


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    model: Decodable,
    search: Search,
    new_tokens: int,
    params: Any,
    source: Batch | None,
    inputs: DecodeInputs,
) -> DecodeOutput:
    """Continues each prompt, or translates each source, with at most so many new tokens.

    What a sentence gets follows from itself and its seed, whatever else is in the batch.
    """
    layout = step_layout(model.layout)
    hypotheses, model_step, cache = start_model(model, search, new_tokens, params, source, inputs)
    last_B, cache, mask_BM = prefill(layout, model_step, cache, inputs, hypotheses.cache_length)
    cache, mask_BWM = hypotheses.expand(cache), repeat(layout, mask_BM, search.width, "BWM")
    last_BW = repeat(layout, last_B, search.width, "BW")
    state = search.start(layout, inputs, new_tokens)

    def unfinished(carry: tuple) -> Array:
        step, state = carry[0], carry[1]
        return (step < new_tokens) & ~jnp.all(search.done(state, inputs, step))

    def extend(carry: tuple[Array, Any, Cache, Array, Array]) -> tuple:
        step, state, cache, mask_BWM, last_BW = carry
        position_BW = repeat(layout, inputs.prompt_lengths_B + step, search.width, "BW")
        cache, mask_BWM, logits_BWV = hypotheses.step(
            model_step, cache, mask_BWM, last_BW, position_BW, step
        )
        state, last_BW, parents_BW = search.advance(layout, state, logits_BWV, inputs, step)
        if parents_BW is not None:
            cache, mask_BWM = hypotheses.reorder(cache, mask_BWM, parents_BW)
        return step + 1, state, cache, mask_BWM, last_BW

    start = (jnp.zeros((), jnp.int32), state, cache, mask_BWM, last_BW)
    with jax.named_scope(NEW_TOKENS):
        _, state, *_ = jax.lax.while_loop(unfinished, extend, start)
    return search.output(layout, state)


def initial_cache(
    model: Decodable,
    search: Search,
    new_tokens: int,
    params: Any,
    source: Batch | None,
    inputs: DecodeInputs,
) -> Cache:
    """Returns the cache of `generate` before the first new token."""
    hypotheses, _, cache = start_model(model, search, new_tokens, params, source, inputs)
    return hypotheses.expand(cache)


def start_model(
    model: Decodable,
    search: Search,
    new_tokens: int,
    params: Any,
    source: Batch | None,
    inputs: DecodeInputs,
) -> tuple["SharedCache | SeparateCaches", Step, Cache]:
    """Returns the kind of cache for the hypotheses, the model's step and its empty cache."""
    rows, prompt = inputs.prompts_BL.shape
    hypotheses = hypothesis_cache(step_layout(model.layout), search, rows, prompt, new_tokens)
    return hypotheses, *model.start(params, source, rows, hypotheses.cache_length)


def prefill(
    layout: Layout, model_step: Step, cache: Cache, inputs: DecodeInputs, cache_length: int
) -> tuple[Array, Cache, Array]:
    """Feeds the beginning and all prompts but for their last token, which is returned.

    Also returned are the cache and which of its slots hold a token of the sentence.
    """
    rows, prompt = inputs.prompts_BL.shape
    begins_B = inputs.begins_B
    if begins_B is None:
        begins_B = jnp.full((rows,), inputs.begin_id, jnp.int32)
    begin_Bl = layout.reshard(begins_B[:, None], "Bl")
    tokens_Bl = jnp.concatenate([begin_Bl, layout.reshard(inputs.prompts_BL, "Bl")], axis=1)
    last_Bl = layout.iota("Bl", tokens_Bl.shape, "l") == inputs.prompt_lengths_B[:, None]
    last_B = jnp.sum(jnp.where(last_Bl, tokens_Bl, 0), axis=1)
    slot_Bm = layout.iota("Bm", (rows, cache_length), "m")
    mask_Bm = slot_Bm < inputs.prompt_lengths_B[:, None]
    if prompt:
        position_Bl = layout.iota("Bl", (rows, prompt), "l")
        mask_Blm = (slot_Bm[:, None, :] <= position_Bl[:, :, None]) & mask_Bm[:, None, :]
        self_Blm = slot_Bm[:, None, :] == position_Bl[:, :, None]
        start = jnp.zeros((), jnp.int32)
        cache, _ = model_step(cache, tokens_Bl[:, :prompt], position_Bl, mask_Blm | self_Blm, start)
    return last_B, cache, mask_Bm


def repeat(layout: Layout, x: Array, width: int, axes: str) -> Array:
    """Repeats x for each hypothesis; they become the second axis."""
    shape = (x.shape[0], width, *x.shape[1:])
    return layout.broadcast_in_dim(x, shape, (0, *range(2, len(shape))), axes)


class SharedCache:
    """Keeps one cache for all hypotheses of a sentence, with a slot for each at each step.

    Each sees its own ancestors; when they change, the mask is rearranged and not the cache.  GShard
    (Lepikhin et al. 2020), appendix A.1.
    """

    def __init__(self, layout: Layout, rows: int, width: int, prompt: int, new_tokens: int):
        self.layout, self.rows, self.width, self.prompt = layout, rows, width, prompt
        self.cache_length = prompt + width * new_tokens

    def expand(self, cache: Cache) -> Cache:
        return cache

    def step(
        self, model_step: Step, cache: Cache, mask_BWM: Array, last_BW: Array, position_BW: Array,
        step: Array,
    ) -> tuple[Cache, Array, Array]:  # fmt: skip
        cache_index = self.prompt + step * self.width
        shape = (self.rows, self.width, self.cache_length)
        slot_BWM, hypothesis_BWM = (self.layout.iota("BWM", shape, letter) for letter in "MW")
        mask_BWM = mask_BWM | (slot_BWM == cache_index + hypothesis_BWM)
        cache, logits_BWV = model_step(cache, last_BW, position_BW, mask_BWM, cache_index)
        return cache, mask_BWM, logits_BWV

    def reorder(self, cache: Cache, mask_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        return cache, self.layout.take_along_axis(mask_BWM, parents_BW, "BWM")


class SeparateCaches:
    """Keeps a cache for each hypothesis, which moves when a hypothesis continues another."""

    def __init__(self, layout: Layout, rows: int, width: int, prompt: int, new_tokens: int):
        self.layout, self.rows, self.width, self.prompt = layout, rows, width, prompt
        self.cache_length = prompt + new_tokens

    def expand(self, cache: Cache) -> Cache:
        def repeated(x: Array, axes: str) -> Array:
            axes = "BW" + axes[1:]
            return self._merge(repeat(self.layout, x, self.width, axes), axes)

        return self._by_name(cache, repeated)

    def step(
        self, model_step: Step, cache: Cache, mask_BWM: Array, last_BW: Array, position_BW: Array,
        step: Array,
    ) -> tuple[Cache, Array, Array]:  # fmt: skip
        cache_index = self.prompt + step
        shape = (self.rows, self.width, self.cache_length)
        mask_BWM = mask_BWM | (self.layout.iota("BWM", shape, "M") == cache_index)
        last, position, mask = (
            jnp.expand_dims(self._merge(x, axes), 1)
            for x, axes in ((last_BW, "BW"), (position_BW, "BW"), (mask_BWM, "BWM"))
        )
        cache, logits_BLV = model_step(cache, last, position, mask, cache_index)
        return cache, mask_BWM, self._split(logits_BLV[:, 0], "BWV")

    def reorder(self, cache: Cache, mask_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        def moved(x: Array, axes: str) -> Array:
            axes = "BW" + axes[1:]
            x = self.layout.take_along_axis(self._split(x, axes), parents_BW, axes)
            return self._merge(x, axes)

        return self._by_name(cache, moved, but="source"), mask_BWM

    def _by_name(
        self, cache: Cache, change: Callable[[Array, str], Array], but: str = "-"
    ) -> Cache:
        """Changes the arrays of a cache, given their letters; stacked layers one after another."""

        def changed(path: tuple[jax.tree_util.DictKey, ...], x: Array) -> Array:
            name = path[-1].key
            axes = letters_of(name)
            if name.startswith(but):
                return x
            if x.ndim > len(axes):
                return jax.lax.map(lambda layer: change(layer, axes), x)
            return change(x, axes)

        return jax.tree.map_with_path(changed, cache)

    def _merge(self, x: Array, axes: str) -> Array:
        """Merges hypotheses, the second of these axes, into rows."""
        shape = (x.shape[0] * x.shape[1], *x.shape[2:])
        return self.layout.reshape(x, shape, axes[0] + axes[2:])

    def _split(self, x: Array, axes: str) -> Array:
        """Splits rows into the hypotheses of their sentences."""
        shape = (self.rows, self.width, *x.shape[1:])
        return self.layout.reshape(x, shape, axes)


def hypothesis_cache(
    layout: Layout, search: Search, rows: int, prompt: int, new_tokens: int
) -> SharedCache | SeparateCaches:
    """Returns the arrangement of caches for a search."""
    return (SharedCache if search.flat else SeparateCaches)(
        layout, rows, search.width, prompt, new_tokens
    )
