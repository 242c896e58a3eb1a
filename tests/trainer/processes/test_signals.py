import os
import signal

import pytest

from trainer.processes.ending import STOPS, handle, is_ignored


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("ignored", [False, True])
def test_a_handler_is_installed_unless_the_signal_is_ignored(
    number: signal.Signals, ignored: bool
) -> None:
    received: list[int] = []
    start = signal.SIG_IGN if ignored else signal.SIG_DFL
    first = signal.signal(number, start)
    try:
        assert handle(number, lambda number, _: received.append(number)) == start
        os.kill(os.getpid(), number)
        assert is_ignored(number) == ignored and received == ([] if ignored else [number])
    finally:
        signal.signal(number, first)
