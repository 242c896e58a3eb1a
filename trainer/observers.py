"""Defines observers of a run: all that a run does besides training."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from layouts.layout import Layout
from models.api import Params
from trainer.evaluate import Part, Progress
from trainer.run import Run
from trainer.step import State

logger = logging.getLogger(__name__)

Line = dict[str, float | None]
P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Holds a run's training step, traced and compiled, and the shapes of its arguments."""

    run: Run
    layout: Layout
    mesh: Mesh
    state: State
    batch: dict[str, jax.ShapeDtypeStruct]
    traced: Any  # of jax.stages, whose types are not public
    executable: Any
    compile_s: float


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Holds the metrics of a step on the host: numbers by name, and the loads of experts."""

    step: int
    line: Line
    loads: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Describes how a run ended."""

    steps: int
    stop_signal: int | None = None
    """The signal that stopped the run before it was done."""
    step_s: float | None = None
    """Mean seconds per step, without the first one."""
    data_stall_fraction: float = 0.0
    """The share of that time in which the loop waited for data."""


class Observer:
    """Receives the events of a run.  An observer overrides the methods that it needs."""

    def on_start(self, run: Run, first_step: int) -> None:
        """Called when the state is ready, after `first_step` updates."""

    def on_compiled(self, compiled: CompiledStep) -> None:
        """Called when the step is compiled, before it runs for the first time."""

    def starts_idle(self, step: int) -> bool:
        """Returns whether the devices must finish all earlier steps before this one starts."""
        return False

    def before_step(self, step: int) -> None:
        """Called before a step is dispatched; the devices may still work on the previous one."""

    def on_step(self, result: StepResult) -> None:
        """Called when the loss of a step is known to be finite."""

    def on_batch_evaluated(self, done: int, total: int) -> None:
        """Called after each batch of an evaluation."""

    def evaluate(self, step: int, params: Params, progress: Progress) -> Mapping[str, float]:
        """Returns further measures for an evaluation on the validation split.

        A slow evaluation calls `progress`, which may raise to end it.
        """
        return {}

    def on_evaluation(self, line: Line, parts: Mapping[str, Part]) -> None:
        """Called after an evaluation of the validation split."""

    def before_save(self, step: int) -> None:
        """Called before a checkpoint is saved, to write what a run that continues from it needs."""

    def on_end(self, outcome: Outcome) -> None:
        """Called when the run ends without an error."""

    def close(self) -> None:
        """Called when the run ends, whatever the reason."""


class Observers:
    """Calls several observers, in order."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = tuple(observers)

    def notify(
        self, event: Callable[Concatenate[Observer, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Calls each observer's method of this event, such as `Observer.on_step`."""
        return [getattr(o, event.__name__)(*args, **kwargs) for o in self._observers]

    def close(self) -> None:
        """Closes all observers, even if some of them raise.

        An OSError, as from the full disk that ended the run, is only logged.
        """
        with contextlib.ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(_close, observer)


def _close(observer: Observer) -> None:
    try:
        observer.close()
    except OSError as error:
        logger.warning("%s: not closed: %s.", type(observer).__name__, error.strerror or error)
