"""What ends a run early."""

import math
import os
import signal

import numpy as np
import pytest

from configs.errors import RunError
from trainer.interrupts import Interrupts, check_finite
from trainer.processes.ending import STOPS


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_is_noted_and_the_second_one_has_its_old_effect(number: signal.Signals) -> None:
    signals = []
    before = signal.signal(number, lambda *_: signals.append("old"))
    try:
        with Interrupts() as stop:
            assert not stop.received(1)
            os.kill(os.getpid(), number)
            assert stop.received(2) and stop.received(3) and not signals
            assert stop.stops_run == number
            os.kill(os.getpid(), number)
            assert signals == ["old"]
        os.kill(os.getpid(), number)  # the context gave back what was there
        assert signals == ["old", "old"]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", STOPS)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as stop:
            stop.received(1)
            os.kill(os.getpid(), number)
            assert not stop.received(2) and stop.stops_run is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "what"),
    [
        (math.nan, 1.0, "The loss of step 7 is nan."),
        (-math.inf, math.nan, "The loss of step 7 is -inf."),
        (2.0, math.inf, "The gradient norm of step 7 is inf."),
    ],
)
@pytest.mark.parametrize(("good", "named"), [(4, "step 4"), (None, "none was saved yet")])
def test_what_is_no_number_ends_the_run(
    loss: float, grad_norm: float, what: str, good: int | None, named: str
) -> None:
    with pytest.raises(RunError) as error:
        check_finite({"loss": loss, "grad_norm": grad_norm}, 7, np.array([5, 0, 12]), lambda: good)
    lines = str(error.value).splitlines()
    assert lines[:3] == [
        what,
        "  Rows of that batch: 5, 0, 12.",
        f"  Last good checkpoint: {named}.",
    ]


def test_numbers_pass_and_no_checkpoint_is_waited_for() -> None:
    check_finite({"loss": 2.0, "grad_norm": 0.0}, 1, np.arange(3), lambda: pytest.fail("asked"))
