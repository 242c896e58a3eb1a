"""Decodes with any model that has a cache: one loop for greedy, sampling and beam search."""

import dataclasses
import functools
import itertools
import operator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from layouts.shards import mesh_axes, spec_of
from models.api import Batch, Cache, Decodable, step_layout
from models.decoding.caches import HypothesisCaches, ModelStep, repeat

BEGIN, END = 0, 1  # ids of the vocabularies that `data` trains
# Named scopes of the loop over new tokens and of the suffix, which the planner looks for.
NEW_TOKENS, SUFFIX = "new_tokens", "suffix"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """Holds what to decode, by sentence."""

    prompts_BL: Array
    """The beginning of each text; the tokens of the padding at the end have no effect."""
    prompt_lengths_B: Array
    """Tokens of the prompt, without padding; may be 0."""
    seeds_B: Array
    """The seed of a sentence's random choices."""
    max_new_tokens_B: Array
    """New tokens, including END, after which a text is cut."""
    min_new_tokens_B: Array | None = None
    """New tokens, including END, before which no text ends."""
    begins_B: Array | None = None
    """The token before each prompt, if these differ; None: `begin_id`."""
    suffix_L: Array | None = None
    """Tokens whose likelihood after each text ranks the texts."""
    source: Batch | None = None
    """The sources to translate."""
    begin_id: int = dataclasses.field(default=BEGIN, metadata={"static": True})
    """The token that the model reads before each text."""
    stop_ids: tuple[int, ...] = dataclasses.field(default=(END,), metadata={"static": True})
    """Tokens that end a text; each is called END in this folder."""
    banned_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    """Tokens that no text may contain."""


class DecodeOutput(NamedTuple):
    """Holds texts by sentence, best first: new tokens, then END and zeros if a text ended."""

    tokens_BWT: Array
    score_BW: Array
    """The score that ranks texts; minus infinity in rows without a text."""
    log_probability_BW: Array
    """Under the model, at temperature 1 and without truncation."""


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
        """Returns which sentences need no further tokens."""

    def output(self, layout: Layout, state: Any) -> DecodeOutput: ...

    def cached(self, state: Any) -> DecodeOutput | None:
        """Returns the texts in the order of the cache; None if the cache has lost some."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    model: Decodable, search: Search, new_tokens: int, params: Any, inputs: DecodeInputs
) -> DecodeOutput:
    """Continues each prompt, or translates each source, with at most `new_tokens` tokens.

    With a suffix, samples are ranked by its mean log-probability after each (Efficient Giant
    Models guide, section 3.2): prompt, samples and suffixes share one cache if it is flat.  The
    result of a sentence depends only on itself and its seed, not on the rest of the batch.
    """
    if not splits_batch_alone(model.layout, params):
        return generate_together(model, search, new_tokens, params, inputs)
    # Devices in one loop would have to agree after each token on whether it ends.
    replicated = model.with_layout(model.layout.replicated())
    on_each_device = jax.shard_map(
        functools.partial(generate_together, replicated, search, new_tokens),
        in_specs=jax.tree.map(spec_of, (params, inputs)),
        out_specs=model.layout.place("B"),
        check_vma=False,  # whether a device's own loop ends varies by device
    )
    return on_each_device(params, inputs)


def splits_batch_alone(layout: Layout, params: Any) -> bool:
    """Returns whether the mesh splits the batch but no weight."""
    sizes = jax.sharding.get_abstract_mesh().shape
    split = {name for name, size in sizes.items() if size > 1}
    entries = itertools.chain.from_iterable(map(spec_of, jax.tree.leaves(params)))
    over_weights = set(itertools.chain.from_iterable(map(mesh_axes, entries)))
    return bool(split) and split <= {*mesh_axes(layout.place("B")[0])} - over_weights


def generate_together(
    model: Decodable, search: Search, new_tokens: int, params: Any, inputs: DecodeInputs
) -> DecodeOutput:
    """Implements `generate` with one loop for all devices."""
    layout = step_layout(model.layout)
    hypotheses, cache = start_model(model, search, new_tokens, params, inputs)
    last_B, cache, mask_BM = prefill(hypotheses, cache, inputs)
    cache, mask_BWM = hypotheses.expand(cache), repeat(layout, mask_BM, search.width, "BWM")
    last_BW = repeat(layout, last_B, search.width, "BW")
    state = search.start(layout, inputs, new_tokens)

    def unfinished(carry: tuple) -> Array:
        step, state = carry[0], carry[1]
        return (step < new_tokens) & ~jnp.all(search.done(state, inputs, step))

    def extend(carry: tuple[Array, Any, Cache, Array, Array]) -> tuple:
        step, state, cache, mask_BWM, last_BW = carry
        position_BW = repeat(layout, inputs.prompt_lengths_B + step, search.width, "BW")
        cache, mask_BWM, logits_BWV = hypotheses.step(cache, mask_BWM, last_BW, position_BW, step)
        state, last_BW, parents_BW = search.advance(layout, state, logits_BWV, inputs, step)
        if parents_BW is not None:
            cache, mask_BWM = hypotheses.reorder(cache, mask_BWM, parents_BW)
        return step + 1, state, cache, mask_BWM, last_BW

    start = (jnp.zeros((), jnp.int32), state, cache, mask_BWM, last_BW)
    with jax.named_scope(NEW_TOKENS):
        _, state, cache, mask_BWM, _ = jax.lax.while_loop(unfinished, extend, start)
    if inputs.suffix_L is None:
        return search.output(layout, state)
    texts = search.cached(state)
    assert texts is not None, "only samples are ranked by a suffix"
    with jax.named_scope(SUFFIX):
        lengths_BW, last_BW = text_ends(layout, texts.tokens_BWT, inputs, last_B)
        tokens_BWL, positions_BWL, targets_BWL = suffix_tokens(layout, inputs, lengths_BW, last_BW)
        logits_BWLV = hypotheses.feed_suffix(cache, mask_BWM, lengths_BW, tokens_BWL, positions_BWL)
        log_p_BWL = log_probabilities(layout, logits_BWLV, targets_BWL)
    return ranked(layout, texts, jnp.mean(log_p_BWL, axis=2), search.width)


def initial_cache(*arguments: Any) -> Cache:
    """Returns the cache of `generate`, given its arguments, before the first new token."""
    hypotheses, cache = start_model(*arguments)
    return hypotheses.expand(cache)


def start_model(
    model: Decodable, search: Search, new_tokens: int, params: Any, inputs: DecodeInputs
) -> tuple[HypothesisCaches, Cache]:
    """Prepares the model; returns its caches of hypotheses, and the empty cache of sentences."""
    layout, (rows, prompt) = step_layout(model.layout), inputs.prompts_BL.shape
    suffix = 0 if inputs.suffix_L is None else inputs.suffix_L.shape[0]
    prepared = model.prepare(params, for_one_call=True)
    sizes = (rows, search.width, prompt, new_tokens, suffix)
    model_step = functools.partial(model.step, prepared)
    hypotheses = HypothesisCaches(layout, search.flat, *sizes, model_step)
    return hypotheses, model.init_cache(prepared, inputs.source, rows, hypotheses.cache_length)


def prefill(
    hypotheses: HypothesisCaches, cache: Cache, inputs: DecodeInputs
) -> tuple[Array, Cache, Array]:
    """Feeds the begin token and all tokens of the prompts except the last ones.

    Returns the last tokens, the cache, and which of its slots hold a token of the sentence.
    """
    layout, rows, prompt = hypotheses.layout, hypotheses.rows, hypotheses.prompt
    begins_B = inputs.begins_B
    if begins_B is None:
        begins_B = jnp.full((rows,), inputs.begin_id, jnp.int32)
    lengths_B = inputs.prompt_lengths_B
    tokens_Bl, last_B = begun_prompts(layout, inputs.prompts_BL, lengths_B, begins_B)
    mask_Bm = layout.iota("Bm", (rows, hypotheses.cache_length), "m") < lengths_B[:, None]
    if prompt:
        start = jnp.zeros((), jnp.int32)
        fed_Bl = tokens_Bl[:, :prompt]
        cache, _ = feed_prompt(layout, hypotheses.model_step, cache, fed_Bl, mask_Bm, start)
    return last_B, cache, mask_Bm


def begun_prompts(
    layout: Layout, prompts_BL: Array, lengths_B: Array, begins_B: Array
) -> tuple[Array, Array]:
    """Returns the begin token and prompt of each row, and the last of these tokens."""
    begin_Bl = layout.reshard(begins_B[:, None], "Bl")
    tokens_Bl = jnp.concatenate([begin_Bl, layout.reshard(prompts_BL, "Bl")], axis=1)
    last_Bl = layout.iota("Bl", tokens_Bl.shape, "l") == lengths_B[:, None]
    return tokens_Bl, jnp.sum(jnp.where(last_Bl, tokens_Bl, 0), axis=1, dtype=jnp.int32)


def feed_prompt(
    layout: Layout, model_step: ModelStep, cache: Cache, fed_Bl: Array, mask_Bm: Array, start: Array
) -> tuple[Cache, Array]:
    """Feeds the tokens of prompts from position `start` on; returns the logits after each.

    The mask marks the slots of the cache that hold a token of the prompt.
    """
    slot_Bm = layout.iota("Bm", mask_Bm.shape, "m")
    position_Bl = start + layout.iota("Bl", fed_Bl.shape, "l")
    mask_Blm = (slot_Bm[:, None, :] <= position_Bl[:, :, None]) & mask_Bm[:, None, :]
    self_Blm = slot_Bm[:, None, :] == position_Bl[:, :, None]
    return model_step(cache, fed_Bl, position_Bl, mask_Blm | self_Blm, start)


def text_ends(
    layout: Layout, tokens_BWT: Array, inputs: DecodeInputs, last_B: Array
) -> tuple[Array, Array]:
    """Returns the length of each text without END, and its last token, or the prompt's if empty."""
    width, new_tokens = tokens_BWT.shape[1:]
    index_BWT = layout.iota("BWT", tokens_BWT.shape, "T")
    is_cut_BWT = index_BWT >= inputs.max_new_tokens_B[:, None, None]
    ends_BWT = is_end(tokens_BWT, inputs.stop_ids) | is_cut_BWT
    lengths_BW = jnp.min(jnp.where(ends_BWT, index_BWT, new_tokens), axis=2)
    here_BWT = index_BWT == lengths_BW[:, :, None] - 1
    last_BW = jnp.sum(jnp.where(here_BWT, tokens_BWT, 0), axis=2, dtype=jnp.int32)
    return lengths_BW, jnp.where(lengths_BW == 0, repeat(layout, last_B, width, "BW"), last_BW)


def suffix_tokens(
    layout: Layout, inputs: DecodeInputs, lengths_BW: Array, last_BW: Array
) -> tuple[Array, Array, Array]:
    """Returns the tokens to feed after each text, their positions, and the suffix to predict."""
    assert inputs.suffix_L is not None
    shape = (*lengths_BW.shape, inputs.suffix_L.shape[0])
    targets_BWL = layout.broadcast_in_dim(inputs.suffix_L, shape, (2,), "BWL")
    tokens_BWL = jnp.concatenate([last_BW[:, :, None], targets_BWL[:, :, :-1]], axis=2)
    first_BW = inputs.prompt_lengths_B[:, None] + lengths_BW
    return tokens_BWL, first_BW[:, :, None] + layout.iota("BWL", shape, "L"), targets_BWL


def log_probabilities(layout: Layout, logits_BWLV: Array, targets_BWL: Array) -> Array:
    """Returns the log-probability of each target."""
    log_z_BWL = layout.reshard(jax.nn.logsumexp(logits_BWLV, axis=-1), "BWL")
    logit_BWL1 = layout.take_last(logits_BWLV, targets_BWL[:, :, :, None], "BWLV")
    return layout.reshard(logit_BWL1[:, :, :, 0], "BWL") - log_z_BWL


def is_end(tokens: Array, stop_ids: tuple[int, ...]) -> Array:
    """Returns which tokens end a text."""
    return functools.reduce(operator.or_, (tokens == stop_id for stop_id in stop_ids))


def ranked(
    layout: Layout, texts: DecodeOutput, score: Array, count: int, axes: str = "BW"
) -> DecodeOutput:
    """Sorts texts by a score with these axes, highest first, and keeps `count` of them."""
    score_BW, order_BW = layout.top_k(score, count, axes)
    return DecodeOutput(
        layout.take_along_axis(texts.tokens_BWT, order_BW, f"{axes}T"),
        score_BW,
        layout.take_along_axis(texts.log_probability_BW, order_BW, axes),
    )
