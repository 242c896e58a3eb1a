"""Ends a command within two seconds of Ctrl-C, whatever its main thread is doing.

Python runs signal handlers in the main thread, between two bytecodes, so Ctrl-C waits during an
import of native code or a compilation.  The signal also wakes a thread here, which ends the process
if the main thread does not do so in time.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from trainer.processes.ending import INTERRUPTED, end_process, handle, show_cursor

DEADLINE_S = 1.5

_is_interrupted = False
_is_importing = False


def is_interrupted() -> bool:
    """Returns whether Ctrl-C ends this process.  Any error is then a consequence of it."""
    return _is_interrupted


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handles SIGINT: raises KeyboardInterrupt, so that half-written files are removed.

    Native code prints tracebacks of exceptions that it cannot propagate, so nothing is printed
    from now on.
    """
    global _is_interrupted
    _is_interrupted = True
    show_cursor()
    silent = os.open(os.devnull, os.O_WRONLY)
    for descriptor in {2, sys.stderr.fileno()}:
        os.dup2(silent, descriptor)
    if not _is_importing:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted_after_import() -> Iterator[None]:
    """Delays the KeyboardInterrupt of a Ctrl-C in this context until its end.

    Native code that is being imported may abort if Python code that it calls is interrupted.
    """
    global _is_importing
    _is_importing = True
    try:
        yield
    finally:
        _is_importing = False
    if _is_interrupted:
        raise KeyboardInterrupt


def end_on_interrupt() -> None:
    """Makes Ctrl-C end this process, from now on.  A second one never waits for the main thread."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    handle(signal.SIGINT, interrupt)
    threading.Thread(target=_end_late, args=(source,), name="keyboard", daemon=True).start()


def stop_listening() -> None:
    """Lets Ctrl-C end the process at once, since nothing is left that it could harm."""
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_late(source: int) -> None:
    count = 0
    while signals := os.read(source, 64):
        count += signals.count(signal.SIGINT)
        # A training loop, which saves first, has another handler for the first one.
        if count > 1 or (count and signal.getsignal(signal.SIGINT) is interrupt):
            time.sleep(DEADLINE_S)
            end_process(INTERRUPTED)
