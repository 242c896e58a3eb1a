"""Runs the slots of a language model on devices: few executables, compiled when first needed.

There are executables for few numbers of slots and few cache lengths, so a step costs only what
the running texts need.  Texts move when they no longer fit, or need much less for a while.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from data.vocab import Vocab
from layouts.mesh import batch_shards
from models.api import Cache, Decodable
from models.decoding.slots import (
    Joining,
    NewTokens,
    Penalties,
    PromptScores,
    SlotDecoder,
    Slots,
    SlotSettings,
)
from trainer.decoding.decoder import SHORTEST, Request, rows_of, split_begins
from trainer.memory import check_cache_memory
from trainer.serving.prefix_cache import SHORTEST_CACHED, CachedPrompt, PrefixCache
from trainer.serving.service import MAX_CANDIDATES, NO_PENALTIES, Job

logger = logging.getLogger(__name__)
JOINING_TOKENS = 512
"""Maximum number of padded tokens of the prompts that share a prefill pass."""
CALL_S, MAX_STEPS = 0.02, 4
"""Maximum seconds of the steps in one call, and their maximum number.

Each call, with the work of Python around it, adds about a millisecond.  More steps per call leave
more slots empty: ended texts keep their slots, and prompts wait, until the end of a call.
"""
SHORTEST_CACHE = 64
PATIENCE = 8
"""Calls after which texts move to fewer or shorter slots, which takes about as long as 2 steps."""
SHOWN_S = 0.3
"""Compilations that take longer than this are logged."""


class SlotSize(NamedTuple):
    """Holds the number of texts that run together, and the cache positions of each."""

    slots: int
    length: int

    def __str__(self) -> str:
        return f"{self.slots} x {self.length} positions"


class SlotEngine:
    """Holds the weights and the running batch.

    One thread uses it, within the mesh.  `advance` returns before its tokens are computed, so the
    next ones can be started before these are read.
    """

    def __init__(
        self, model: Decodable, params: Any, mesh: Mesh, vocab: Vocab, slots: int, max_length: int,
        cached_prompts: int = 0,
    ):  # fmt: skip
        self.mesh, self.vocab, self.max_length = mesh, vocab, max_length
        self.model, self.layout = model, model.layout
        self.shards = batch_shards(self.layout, mesh.shape, rows_are_groups=True)
        self.slots = self.rounded(slots)
        self.lengths = powers(2, SHORTEST_CACHE, max_length)
        counts = {*powers(8, 1, slots), *powers(8, 4, slots)}  # 1, 4, 8, 32, 64, ...
        self.slot_counts = sorted(map(self.rounded, counts))
        self.steps = 1
        self.size = SlotSize(self.slot_counts[0], self.lengths[0])
        self._step_s = dict[SlotSize, float]()  # of the fastest call
        self._penalizes = False
        self._spare_calls, self._needed = 0, self.size
        self._executables = dict[Hashable, Callable[..., Any]]()
        self._slots: Slots | None = None
        self._weights, self._unprepared = None, params
        self._prefixes = PrefixCache(0 if self.shards > 1 else cached_prompts)
        with jax.set_mesh(mesh):  # while slots grow to twice the length, both exist
            weights = jax.eval_shape(model.prepare, params)
            sizes = [SlotSize(self.slots, length) for length in self.lengths[-2:]]
            sizes.append(SlotSize(self.shards, max_length))  # of a cached prompt
            *caches, cached = (jax.eval_shape(self.decoder(x).start, weights).cache for x in sizes)
            caches += [cached] * self._prefixes.limit
            check_cache_memory(weights, caches, mesh)

    def decoder(self, size: SlotSize, candidates: int | None = None) -> SlotDecoder:
        """Returns the decoder of slots of a size."""
        return SlotDecoder(self.model, *size, self.vocab.stop_ids, MAX_STEPS, candidates)

    def candidates_of(self, jobs: Iterable[Job]) -> int:
        """Returns how many tokens to rank for jobs, which is one of few numbers to compile."""
        wanted = max((job.candidates for job in jobs), default=0)
        return min(wanted if wanted <= 1 else MAX_CANDIDATES, self.vocab.size)

    def compiled(
        self, about: str, key: Hashable, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Calls a function, which is compiled at the first call with its key."""
        if key not in self._executables:
            start_s = time.perf_counter()
            self._executables[key] = jax.jit(function, **options).lower(*args).compile()
            seconds = time.perf_counter() - start_s
            if seconds > SHOWN_S:
                logger.info("Compiled %s in %.1f s.", about, seconds)
        return self._executables[key](*args)

    def rounded(self, rows: int) -> int:
        """Returns the next number of rows that divides over the shards of the batch."""
        return -(-rows // self.shards) * self.shards

    def joining_rows(self, length: int) -> list[int]:
        """Returns the numbers of prompts of a padded length that one pass may read.

        A prompt that can be cached has its own pass.
        """
        largest = JOINING_TOKENS // length if length < SHORTEST_CACHED else 1
        counts = (count for count in (1, 4, 8, 16) if count <= largest)
        return sorted({min(self.rounded(count), self.slots) for count in counts})

    def set_weights(self, params: Any) -> None:
        """Sets the weights for all tokens from now on."""
        self._prefixes.clear()
        self._weights = None  # frees the old ones before there are new ones
        self._weights = self.compiled("weights", "prepare", self.model.prepare, params)

    def warm_up(self) -> None:
        """Compiles what one short text needs, and leaves the slots empty."""
        params, self._unprepared = self._unprepared, None
        self.set_weights(params)
        del params
        self.fit([], 1, 1)
        self._put({}, self.joining_rows(SHORTEST)[0], self.prompt_length(1))
        jax.block_until_ready(self.advance())

    def prompt_length(self, length: int) -> int:
        """Returns the length to which a prompt is padded."""
        return next(n for n in powers(2, SHORTEST, self.max_length) if n >= length)

    def fit(self, running: Collection[int], count: int, length: int) -> dict[int, int]:
        """Resizes the slots to hold `count` texts of `length` positions; keeps the running ones.

        Returns the new slot of each running text.
        """
        wanted = SlotSize(
            next(slots for slots in self.slot_counts if slots >= count),
            next(each for each in self.lengths if each >= length),
        )
        is_enough = wanted.slots <= self.size.slots and wanted.length <= self.size.length
        if running and is_enough:
            self._spare_calls = 0 if wanted == self.size else self._spare_calls + 1
            first = self._spare_calls <= 1
            self._needed = wanted if first else SlotSize(*map(max, wanted, self._needed))
            if self._spare_calls < PATIENCE:
                return {slot: slot for slot in running}
            wanted = self._needed
        return self._resize(sorted(running), wanted)

    def _resize(self, running: Sequence[int], size: SlotSize) -> dict[int, int]:
        """Moves the running texts to the first slots of a size."""
        decoder, before, self._spare_calls = self.decoder(size), self.size, 0
        if running and size != before:
            slots_B = np.full(size.slots, before.slots, np.int32)
            slots_B[: len(running)] = running
            sharding = NamedSharding(self.mesh, self.layout.place("B"))
            self._slots = self.compiled(
                f"a move of {before} to {size}", ("resize", before, size, self._penalizes),
                decoder.resize, self._slots, slots_B, in_shardings=(None, sharding),
            )  # fmt: skip
        elif self._slots is None or size != before:
            self._slots = None  # frees it before there is another
            about, key = f"slots of {size}", ("start", size)
            self._slots = self.compiled(about, key, decoder.start, self._weights)
            if self._penalizes:
                self._add_penalties(size)
        else:
            return {slot: slot for slot in running}
        self.size = size
        self.steps = self._steps_of(size)
        return {slot: index for index, slot in enumerate(running)}

    def _add_penalties(self, size: SlotSize) -> None:
        self._penalizes = True
        self._slots = self.compiled(
            f"penalties of {size}", ("penalties", size),
            self.decoder(size).with_penalties, self._weights, self._slots, donate_argnums=1,
        )  # fmt: skip

    def join(self, jobs: Mapping[int, Job]) -> list[tuple[list[Job], PromptScores]]:
        """Puts the requests of jobs into slots, by slot; jobs from `slots` on are only scored.

        Returns lists of jobs with the scores of their prompts, by row.
        """
        if not self._penalizes and any(job.penalties != NO_PENALTIES for job in jobs.values()):
            self._add_penalties(self.size)
        groups: dict[tuple[int, int | None], list[int]] = {}
        for slot, job in jobs.items():
            candidates = self.candidates_of([job]) if job.scores_prompt else None
            key = (self.prompt_length(len(job.request.prompt)), candidates)
            groups.setdefault(key, []).append(slot)
        scored = []
        for (length, candidates), slots in groups.items():
            while slots:
                rows = next_rows(len(slots), self.joining_rows(length))
                chosen = {slot: jobs[slot] for slot in slots[:rows]}
                scores = self._put(chosen, rows, length, candidates)
                if scores is not None:
                    scored.append(([*chosen.values()], scores))
                slots = slots[rows:]
        return scored

    def advance(
        self,
        steps: int = 1,
        jobs: Iterable[Job] = (),
        allowed: Mapping[int, np.ndarray] | None = None,
    ) -> NewTokens:
        """Adds `steps` tokens to each text, with the candidates that these jobs want.

        `allowed` restricts the tokens of some slots.
        """
        candidates = self.candidates_of(jobs)
        place, allowed_BV = NamedSharding(self.mesh, self.layout.place("BV")), None
        if allowed:
            allowed_BV = np.ones((self.size.slots, self.padded_vocab), bool)
            for slot, tokens in allowed.items():
                allowed_BV[slot] = np.pad(tokens, (0, self.padded_vocab - len(tokens)))
        key = ("steps", self.size, candidates, bool(allowed), self._penalizes)
        kinds = (f"{candidates} candidates", "a grammar", "penalties")
        about = [name for name, is_there in zip(kinds, key[2:], strict=True) if is_there]
        self._slots, new_tokens = self.compiled(
            ", with ".join([f"steps of {self.size}", *about]), key,
            self.decoder(self.size, candidates).steps,
            self._weights, self._slots, np.int32(steps), allowed_BV,
            donate_argnums=1, in_shardings=(None, None, None, place if allowed else None),
        )  # fmt: skip
        return new_tokens

    @functools.cached_property
    def padded_vocab(self) -> int:
        """Returns the number of logits at a position."""
        logits = self.decoder(self.size).logits
        return jax.eval_shape(logits, self._weights, self._slots)[1].shape[-1]

    def note_call(self, size: SlotSize, steps: int, seconds: float) -> None:
        """Learns from a call that took at most `seconds` how many steps of a size fit in CALL_S.

        Only the fastest call counts: others waited for something else, or for other work.
        """
        self._step_s[size] = min(self._step_s.get(size, math.inf), seconds / steps)
        self.steps = self._steps_of(self.size)

    def _steps_of(self, size: SlotSize) -> int:
        return min(max(int(CALL_S / self._step_s.get(size, math.inf)), 1), MAX_STEPS)

    def _put(
        self, jobs: Mapping[int, Job], rows: int, length: int, candidates: int | None = None
    ) -> PromptScores | None:
        """Puts requests, padded to `rows` rows of a length, into slots; may score the prompts."""
        unused = rows - len(jobs)
        filled = [*jobs.values(), *[Job(Request([], 1))] * unused]
        samplings = [job.sampling for job in filled]
        vocab, whole = self.vocab, [job.request.prompt for job in filled]
        begins, prompts = split_begins(whole, vocab.begin_id, reads_begin=vocab.reads_begin)
        default_float = jax.dtypes.result_type(float)

        def vector(values: Sequence[float], dtype: DTypeLike = np.int32) -> Any:
            return np.array(values, dtype)

        settings = SlotSettings(
            seeds_B=vector([job.request.seed for job in filled], np.uint32),
            max_new_tokens_B=vector([job.request.max_new_tokens for job in filled]),
            min_new_tokens_B=vector([job.request.min_new_tokens for job in filled]),
            temperature_B=vector([s.temperature for s in samplings], default_float),
            top_k_B=vector([s.top_k or 0 for s in samplings]),
            top_p_B=vector([1 if s.top_p is None else s.top_p for s in samplings], default_float),
            min_p_B=vector([s.min_p for s in samplings], default_float),
            adapter_B=vector([job.adapter for job in filled]),
        )
        prompts_BL: Any = rows_of(prompts, length)  # jit accepts numpy arrays
        joining = Joining(
            slots_B=vector([*jobs, *[self.slots] * unused]),
            prompts_BL=prompts_BL,
            prompt_lengths_B=vector([len(prompt) for prompt in prompts]),
            begins_B=vector(begins),
            settings=settings,
        )
        # jit places its arguments in a tenth of the time of `device_put`.
        by_row, of_prompts = (NamedSharding(self.mesh, self.layout.place(of)) for of in ("B", "Bl"))
        by_field: dict[str, Any] = dict.fromkeys(Joining._fields, by_row)
        by_field["prompts_BL"] = of_prompts
        shardings = Joining(**by_field)
        size, about = self.size, f"{rows} x {length} tokens of prompts"
        if candidates is None and len(jobs) == 1 and length >= SHORTEST_CACHED:
            tokens = np.array([begins[0], *prompts[0]], np.int32)[:-1]  # the last one is not read
            scores = None
            read = self._read_rest(tokens, filled[0].adapter, joining, shardings)
            cache, last_B, filled[0].cached_tokens = read
        else:
            cache, last_B, scores = self._read(joining, shardings, candidates)
        if min(jobs, default=0) < size.slots:
            key = ("join", rows, length, size, scores is None, self._penalizes)
            penalties, penalty_shardings = self._penalties_of(filled)
            self._slots = self.compiled(
                f"the entry of {about} to {size}", key,
                self.decoder(size).join, self._slots, joining, cache, last_B, penalties,
                in_shardings=(None, shardings, None, None, penalty_shardings), donate_argnums=0,
            )  # fmt: skip
        return scores

    def _penalties_of(self, jobs: Sequence[Job]) -> tuple[Penalties | None, Any]:
        """Returns the penalties of joining texts, if any text has some, and their shardings."""
        assert self._slots is not None
        if (penalties := self._slots.penalties) is None:
            return None, None
        rows = jax.tree.map(lambda x: np.zeros((len(jobs), *x.shape[1:]), x.dtype), penalties)
        for row, job in enumerate(jobs):
            given = job.penalties
            rows.repetition_B[row] = given.repetition
            rows.presence_B[row], rows.frequency_B[row] = given.presence, given.frequency
            rows.bias_BV[row, [*given.bias]] = [*given.bias.values()]
            rows.is_in_prompt_BV[row, np.array(job.request.prompt, int)] = True
        return rows, jax.tree.map(lambda x: x.sharding, penalties)

    def _read(
        self, joining: Joining, shardings: Joining, candidates: int | None
    ) -> tuple[Cache, jax.Array, PromptScores | None]:
        """Reads entire prompts, as `SlotDecoder.read` does."""
        rows, length = joining.prompts_BL.shape
        return self.compiled(
            f"a pass over {rows} x {length} tokens of prompts", ("read", rows, length, candidates),
            self.decoder(self.size, candidates).read, self._weights, joining,
            in_shardings=(None, shardings),
        )  # fmt: skip

    def _read_rest(
        self, tokens: np.ndarray, adapter: int, joining: Joining, shardings: Joining
    ) -> tuple[Cache, jax.Array, int]:
        """Reads the part of a prompt that no cached prompt shares, and caches the prompt.

        Returns its keys and values, its last token, and how many of its tokens were cached.
        """
        length = joining.prompts_BL.shape[1]
        cached = self._prefixes.nearest(tokens, adapter)
        start = 0 if cached is None else min(cached.shared(tokens), len(tokens) - 1)
        count = next(n for n in powers(2, SHORTEST, length) if n >= len(tokens) - start)
        start = min(start, length - count)
        if cached is None or count == length:
            start, (cache, last_B, _) = 0, self._read(joining, shardings, None)
        else:
            cache, last_B = self.compiled(
                f"a pass over {count} more of {length} tokens of a prompt",
                ("rest", count, length, cached.length),
                functools.partial(self.decoder(self.size).read_rest, count=count),
                self._weights, joining, cached.cache, np.int32(start),
                in_shardings=(None, shardings, None, None),
            )  # fmt: skip
        self._prefixes.add(CachedPrompt(tokens, length, cache, adapter))
        return cache, last_B, max(start - self.vocab.reads_begin, 0)


def powers(base: int, first: int, last: int) -> list[int]:
    """Returns first, first * base, first * base**2, ... below last, and then last."""
    numbers = []
    while first < last:
        numbers.append(first)
        first *= base
    return [*numbers, last]


def next_rows(count: int, sizes: Sequence[int]) -> int:
    """Returns the rows of the next prefill: the smallest size that fits, if more than half full."""
    enough = next((size for size in sizes if count <= size), sizes[-1])
    if count > enough / 2:
        return enough
    return max((size for size in sizes if size <= count), default=enough)
