"""Keeps the words of JAX's runtime about a lost process from the user.

When another process dies, a thread of the runtime prints its own view of it with a C++ stack trace
and aborts.  `trainer.processes.peers` says it in one line and ends with an exit code that means
something; it only needs a moment.
"""

import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator

# Of these files of the runtime: each record begins with a letter, a date and a place.
RECORD = re.compile(rb"[IWEF]\d{4} \S+ +\d+ (\S+):\d+\]")
QUIET = (b"coordination_service", b"client.h")


def hide_lost_processes() -> None:
    """Filters what is written to file descriptor 2, and lets an abort wait for some seconds.

    What Python writes to `sys.stderr` goes directly to where it went before.
    """
    delay_abort()
    terminal = os.dup(2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)

    def forward() -> None:
        with os.fdopen(source, "rb") as lines:
            for line in without_lost_processes(lines):
                os.write(terminal, line)

    threading.Thread(target=forward, name="native log", daemon=True).start()


def without_lost_processes(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Leaves out the records of the coordination service, with the lines that follow each.

    >>> record = b"E1122 20:13:36.704947    8299 coordination_service_agent.cc:289] Polled\\n"
    >>> list(without_lost_processes([b"a\\n", record, b"of it\\n", b"W1122 20:13:37.1 8 b.cc:2]"]))
    [b'a\\n', b'W1122 20:13:37.1 8 b.cc:2]']
    """
    hidden = False
    for line in lines:
        if record := RECORD.match(line):
            hidden = record[1].startswith(QUIET)
        if not hidden:
            yield line


def delay_abort() -> None:
    """Makes an aborting thread sleep first: its handler is libc's sleep, for SIGABRT = 6 seconds.

    Meanwhile the other threads go on; then it aborts as it would have.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
