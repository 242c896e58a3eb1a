"""Ends a run that is stalled, after showing the stack of each thread."""

import functools
import threading
import time
from collections.abc import Mapping

from trainer.evaluate import Part
from trainer.observers import CompiledStep, Line, Observer, StepResult
from trainer.processes import peers
from trainer.processes.ending import STALLED, dump_stacks, end_process

CHECKS = 20  # within the time after which a run has stalled


class Watchdog(Observer):
    """Prints the stack of every thread and ends the process when no step ends for too long.

    It watches from the first compiled step to the last one; evaluation batches count as well.  With
    several processes, all print their stacks, and say which of them is behind.
    """

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._moved = time.monotonic()

    def on_compiled(self, compiled: CompiledStep) -> None:
        self._moved = time.monotonic()
        minutes = compiled.run.stall_minutes
        if minutes is not None and self._thread is None:
            watch = functools.partial(self._watch, 60 * minutes)
            self._thread = threading.Thread(target=watch, name="watchdog", daemon=True)
            self._thread.start()

    def on_step(self, result: StepResult) -> None:
        self._step, self._moved = result.step, time.monotonic()

    def on_batch_evaluated(self, done: int, total: int) -> None:
        self._moved = time.monotonic()

    def on_evaluation(self, line: Line, parts: Mapping[str, Part]) -> None:
        self._moved = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, limit_s: float) -> None:
        while not self._closed.wait(limit_s / CHECKS):
            if time.monotonic() - self._moved <= limit_s:
                continue
            if (others := peers.current()) is not None:
                others.stalled()
                return
            dump_stacks()
            line = f"No step ended within Run.stall_minutes: the last one that did is {self._step}."
            end_process(STALLED, line)
