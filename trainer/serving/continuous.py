"""Answers prompts by continuous batching: texts join and leave the batch while it runs."""

import math
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from models.decoding.slots import NewTokens, PromptScores
from trainer.multihost import fetched
from trainer.serving.service import DeadEnd, Job, NoFiniteScore, Ranked, Service
from trainer.serving.slot_engine import MAX_STEPS, SlotEngine, SlotSize


class StepsInFlight(NamedTuple):
    """Holds the tokens that a call computes, the jobs of its slots, and its start time."""

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
            del self._running[slot]
        room = min(self.engine.slots - len(self._running), len(self._waiting))
        return [self._waiting.popleft() for _ in range(room)]

    def set_weights(self, params: Any) -> None:
        self.engine.set_weights(params)

    def advance(self, jobs: Sequence[Job]) -> None:
        scored = [job for job in jobs if not job.request.max_new_tokens]
        jobs = [job for job in jobs if job.request.max_new_tokens]
        self._fit(jobs)
        free = [slot for slot in range(self.engine.size.slots) if slot not in self._running]
        joining = dict(zip(free, jobs, strict=False))
        # Jobs that are only scored get no slot.
        prompts = self.engine.join(joining | dict(enumerate(scored, self.engine.slots)))
        self._running |= joining
        before = self._dispatched
        if before is not None and any(job.grammar for job in self._running.values()):
            self._read(before)  # which tokens are allowed follows from the last one
            before = None
        self._dispatched = self._dispatch()
        if before is not None:
            self._read(before)
        for prompt in prompts:
            self._read_prompts(*prompt)

    def _fit(self, joining: Sequence[Job]) -> None:
        """Makes room for the jobs' cache entries up to the end of the next call; may move jobs."""
        if jobs := [*self._running.values(), *joining]:
            ends = ((job.request, job.dispatched + MAX_STEPS) for job in jobs)
            length = max(len(x.prompt) + min(end, x.max_new_tokens) for x, end in ends)
            moved = self.engine.fit([*self._running], len(jobs), length)
            self._running = {moved[slot]: job for slot, job in self._running.items()}

    def _dispatch(self) -> StepsInFlight | None:
        """Starts some steps, and frees the slots of texts that they complete."""
        if not self._running:
            return None
        allowed = self._allowed()
        steps = 1 if allowed else self.engine.steps
        start_s, size = time.monotonic(), self.engine.size
        new_tokens = self.engine.advance(steps, self._running.values(), allowed)
        dispatched = StepsInFlight(new_tokens, steps, size, {**self._running}, start_s)
        self.counts.steps += steps
        for slot, job in dispatched.jobs.items():
            job.dispatched += steps
            if job.dispatched >= job.request.max_new_tokens:
                del self._running[slot]
        return dispatched

    def _allowed(self) -> dict[int, np.ndarray]:
        """Returns the tokens that grammars allow next, by slot."""
        allowed = {}
        for slot, job in self._running.items():
            if job.grammar is not None and not job.is_done:
                if (tokens := job.grammar.allowed()) is None:
                    job.failure = DeadEnd()
                    self.notify([job])
                else:
                    allowed[slot] = tokens
        return allowed

    def _read(self, dispatched: StepsInFlight) -> None:
        """Waits for the tokens of a call, and passes them to their jobs."""
        columns = fetched(jax.tree.leaves(dispatched.new_tokens))
        # The call began when it was dispatched, or when the one before it was done.
        start_s = max(dispatched.start_s, self._last_read_s)
        self._last_read_s = time.monotonic()
        self.engine.note_call(dispatched.size, dispatched.steps, self._last_read_s - start_s)
        tokens_BT, log_p_BT, *candidates = (column[:, : dispatched.steps] for column in columns)
        changed = []
        for slot, job in dispatched.jobs.items():
            if job.is_done:
                continue
            likeliest = ranked(job, dispatched.steps, [column[slot] for column in candidates])
            new = zip(tokens_BT[slot].tolist(), log_p_BT[slot].tolist(), likeliest, strict=True)
            for token, log_p, best in new:
                if not job.is_done:
                    self._add(job, token, log_p, best)
            if job.streams or job.is_done:
                changed.append(job)
        if changed:
            self.notify(changed)

    def _read_prompts(self, jobs: Sequence[Job], scores: PromptScores) -> None:
        """Waits for the scores of prompts, and ends the jobs that want no new token."""
        columns = fetched(jax.tree.leaves(scores))
        log_p_BT, *candidates = (np.concatenate([*column], axis=1) for column in columns)
        unscored = 0 if self.engine.vocab.reads_begin else 1
        for row, job in enumerate(jobs):
            length = max(len(job.request.prompt) - unscored, 0)
            job.prompt_log_probabilities = log_p_BT[row, :length].tolist()
            job.prompt_likeliest = ranked(job, length, [x[row, :length] for x in candidates])
            if not np.isfinite(log_p_BT[row, :length]).all():
                job.failure = NoFiniteScore()
            elif not job.request.max_new_tokens:
                job.finish = "length"
        self.notify([job for job in jobs if job.is_done])

    def _add(self, job: Job, token: int, log_probability: float, likeliest: Ranked) -> None:
        if not math.isfinite(log_probability):
            job.failure = NoFiniteScore()
            return
        job.log_probabilities.append(log_probability)
        job.likeliest.append(likeliest)
        self.counts.new_tokens += 1
        if token in self.engine.vocab.stop_ids:
            job.end_id, job.finish = token, "stop"
            return
        job.tokens.append(token)
        if job.grammar is not None:
            job.grammar.add(token)
        if len(job.tokens) == job.request.max_new_tokens:
            job.finish = "length"


def ranked(job: Job, places: int, candidates: Sequence[np.ndarray]) -> list[Ranked]:
    """Returns the likeliest tokens that a job wants at each position, with their scores."""
    if not (candidates and job.candidates):
        return [[]] * places
    pairs = zip(*(column[:, : job.candidates].tolist() for column in candidates), strict=True)
    return [[*zip(*pair, strict=True)] for pair in pairs]
