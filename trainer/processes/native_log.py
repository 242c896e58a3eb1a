"""Shortens what JAX logs of a lost process to one line; names the layout where a process aborts.

A thread of the runtime prints the trace and aborts.  `trainer.processes.peers` learns of most
losses too: it only needs a moment to name the process and to end with an exit code that means
something.
"""

import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from trainer.processes import peers
from trainer.processes.ending import FAILED, RESTART, end_process

# Of these files of the runtime: each record begins with a letter, a date and a place.
RECORD = re.compile(rb"[IWEF]\d{4} \S+ +\d+ (\S+):\d+\]")
QUIET = (b"coordination_service", b"client.h")
REASON = re.compile(r"absl::Status: \w+: (.*?)(?:RPC:|Additional GRPC|\*\*\*|$)", re.S)

PEERS_S = 2.0
"""How long `trainer.processes.peers` has to end the process with a better line."""

AbortHandler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[object] = []  # C calls them: they must live as long as the process


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
        fatal: list[bytes] = []
        with os.fdopen(source, "rb") as lines:
            for line in without_lost_processes(lines, fatal):
                os.write(terminal, line)

    threading.Thread(target=forward, name="native log", daemon=True).start()


def without_lost_processes(lines: Iterable[bytes], fatal: list[bytes]) -> Iterator[bytes]:
    """Drops the records of the coordination service, with the lines that follow each.

    The lines of the last one, before the runtime aborts, are collected; they end the process soon.

    >>> record = b"E1122 20:13:36.704947    8299 coordination_service_agent.cc:289] Polled\\n"
    >>> other = b"W1122 20:13:37.1 8 b.cc:2]"
    >>> list(without_lost_processes([b"a\\n", record, b"of it\\n", other], []))
    [b'a\\n', b'W1122 20:13:37.1 8 b.cc:2]']
    """
    hidden = False
    for line in lines:
        if record := RECORD.match(line):
            hidden = record[1].startswith(QUIET)
            if hidden and line.startswith(b"F") and not fatal:
                timer = threading.Timer(PEERS_S, lambda: _end(fatal))
                timer.daemon = True
                timer.start()
                fatal.append(b"")
        if fatal:
            fatal.append(line)
        if not hidden:
            yield line


def _end(fatal: list[bytes]) -> None:
    others = peers.current()
    known = None if others is None else others.failure  # JAX calls its end a loss
    end_process(*(known or (FAILED, reason(fatal))))


def reason(fatal: list[bytes]) -> str:
    """Returns what the runtime says of the loss, in one line.

    >>> text = b"F1 8 client.h:80] It ends.  absl::Status: UNAVAILABLE: Tasks are unhealthy:\\n"
    >>> print(reason([text, b"1\\n", b"\\n", b"RPC: /xla/PollForError\\n"]).partition("  ")[0])
    JAX lost another process: Tasks are unhealthy: 1.
    """
    text = b"".join(fatal).decode(errors="replace")
    match = REASON.search(text)
    said = " ".join(match[1].split()) if match else "see its log"
    return f"JAX lost another process: {said[:300].rstrip('.')}.  {RESTART}"


def delay_abort() -> None:
    """Makes an aborting thread sleep first: its handler is libc's sleep, for SIGABRT = 6 seconds.

    Meanwhile the other threads continue; then it aborts as it would have.
    """
    handle_abort(ctypes.cast(ctypes.CDLL(None).sleep, AbortHandler))


def name_layout_of_abort(layout: str) -> None:
    """Lets an abort of this process, as of a compiler, print the layout in its last line.

    With several processes an abort is rarely the layout's fault: `hide_lost_processes` handles it.
    """
    import jax

    if jax.process_count() > 1:
        return
    line = (
        f"meshloom: this process aborted under {layout}.  If the lines above are a compiler's, "
        "try another layout or another Transformer.remat.\n"
    )
    handle_abort(AbortHandler(lambda signal: os.write(2, line.encode())))


def handle_abort(handler: Any) -> None:
    """Installs a C function as the handler of SIGABRT."""
    _handlers.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, AbortHandler), ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
