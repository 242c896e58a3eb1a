"""Continues texts that join and leave a running batch between calls: fixed slots, fixed shapes.

The cache is a ring buffer: at each step all texts write their token to the same index, wherever
they began, and see back to their first token.  Therefore one executable serves all steps.  If there
are more or longer texts than the slots hold, all texts move to slots of another size.  Batching at
each token: Yu et al. 2022 (Orca), section 3.1.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.axes import letters_of
from layouts.convolution import pad
from layouts.layout import Layout
from layouts.low_rank import with_adapter_of_rows
from layouts.shards import spec_of
from models.api import Cache, Decodable, step_layout
from models.decoding import sampling
from models.decoding.generate import begun_prompts, feed_prompt, is_end, log_probabilities
from models.decoding.sampling import Chosen, Draw, likeliest, sampled, sampled_of_best, without_end

FEW_CANDIDATES = 64
"""Tokens that are ranked if no text samples from more of them."""
SCORED_POSITIONS = 256
"""Positions of a prompt whose logits are in memory at the same time."""


class SlotSettings(NamedTuple):
    """Holds the settings by which each text is continued."""

    seeds_B: Array
    max_new_tokens_B: Array
    min_new_tokens_B: Array
    temperature_B: Array
    """0 chooses the likeliest token."""
    top_k_B: Array
    """0 means no limit."""
    top_p_B: Array
    """1 means no limit."""
    min_p_B: Array
    """0 means no limit."""
    adapter_B: Array
    """The adapter of the model that each text uses; 0 means none."""


class Penalties(NamedTuple):
    """Holds what changes the logits of each text's next token."""

    bias_BV: Array
    repetition_B: Array
    """Divides positive logits of tokens in the text and its prompt, and multiplies negative ones
    (Keskar et al. 2019)."""
    presence_B: Array
    """Subtracted once from the logits of tokens in the text; frequency_B, for each occurrence."""
    frequency_B: Array
    is_in_prompt_BV: Array
    counts_BV: Array
    """How often each token is in the new text."""

    def apply(self, logits_BWV: Array) -> Array:
        """Applies the penalties to logits, as vLLM does."""
        penalties = self.repetition_B, self.presence_B, self.frequency_B
        repetition_B11, presence_B11, frequency_B11 = (x[:, None, None] for x in penalties)
        counts_BWV = self.counts_BV[:, None].astype(self.frequency_B.dtype)
        logits_BWV = logits_BWV + self.bias_BV[:, None]
        factor_BWV = jnp.where(logits_BWV > 0, 1 / repetition_B11, repetition_B11)
        is_repeated_BWV = self.is_in_prompt_BV[:, None] | (counts_BWV > 0)
        logits_BWV = jnp.where(is_repeated_BWV, logits_BWV * factor_BWV, logits_BWV)
        return logits_BWV - jnp.where(counts_BWV > 0, presence_B11 + frequency_B11 * counts_BWV, 0)

    def counted(self, layout: Layout, token_B: Array) -> "Penalties":
        """Counts one more token of each text."""
        is_new_BV = layout.iota("BV", self.counts_BV.shape, "V") == token_B[:, None]
        return self._replace(counts_BV=self.counts_BV + is_new_BV.astype(jnp.int32))


class Joining(NamedTuple):
    """Holds texts that join the batch."""

    slots_B: Array
    """The slot of each text; an out-of-range slot drops its text."""
    prompts_BL: Array
    prompt_lengths_B: Array
    begins_B: Array
    settings: SlotSettings


class Slots(NamedTuple):
    """Holds the texts of the running batch."""

    cache: Cache
    cache_index: Array
    """Where the ring buffer stores the next token."""
    lengths_B: Array
    """Tokens of each text in the cache."""
    last_B: Array
    """The token of each text that the model reads next."""
    steps_B: Array
    """New tokens of each text."""
    running_B: Array
    settings: SlotSettings
    penalties: Penalties | None
    """None as long as no text has penalties."""


class Candidates(NamedTuple):
    """Holds the likeliest tokens at each position, with log-probabilities at temperature 1."""

    tokens_BTU: Array
    log_p_BTU: Array


class NewTokens(NamedTuple):
    """Holds new tokens of each slot, and their log-probabilities at temperature 1.

    Entries after the end of a text, or after the last step, are undefined.
    """

    tokens_BT: Array
    log_p_BT: Array
    candidates: Candidates | None


class PromptScores(NamedTuple):
    """Holds the log-probabilities of the tokens of prompts, by chunks of their positions.

    Entries after the end of a prompt are undefined.
    """

    log_p_NBT: Array
    candidates: Candidates | None


@dataclasses.dataclass(frozen=True)
class SlotDecoder:
    """Continues the texts in `slots` slots, each of at most `cache_length` tokens."""

    model: Decodable
    slots: int
    cache_length: int
    stop_ids: tuple[int, ...]
    max_steps: int = 1
    """The maximum number of steps of one call."""
    candidates: int | None = None
    """How many of the likeliest tokens to return at each position; None scores no prompts."""

    def start(self, prepared: Any) -> Slots:
        """Returns empty slots."""
        layout = step_layout(self.model.layout)

        def zeros(dtype: Any = jnp.int32) -> Array:
            return layout.reshard(jnp.zeros(self.slots, dtype), "B")

        return Slots(
            cache=self.model.init_cache(prepared, None, self.slots, self.cache_length),
            cache_index=jnp.zeros((), jnp.int32),
            lengths_B=zeros(),
            last_B=zeros(),
            steps_B=zeros(),
            running_B=zeros(bool),
            settings=SlotSettings(
                seeds_B=zeros(jnp.uint32),
                max_new_tokens_B=zeros(),
                min_new_tokens_B=zeros(),
                temperature_B=zeros(float),
                top_k_B=zeros(),
                top_p_B=zeros(float),
                min_p_B=zeros(float),
                adapter_B=zeros(),
            ),
            penalties=None,
        )

    def with_penalties(self, prepared: Any, slots: Slots) -> Slots:
        """Returns the slots with penalties for texts; those of current texts have no effect."""
        layout = step_layout(self.model.layout)
        vocab = jax.eval_shape(self.logits, prepared, slots)[1].shape[-1]
        bias_BV = layout.reshard(jnp.zeros((self.slots, vocab)), "BV")
        zeros_B, ones_B = (jnp.full_like(slots.last_B, value, float) for value in (0, 1))
        no_tokens_BV = jnp.zeros_like(bias_BV, bool), jnp.zeros_like(bias_BV, jnp.int32)
        return slots._replace(penalties=Penalties(bias_BV, ones_B, zeros_B, zeros_B, *no_tokens_BV))

    def read(self, prepared: Any, joining: Joining) -> tuple[Cache, Array, PromptScores | None]:
        """Reads prompts: returns their cache, the last token of each, and any scores.

        A prompt is read in one pass or, if it is scored, in chunks of its positions.
        """
        rows, length = joining.prompts_BL.shape
        layout, lengths_B = step_layout(self.model.layout), joining.prompt_lengths_B
        positions = length if self.candidates is None else min(length, SCORED_POSITIONS)
        chunks = -(-length // positions)
        prepared = with_adapter_of_rows(layout, prepared, joining.settings.adapter_B)
        model_step = functools.partial(self.model.step, prepared)
        tokens_Bl, last_B = begun_prompts(layout, joining.prompts_BL, lengths_B, joining.begins_B)
        tokens_Bl = jnp.pad(tokens_Bl, ((0, 0), (0, chunks * positions - length)))
        mask_Bm = layout.iota("Bm", (rows, chunks * positions), "m") < lengths_B[:, None]

        def feed(cache: Cache, start: Array) -> tuple[Cache, PromptScores | None]:
            chunk_Bl = jax.lax.dynamic_slice_in_dim(tokens_Bl, start, positions + 1, axis=1)
            fed_Bl, targets_BWL = chunk_Bl[:, :-1], chunk_Bl[:, None, 1:]
            cache, logits_BLV = feed_prompt(layout, model_step, cache, fed_Bl, mask_Bm, start)
            if self.candidates is None:
                return cache, None
            log_p_BWL = log_probabilities(layout, logits_BLV[:, None], targets_BWL)
            return cache, PromptScores(log_p_BWL[:, 0], self.rank(layout, logits_BLV))

        cache = self.model.init_cache(prepared, None, rows, chunks * positions)
        cache, scores = jax.lax.scan(feed, cache, positions * jnp.arange(chunks, dtype=jnp.int32))
        return cache, last_B, scores

    def read_rest(
        self, prepared: Any, joining: Joining, cache: Cache, start: Array, *, count: int
    ) -> tuple[Cache, Array]:
        """Reads `count` tokens of prompts from `start` on; the cache has the tokens before.

        Returns the cache, as long as the padded prompts, and the last token of each.
        """
        layout, lengths_B = step_layout(self.model.layout), joining.prompt_lengths_B
        shape = joining.prompts_BL.shape
        cache = each_array(functools.partial(set_length, length=shape[1]), (cache,), ())
        tokens_Bl, last_B = begun_prompts(layout, joining.prompts_BL, lengths_B, joining.begins_B)
        fed_Bl = jax.lax.dynamic_slice_in_dim(tokens_Bl, start, count, axis=1)
        mask_Bm = layout.iota("Bm", shape, "m") < lengths_B[:, None]
        prepared = with_adapter_of_rows(layout, prepared, joining.settings.adapter_B)
        model_step = functools.partial(self.model.step, prepared)
        return feed_prompt(layout, model_step, cache, fed_Bl, mask_Bm, start)[0], last_B

    def rank(self, layout: Layout, logits_BLV: Array) -> Candidates | None:
        """Returns the likeliest tokens at each position, if `candidates` is not 0 or None."""
        if not self.candidates:
            return None
        logit_BLU, token_BLU = layout.top_k(logits_BLV, self.candidates, "BLV")
        log_z_BL = layout.reshard(jax.nn.logsumexp(logits_BLV, axis=-1), "BL")
        return Candidates(token_BLU, logit_BLU - log_z_BL[:, :, None])

    def join(
        self, slots: Slots, joining: Joining, cache: Cache, last_B: Array,
        penalties: Penalties | None = None,
    ) -> Slots:  # fmt: skip
        """Puts texts into slots, after their prompts have been read."""
        layout, lengths_B = step_layout(self.model.layout), joining.prompt_lengths_B
        # In a text of n tokens, the token at position p is n - p slots before the next index.
        index_BM = layout.iota("BM", (len(last_B), self.cache_length), "M")
        position_BM = (index_BM - slots.cache_index + lengths_B[:, None]) % self.cache_length
        zeros_B, ones_B = jnp.zeros_like(last_B), jnp.ones_like(last_B, bool)
        new = Slots(
            cache, slots.cache_index, lengths_B, last_B, zeros_B, ones_B, joining.settings,
            penalties,
        )  # fmt: skip
        return each_array(put_rows, (slots, new), (joining.slots_B, position_BM))

    def resize(self, slots: Slots, slots_B: Array) -> Slots:
        """Moves texts from slots of another size: slot b gets the text of slot slots_B[b].

        If that is out of range, slot b is empty.  The cache must be long enough for each text.
        """
        move = functools.partial(move_rows, length=self.cache_length)
        moved = each_array(move, (slots,), (slots_B, slots.cache_index))
        return moved._replace(cache_index=jnp.zeros_like(slots.cache_index))

    def steps(
        self, prepared: Any, slots: Slots, count: Array, allowed_BV: Array | None = None
    ) -> tuple[Slots, NewTokens]:
        """Adds `count` tokens, only allowed ones, to each text that has not ended."""
        layout = step_layout(self.model.layout)
        step_BT = layout.iota("BT", (self.slots, self.max_steps), "T")

        def add(step: Array, carry: tuple[Slots, NewTokens]) -> tuple[Slots, NewTokens]:
            slots, new_tokens = self.step(prepared, carry[0], allowed_BV)
            now_BT = step_BT == step

            def put(new: Array, old: Array) -> Array:
                return jnp.where(now_BT if old.ndim == 2 else now_BT[:, :, None], new, old)

            return slots, jax.tree.map(put, new_tokens, carry[1])

        candidates = None
        if self.candidates:
            shape = (*step_BT.shape, self.candidates)
            zeros_BTU = layout.reshard(jnp.zeros(shape, jnp.int32), "BTU")
            candidates = Candidates(zeros_BTU, jnp.zeros_like(zeros_BTU, float))
        nothing = NewTokens(jnp.zeros_like(step_BT), jnp.zeros_like(step_BT, float), candidates)
        return jax.lax.fori_loop(0, count, add, (slots, nothing))

    def logits(self, prepared: Any, slots: Slots) -> tuple[Cache, Array]:
        """Reads the last token of each text; returns the logits of the next one."""
        layout, length = step_layout(self.model.layout), self.cache_length
        back_BM = (slots.cache_index - layout.iota("BM", (self.slots, length), "M")) % length
        mask_BM = back_BM <= slots.lengths_B[:, None]  # 0 back is the token itself
        return self.model.step(
            with_adapter_of_rows(layout, prepared, slots.settings.adapter_B),
            slots.cache,
            slots.last_B[:, None],
            slots.lengths_B[:, None],
            layout.reshard(mask_BM[:, None, :], "BLM"),
            slots.cache_index,
        )

    def step(
        self, prepared: Any, slots: Slots, allowed_BV: Array | None = None
    ) -> tuple[Slots, NewTokens]:
        """Adds one token to each text; also returns these tokens."""
        layout = step_layout(self.model.layout)
        cache, logits_BWV = self.logits(prepared, slots)
        token_B, log_p_B = self.choose(layout, logits_BWV, slots, allowed_BV)
        steps_B = slots.steps_B + 1
        ended_B = is_end(token_B, self.stop_ids) | (steps_B >= slots.settings.max_new_tokens_B)
        running_B = slots.running_B & ~ended_B
        slots = slots._replace(
            cache=cache,
            cache_index=(slots.cache_index + 1) % self.cache_length,
            lengths_B=jnp.where(running_B, slots.lengths_B + 1, 0),
            last_B=jnp.where(running_B, token_B, 0),
            steps_B=steps_B,
            running_B=running_B,
            penalties=slots.penalties and slots.penalties.counted(layout, token_B),
        )
        candidates = self.rank(layout, logits_BWV)
        return slots, NewTokens(token_B[:, None], log_p_B[:, None], candidates)

    def choose(
        self, layout: Layout, logits_BWV: Array, slots: Slots, allowed_BV: Array | None = None
    ) -> tuple[Array, Array]:
        """Chooses the next token of each text as `Sampling` does; returns its log-probability.

        It computes only what some text needs.
        """
        settings, steps_B, given_BWV = slots.settings, slots.steps_B, logits_BWV
        log_z_BW = layout.reshard(jax.nn.logsumexp(logits_BWV, axis=-1), "BW")
        if slots.penalties is not None:
            logits_BWV = slots.penalties.apply(logits_BWV)
        if allowed_BV is not None:
            logits_BWV = jnp.where(allowed_BV[:, None], logits_BWV, -jnp.inf)
        tokens_BWV = layout.iota("BWV", logits_BWV.shape, "V")
        early_B11 = layout.broadcast_like(steps_B + 1 < settings.min_new_tokens_B, "B", "BWV")
        logits_BWV = without_end(logits_BWV, tokens_BWV, early_B11, self.stop_ids)
        samples_B = slots.running_B & (settings.temperature_B >= sampling.LOWEST_TEMPERATURE)
        of_all_B = samples_B & (settings.top_k_B == 0)
        of_best_B = samples_B & (settings.top_k_B > 0)
        is_limited_B = (settings.top_p_B < 1) | (settings.min_p_B > 0)
        # Texts that are not sampled need some legal temperature.
        temperature_B = jnp.where(samples_B, settings.temperature_B, 1)
        # Without a nucleus, round-off of the cumulative sum must not drop the last tokens.
        top_p_B = jnp.where(settings.top_p_B < 1, settings.top_p_B, 2)
        by_text = temperature_B, top_p_B, settings.min_p_B, settings.top_k_B
        by_text_B11 = (layout.broadcast_like(x_B, "B", "BWV") for x_B in by_text)
        draw = Draw(settings.seeds_B, steps_B, *by_text_B11)

        def replace(chosen_B: Array, new: Chosen, old: Chosen) -> Chosen:
            token_BW = jnp.where(chosen_B[:, None], new[0], old[0])
            return token_BW, jnp.where(chosen_B[:, None], new[1], old[1])

        def of_all(chosen: Chosen) -> Chosen:
            new = jax.lax.cond(
                jnp.any(of_all_B & is_limited_B),
                lambda: sampled(layout, logits_BWV, draw),
                lambda: sampled(layout, logits_BWV, draw._replace(top_p=None, min_p=None)),
            )
            return replace(of_all_B, new, chosen)

        def of_best(candidates: int, chosen: Chosen) -> Chosen:
            return replace(of_best_B, sampled_of_best(layout, logits_BWV, candidates, draw), chosen)

        def unchanged(chosen: Chosen) -> Chosen:
            return chosen

        vocab = layout.unpadded_shape("BWV", logits_BWV.shape)[-1]
        largest_k = jnp.max(jnp.where(of_best_B, settings.top_k_B, 0))
        few = min(FEW_CANDIDATES, vocab)
        chosen = likeliest(layout, logits_BWV)
        chosen = jax.lax.cond(jnp.any(of_all_B), of_all, unchanged, chosen)
        branches = (unchanged, functools.partial(of_best, few), functools.partial(of_best, vocab))
        branch = jnp.where(largest_k > few, 2, jnp.where(largest_k > 0, 1, 0))
        token_BW, logit_BW = jax.lax.switch(branch, branches, chosen)
        if slots.penalties is not None or allowed_BV is not None:
            logit_BW1 = layout.take_last(given_BWV, token_BW[:, :, None], "BWV")
            logit_BW = layout.reshard(logit_BW1[:, :, 0], "BW")
        return token_BW[:, 0], (logit_BW - log_z_BW)[:, 0]


def each_array(change: Callable[..., Array], trees: Sequence[Any], others: Sequence[Array]) -> Any:
    """Applies `change` to all arrays with axis letters in their names, and keeps their sharding.

    `others` are passed to each change.
    """

    def changed(path: tuple[Any, ...], *arrays: Array) -> Array:
        if not (axes := letters_of(jax.tree_util.keystr(path[-1:], simple=True))):
            return arrays[0]
        change_of_axes, spec = functools.partial(change, axes), spec_of(arrays[0])
        if any(spec):
            change_of_axes = jax.sharding.auto_axes(change_of_axes, out_sharding=spec)
        return change_of_axes(*arrays, *others)

    return jax.tree.map_with_path(changed, *trees)


def put_rows(axes: str, old: Array, new: Array, slots_B: Array, position_BM: Array) -> Array:
    """Puts rows into slots.  Along M, index m gets a row's entry at position_BM[row, m].

    Entries whose position is beyond the row are undefined.  Stacked layers have a leading axis.
    """
    batch = old.ndim - len(axes)
    if "M" in axes:
        memory = batch + axes.index("M")
        shape = [1] * old.ndim
        shape[batch], shape[memory] = position_BM.shape
        new = jnp.take_along_axis(new, position_BM.reshape(shape), axis=memory, mode="clip")
    return old.at[(*(slice(None),) * batch, slots_B)].set(new, mode="drop")


def move_rows(axes: str, old: Array, slots_B: Array, cache_index: Array, *, length: int) -> Array:
    """Returns the rows of these slots, and zeros for a slot out of range.

    The result has `length` entries along M: the newest token is the last, and entries before the
    first token are undefined.
    """
    batch = old.ndim - len(axes)
    new = jnp.take(old, slots_B, axis=batch, mode="fill", fill_value=0)
    if "M" not in axes:
        return new
    memory = batch + axes.index("M")
    new = jnp.roll(new, -cache_index, axis=memory)
    return pad(new, memory, (length - old.shape[memory], 0, 0), 0)  # a negative width cuts


def set_length(axes: str, old: Array, *, length: int) -> Array:
    """Cuts an array along M, or pads it with zeros."""
    if "M" not in axes:
        return old
    memory = old.ndim - len(axes) + axes.index("M")
    return pad(old, memory, (0, length - old.shape[memory], 0), 0)
