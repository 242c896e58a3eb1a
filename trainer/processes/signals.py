"""Handles the signals that stop a command, except those that were ignored when it started."""

import signal
from collections.abc import Callable
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""SIGTERM and SIGHUP are what schedulers send before they take a machine away."""


def is_ignored(number: int) -> bool:
    """Returns whether a signal was ignored at start, such as SIGHUP under `nohup`."""
    return signal.getsignal(number) is signal.SIG_IGN


def handle(number: int, handler: Callable[..., Any]) -> Any:
    """Installs a handler and returns the one before; an ignored signal stays ignored.

    JAX handles SIGTERM in a run of several processes, unknown to Python: this replaces it.
    """
    before = signal.getsignal(number) or signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN if is_ignored(number) else handler)
    return before
