"""What may end a run early: a signal, or a loss or gradient that is no number."""

import math
import signal
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils

from configs.errors import RunError

NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


class Interrupts:
    """Notes SIGTERM or SIGINT so that the loop can save and leave; a second one ends at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._received = False

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        signal.signal(number, self._before[signal.Signals(number)])

    def received(self, step: int) -> bool:
        """Whether any process of the run was told to stop: all of them leave at the same step.

        Several processes ask each other at every tenth step only, as it holds up the devices.
        """
        if jax.process_count() == 1:
            return self._received
        if step % 10:
            return False
        return bool(np.any(multihost_utils.process_allgather(np.array(self._received))))


def check_finite(
    numbers: Mapping[str, float],
    step: int,
    row_ids: np.ndarray,
    last_good: Callable[[], int | None],
) -> None:
    """Stops a run whose loss or gradient is NaN or infinite, naming what is needed to look into it.

    After an update by such a gradient no weight is good, however finite the loss still was.
    """
    if math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"]):
        return
    what = "loss" if not math.isfinite(numbers["loss"]) else "grad_norm"
    good = last_good()
    raise RunError(
        f"The {NAMES[what]} of step {step} is {numbers[what]}.\n"
        f"  Rows of that batch: {', '.join(map(str, row_ids))}.\n"
        f"  Last good checkpoint: {'none was saved yet' if good is None else f'step {good}'}.\n"
        "  Start again from it with a lower learning rate (the optimizer's schedule), or"
        " clip gradients (clip_global_norm); `meshloom inspect data --rows=…` shows the rows."
    )
