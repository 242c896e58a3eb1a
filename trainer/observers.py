"""Defines observers of a run: everything that a run does beside training."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from layouts.layout import Layout
from models.api import Params
from trainer.evaluate import PartEvaluation
from trainer.progress import Progress
from trainer.run import Run
from trainer.step import State

logger = logging.getLogger(__name__)

Line = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Holds a run's training step, traced and compiled, and the shapes of its arguments."""

    run: Run
    layout: Layout
    mesh: Mesh
    state: State
    batch: dict[str, jax.ShapeDtypeStruct]
    traced: Any  # as jax.stages has them; their types are not public
    executable: Any
    compile_s: float


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Holds the metrics of a step on the host: numbers by name, and what the routers did."""

    step: int
    line: Line
    loads: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Describes how a run ended."""

    steps: int
    stop_signal: int | None = None
    """The signal that stopped it before all was done."""
    step_s: float | None = None
    """Seconds a step, the first one (which compiles) not counted."""
    data_stall_fraction: float = 0.0
    """The share of that time in which the loop waited for data."""


class Observer:
    """Receives the events of a run.  An observer defines the methods that it needs."""

    def on_start(self, run: Run, first_step: int) -> None:
        """Runs when the state is there; `first_step` updates have been made."""

    def on_compiled(self, compiled: CompiledStep) -> None:
        """Runs when the step is compiled, before the first one."""

    def before_step(self, step: int) -> None:
        """Runs before a step is dispatched; the devices may still work on the last one."""

    def on_step(self, result: StepResult) -> None:
        """Runs when the loss of a step is known to be finite."""

    def on_batch_evaluated(self, done: int, total: int) -> None:
        """Runs after each batch of an evaluation."""

    def evaluate(self, step: int, params: Params, progress: Progress) -> Mapping[str, float]:
        """Returns further measures for an evaluation on the validation split.

        What takes long calls `progress`, which may raise: the evaluation is then left.
        """
        return {}

    def on_evaluation(self, line: Line, parts: Mapping[str, PartEvaluation]) -> None:
        """Runs after an evaluation of the validation split."""

    def before_save(self, step: int) -> None:
        """Runs before a checkpoint is saved; the run that continues from it relies on what was
        written before.
        """

    def on_end(self, outcome: Outcome) -> None:
        """Runs when the run ends without an error."""

    def close(self) -> None:
        """Runs when the run ends, whatever the reason."""


class Observers(Observer):
    """Calls several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = tuple(observers)

    def on_start(self, run: Run, first_step: int) -> None:
        for observer in self._observers:
            observer.on_start(run, first_step)

    def on_compiled(self, compiled: CompiledStep) -> None:
        for observer in self._observers:
            observer.on_compiled(compiled)

    def before_step(self, step: int) -> None:
        for observer in self._observers:
            observer.before_step(step)

    def on_step(self, result: StepResult) -> None:
        for observer in self._observers:
            observer.on_step(result)

    def on_batch_evaluated(self, done: int, total: int) -> None:
        for observer in self._observers:
            observer.on_batch_evaluated(done, total)

    def evaluate(self, step: int, params: Params, progress: Progress) -> Mapping[str, float]:
        measures: dict[str, float] = {}
        for observer in self._observers:
            measures |= observer.evaluate(step, params, progress)
        return measures

    def on_evaluation(self, line: Line, parts: Mapping[str, PartEvaluation]) -> None:
        for observer in self._observers:
            observer.on_evaluation(line, parts)

    def before_save(self, step: int) -> None:
        for observer in self._observers:
            observer.before_save(step)

    def on_end(self, outcome: Outcome) -> None:
        for observer in self._observers:
            observer.on_end(outcome)

    def close(self) -> None:
        """Closes all, whatever happens in one of them.

        A full disk, which ended the run, ends what it draws as well: that is only logged.
        """
        with contextlib.ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(_close, observer)


def _close(observer: Observer) -> None:
    try:
        observer.close()
    except OSError as error:
        logger.warning("%s: not closed: %s.", type(observer).__name__, error.strerror or error)


def on_first_process(*observers: Observer) -> tuple[Observer, ...]:
    """Returns observers that write files: in the first process of a run, none in the others."""
    return observers if jax.process_index() == 0 else ()
