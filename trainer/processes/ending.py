"""Ends a process at once, whatever its main thread is doing; handles the signals that stop it."""

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

FAILED = 1
STALLED = 75
"""EX_TEMPFAIL of sysexits.h: the same command may succeed when it is started again."""
INTERRUPTED = 130
"""Exit code that a shell reports after Ctrl-C: 128 + SIGINT."""

RESTART = "Start all processes again: the run resumes from its newest checkpoint."
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


def end_process(code: int, line: str | None = None) -> NoReturn:
    """Prints a line and ends the process, without unwinding or waiting for other threads."""
    try:
        show_cursor()
        if line is not None:
            sys.stderr.write(f"meshloom: {line}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:  # even if nobody reads them any more
        os._exit(code)


def show_cursor() -> None:
    """Shows the cursor of the terminal again."""
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
        sys.stderr.flush()


def dump_stacks() -> None:
    """Prints the stack of every thread to the standard error."""
    with contextlib.suppress(OSError):  # of a pipe that nobody reads any more
        sys.stderr.flush()
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""SIGTERM and SIGHUP are what schedulers send before they take a machine away."""


def is_ignored(number: int) -> bool:
    """Returns whether a signal was ignored at start, such as SIGHUP under `nohup`."""
    return signal.getsignal(number) is signal.SIG_IGN


def handle(number: int, handler: Callable[..., Any]) -> Any:
    """Installs a handler and returns the previous one; signals ignored at start stay ignored.

    In a run of several processes, JAX handles SIGTERM, unknown to Python: this replaces it.
    """
    before = signal.getsignal(number) or signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN if is_ignored(number) else handler)
    return before
