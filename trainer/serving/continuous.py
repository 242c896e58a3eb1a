"""Answers prompts by continuous batching: texts join and leave the running batch as it goes on."""

import math
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from models.decoding.slots import NewTokens
from trainer.multihost import fetched
from trainer.serving.service import Job, NoFiniteScore, ServedWeights, Service
from trainer.serving.slot_engine import MAX_STEPS, SlotEngine, SlotSize


class StepsInFlight(NamedTuple):
    """Holds the tokens that a call computes, the jobs of its slots, and when it began."""

    new_tokens: NewTokens
    steps: int
    size: SlotSize
    jobs: dict[int, Job]
    start_s: float


class ContinuousService(Service):
    """Keeps the slots full, and reads the tokens of a call while the next one runs."""

    def __init__(self, engine: SlotEngine, step: int, queue: int):
        super().__init__(engine.mesh, step, queue, engine.slots)
        self.engine = engine
        self._running: dict[int, Job] = {}
        self._left = dict[int, int]()  # tokens by slot that are still to be dispatched
        self._dispatched: StepsInFlight | None = None
        self._last_read_s = 0.0

    def warm_up(self) -> None:
        self.engine.warm_up()

    def running(self) -> Collection[Job]:
        """Returns the jobs in slots, and those whose last token is not read yet."""
        last = {} if self._dispatched is None else self._dispatched.jobs
        return [j for j in {*self._running.values(), *last.values()} if not j.is_done]

    def next_jobs(self) -> list[Job]:
        for slot in [slot for slot, job in self._running.items() if job.is_done]:
            self._free(slot)
        room = min(self.engine.slots - len(self._running), len(self._waiting))
        return [self._waiting.popleft() for _ in range(room)]

    def set_weights(self, weights: ServedWeights) -> None:
        self.engine.set_weights(weights.params)

    def advance(self, jobs: Sequence[Job]) -> None:
        self._fit(jobs)
        free = [slot for slot in range(self.engine.size.slots) if slot not in self._running]
        joining = dict(zip(free, jobs, strict=False))
        self.engine.join(joining)
        self._running |= joining
        self._left |= {slot: job.request.max_new_tokens for slot, job in joining.items()}
        before, self._dispatched = self._dispatched, self._dispatch()
        if before is not None:
            self._read(before)

    def _fit(self, joining: Sequence[Job]) -> None:
        """Makes room for what the jobs have in the cache after the next call; may move them."""
        left = [*self._left.values(), *[job.request.max_new_tokens for job in joining]]
        jobs, length = [*self._running.values(), *joining], 1
        for job, rest in zip(jobs, left, strict=True):
            new_tokens = job.request.max_new_tokens
            new_tokens = min(new_tokens - rest + MAX_STEPS, new_tokens)
            length = max(length, len(job.request.prompt) + new_tokens)
        if jobs:
            moved = self.engine.fit([*self._running], len(jobs), length)
            self._running = {moved[slot]: job for slot, job in self._running.items()}
            self._left = {moved[slot]: rest for slot, rest in self._left.items()}

    def _dispatch(self) -> StepsInFlight | None:
        """Starts some steps; the slot of a text that they complete is free."""
        if not self._running:
            return None
        start_s, steps, size = time.monotonic(), self.engine.steps, self.engine.size
        dispatched = StepsInFlight(self.engine.advance(), steps, size, {**self._running}, start_s)
        self.counts.steps += steps
        for slot in dispatched.jobs:
            self._left[slot] -= steps
            if self._left[slot] <= 0:
                self._free(slot)
        return dispatched

    def _free(self, slot: int) -> None:
        del self._running[slot], self._left[slot]

    def _read(self, dispatched: StepsInFlight) -> None:
        """Waits for the tokens of a call, and hands them to their jobs."""
        columns = fetched(dispatched.new_tokens)
        # The call began when it was dispatched, or when the one before it was done.
        start_s = max(dispatched.start_s, self._last_read_s)
        self._last_read_s = time.monotonic()
        self.engine.note_call(dispatched.size, dispatched.steps, self._last_read_s - start_s)
        tokens_BT, log_p_BT = (column[:, : dispatched.steps].tolist() for column in columns)
        changed = []
        for slot, job in dispatched.jobs.items():
            if job.is_done:
                continue
            for token, log_p in zip(tokens_BT[slot], log_p_BT[slot], strict=True):
                if not job.is_done:
                    self._add(job, token, log_p)
            if job.streams or job.is_done:
                changed.append(job)
        if changed:
            self.notify(changed)

    def _add(self, job: Job, token: int, log_probability: float) -> None:
        if not math.isfinite(log_probability):
            job.failure = NoFiniteScore()
            return
        job.log_probabilities.append(log_probability)
        self.counts.new_tokens += 1
        if token in self.engine.vocab.stop_ids:
            job.finish = "stop"
            return
        job.tokens.append(token)
        if len(job.tokens) == job.request.max_new_tokens:
            job.finish = "length"
