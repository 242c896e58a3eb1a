"""Ends a run early: on a signal, a loss or gradient that is NaN or infinite, or many spikes."""

import logging
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.errors import RunError, brief
from models.api import Params
from trainer.checkpoints.manager import by_path
from trainer.multihost import fetched
from trainer.optimizers.spikes import SkipSpikes
from trainer.processes import peers
from trainer.processes.ending import handle

logger = logging.getLogger(__name__)

NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


class Diverged(RunError):
    """Reports a loss or gradient that makes an update useless, and its step."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class StopRequested(Exception):
    """Ends an evaluation because the run is to stop."""


class Interrupts:
    """Records a signal so that the loop can save and stop; a second one takes effect at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.stops_run: int | None = None
        """The signal that stops the run, which this or another process of the run received."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._take(signal.SIGTERM, signal.SIGHUP)
        return self

    def __exit__(self, *_: object) -> None:
        self._release(*list(self._before))

    def _take(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number not in self._before:
                self._before[number] = handle(number, self._note)

    def _release(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            signal.signal(number, self._before.pop(number))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self._release(signal.Signals(number))
            signal.raise_signal(number)
            return
        self.signal = signal.Signals(number)
        if (others := peers.current()) is not None:
            others.request_stop(number)
        if self.signal is signal.SIGINT:
            os.write(2, b"\nSaving the state; Ctrl-C again leaves without.\n")

    def received(self, step: int) -> bool:
        """Returns whether the run must stop; all processes stop in the same call.

        From the first call on, there is something to save, so Ctrl-C is handled as well.
        """
        self._take(signal.SIGINT)
        others = peers.current()
        self.stops_run = self.signal if others is None else others.stop_signal(step)
        return self.stops_run is not None

    def last_save(self) -> None:
        """Makes Ctrl-C end the process again: the steps are done, and no call follows."""
        if self.signal is None and signal.SIGINT in self._before:
            self._release(signal.SIGINT)


def check_finite(
    numbers: Mapping[str, float],
    step: int,
    row_ids: np.ndarray,
    last_good: Callable[[], int | None],
    skip_spikes: SkipSpikes | None = None,
) -> None:
    """Stops a run whose loss or gradient is NaN or infinite, and reports details to investigate.

    After an update with such a gradient, no weight is good, even if the loss was still finite.
    Updates that `Run.skip_spikes` skips only cause warnings, until there are too many in a row.
    """
    rows = f"Rows of that batch: {', '.join(map(str, row_ids))}."
    if skip_spikes is None:
        bad = [name for name in NAMES if not math.isfinite(numbers[name])]
        if not bad:
            return
        what = f"The {NAMES[bad[0]]} of step {step} is {numbers[bad[0]]}."
    else:
        if not numbers["skipped"]:
            return
        what = f"Step {step}: {describe_spike(numbers)}"
        if numbers["skipped"] <= skip_spikes.limit:
            show = f"`meshloom inspect data --step={step}` shows them."
            logger.warning("%s  %s  %s", what, rows, show)
            return
        weights = step - numbers["skipped"]
        what += (
            f"\n  SkipSpikes.limit allows {skip_spikes.limit} in a row.  If these are not spikes, "
            f"raise SkipSpikes.factor, with --override.\n  Checkpoints from step {weights:.0f} on "
            "contain the weights that diverged.  Delete them to resume from an earlier one."
        )
    kind = "good" if skip_spikes is None else "saved"
    raise Diverged(f"{what}\n  {rows}\n  {_last(kind, last_good())}", step)


def check_weights(params: Params, step: int, last_good: Callable[[], int | None]) -> None:
    """Stops a run whose weights are NaN or infinite after an update, before they are saved."""
    if bad := not_finite(params):
        what = f"Weights are NaN or infinite after step {step}, though its loss is finite"
        raise Diverged(f"{what}: {brief(', '.join(bad))}.\n  {_last('good', last_good())}", step)


def not_finite(params: Params) -> list[str]:
    """Returns the paths of weights that are NaN or infinite."""
    arrays = by_path(params)
    finite = fetched(_all_finite([*arrays.values()]))
    return [path for path, is_finite in zip(arrays, finite, strict=True) if not is_finite]


@jax.jit
def _all_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(x)) for x in arrays]


def _last(kind: str, step: int | None) -> str:
    return f"Last {kind} checkpoint: {'none was saved yet' if step is None else f'step {step}'}."


def describe_spike(numbers: Mapping[str, float]) -> str:
    """Describes why an update was skipped, and how many have been."""
    spikes = []
    for name, words in NAMES.items():
        number, bound = numbers[name], numbers[f"{name}_bound"]
        if not (math.isfinite(number) and number <= bound):
            spikes.append(f"{words} {number:.4g} (bound {bound:.4g})")
    return (
        f"update skipped: {' and '.join(spikes)}; {numbers['skipped']:.0f} in a row, "
        f"{numbers['skipped_total']:.0f} in all."
    )
