"""Runs the slots of a language model on the devices: few programs, compiled before any request."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from data.vocab import Vocab
from models.api import Decodable
from models.decoding.sampling import Sampling
from models.decoding.slots import Joining, NewTokens, SlotDecoder, Slots, SlotSettings
from trainer.decoding.decoder import SHORTEST, Request, row_shards, rows_of, split_begins
from trainer.memory import check_cache_memory
from trainer.serving.service import GREEDY

JOINING_TOKENS = 256
"""Maximum number of padded tokens of one prefill pass; a longer prompt has its own."""
CALL_S, MAX_STEPS = 0.02, 4
"""Seconds of the steps that are one call, and how many these are, at most.

Each call, and what Python does around it, takes a millisecond or so beside the steps.  More steps
leave more slots empty: texts that end, and prompts that wait, do so until the end of a call.
"""


class SampledRequest(NamedTuple):
    """Holds a prompt, and how to choose the tokens that continue it."""

    request: Request
    sampling: Sampling


class SlotEngine:
    """Holds the weights and the running batch.

    One thread uses it, within the mesh.  `advance` returns before its tokens are computed, so that
    the next ones can be started before they are read.
    """

    def __init__(
        self, model: Decodable, params: Any, mesh: Mesh, vocab: Vocab, slots: int, max_length: int
    ):
        self.params, self.mesh, self.vocab, self.max_length = params, mesh, vocab, max_length
        self.layout = model.layout
        self.shards = row_shards(self.layout, mesh)
        self.slots = self.rounded(slots)
        self.steps, self._step_s = 1, math.inf
        self._decoder = decoder = SlotDecoder(
            model, self.slots, max_length, vocab.stop_ids, MAX_STEPS
        )
        self._start = jax.jit(decoder.start)
        self._join = jax.jit(
            self._joined, in_shardings=(None, None, self._shardings()), donate_argnums=1
        )
        self._steps = jax.jit(decoder.steps, static_argnums=0, donate_argnums=2)
        self._prepare = jax.jit(self._prepared_weights)
        with jax.set_mesh(mesh):
            stored = [params, self._prepare.eval_shape(params)]
            check_cache_memory(stored, self._start.eval_shape(params).cache, mesh)
            self._slots = self._start(params)

    def rounded(self, rows: int) -> int:
        """Returns the next number of rows that divides over the shards of the batch."""
        return -(-rows // self.shards) * self.shards

    def prompt_lengths(self) -> list[int]:
        """Returns the lengths to which prompts are padded."""
        powers = (1 << exponent for exponent in range(self.max_length.bit_length()))
        shorter = [length for length in powers if SHORTEST <= length < self.max_length]
        return [*shorter, self.max_length]

    def joining_rows(self, length: int) -> list[int]:
        """Returns how many prompts of a padded length may be read in one pass."""
        largest = max(JOINING_TOKENS // length, 1)
        powers = (4**exponent for exponent in range(largest.bit_length()))
        rows = {min(self.rounded(count), self.slots) for count in powers if count <= largest}
        return sorted(rows)

    def set_weights(self, params: Any) -> None:
        """Takes other weights for all tokens from now on."""
        self.params, self._weights = params, []  # frees the old ones before there are new ones
        self._weights = self._prepare(params)

    def warm_up(self) -> None:
        """Compiles every program; the slots are empty after it."""
        self.set_weights(self.params)
        for length in self.prompt_lengths():
            for rows in self.joining_rows(length):
                self._put({}, rows, length)
        jax.block_until_ready(self.advance())

    def join(self, requests: Mapping[int, SampledRequest]) -> None:
        """Puts requests into slots, by slot."""
        by_length: dict[int, list[int]] = {}
        lengths = self.prompt_lengths()
        for slot, (request, _) in requests.items():
            length = next(length for length in lengths if len(request.prompt) <= length)
            by_length.setdefault(length, []).append(slot)
        for length, slots in by_length.items():
            while slots:
                rows = next_rows(len(slots), self.joining_rows(length))
                self._put({slot: requests[slot] for slot in slots[:rows]}, rows, length)
                slots = slots[rows:]

    def advance(self) -> NewTokens:
        """Adds `steps` tokens to each text."""
        self._slots, new_tokens = self._steps(
            self._model_step, self._weights, self._slots, self.steps
        )
        return new_tokens

    def note_call(self, steps: int, seconds: float) -> None:
        """Learns from a call that took at most so long how many steps fit in CALL_S.

        The fastest call counts: others waited for something else, or for work of the machine.
        """
        self._step_s = min(self._step_s, seconds / steps)
        self.steps = min(max(int(CALL_S / self._step_s), 1), MAX_STEPS)

    def _prepared_weights(self, params: Any) -> list[jax.Array]:
        # Once traced, the step of the model is a function of its arguments alone.
        self._model_step, weights = self._decoder.prepare(params)
        return weights

    def _put(self, requests: Mapping[int, SampledRequest], rows: int, length: int) -> None:
        """Puts requests, padded to so many rows of a length, into slots."""
        unused = rows - len(requests)
        filled = [*requests.values(), *[SampledRequest(Request([], 1), GREEDY)] * unused]
        begins, prompts = split_begins(
            [request.prompt for request, _ in filled],
            self.vocab.begin_id,
            reads_begin=self.vocab.reads_begin,
        )

        def vector(values: Sequence[float], dtype: type = np.int32) -> np.ndarray:
            return np.array(values, dtype)

        arrays = {
            "slots_B": vector([*requests, *[self.slots] * unused]),
            "prompts_BL": rows_of(prompts, length),
            "prompt_lengths_B": vector([len(prompt) for prompt in prompts]),
            "begins_B": vector(begins),
            "seeds_B": vector([request.seed for request, _ in filled], np.uint32),
            "max_new_tokens_B": vector([request.max_new_tokens for request, _ in filled]),
            "min_new_tokens_B": vector([request.min_new_tokens for request, _ in filled]),
            "temperature_B": vector([s.temperature for _, s in filled], np.float32),
            "top_k_B": vector([s.top_k or 0 for _, s in filled]),
            "top_p_B": vector([1 if s.top_p is None else s.top_p for _, s in filled], np.float32),
        }
        self._slots = self._join(self.params, self._slots, arrays)

    def _joined(self, params: Any, slots: Slots, arrays: dict[str, jax.Array]) -> Slots:
        settings = SlotSettings(*(arrays.pop(name) for name in SlotSettings._fields))
        return self._decoder.join(params, slots, Joining(**arrays, settings=settings))

    def _shardings(self) -> dict[str, NamedSharding]:
        """Returns where jit places what joins: in a tenth of the time of `device_put`."""
        fields = {*Joining._fields, *SlotSettings._fields} - {"settings"}
        place = self.layout.place
        axes = {name: "Bl" if name == "prompts_BL" else "B" for name in fields}
        return {name: NamedSharding(self.mesh, place(of)) for name, of in axes.items()}


def next_rows(count: int, sizes: Sequence[int]) -> int:
    """Returns the rows of a pass over so many prompts, or the first of them: over half are filled.

    >>> [next_rows(count, [1, 4, 16]) for count in (1, 2, 3, 8, 9, 17)]
    [1, 1, 4, 4, 16, 16]
    """
    enough = next((size for size in sizes if count <= size), sizes[-1])
    if count > enough / 2:
        return enough
    return max((size for size in sizes if size <= count), default=enough)
