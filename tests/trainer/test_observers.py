"""Observers of a run, called together."""

import pytest

from trainer.observers import Observer, Observers, Outcome


class Named(Observer):
    def __init__(self, name: str, log: list[str]):
        self._name, self._log = name, log

    def on_end(self, outcome: Outcome) -> None:
        self._log.append(f"{self._name} ended at {outcome.steps}")

    def close(self) -> None:
        self._log.append(f"{self._name} closed")
        raise OSError(28, "No space left on device")


def test_observers_run_and_close_in_order_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    observers = Observers([Named("a", log), Named("b", log)])
    observers.notify(Observer.on_end, Outcome(steps=7))
    observers.close()
    assert log == ["a ended at 7", "b ended at 7", "a closed", "b closed"]
    assert caplog.text.count("Named: not closed: No space left on device.") == 2
