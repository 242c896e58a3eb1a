"""Connects two processes of a run.

A message is a JSON list on a line: its kind, then its values.
"""

import contextlib
import json
import socket
from collections.abc import Iterable
from typing import Any

Message = list[Any]

# A host that vanishes closes nothing: the kernel probes it from time to time, and gives up after
# 10 + 4 * 5 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Link:
    """Holds one connection, and the received part of an incomplete message."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.host = connection.getpeername()[0]
        self._rest = b""
        self.unread = list[Message]()  # received together with the one that started the run
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):  # not all systems have all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Sends a message; that the other side is gone is noticed where it is read."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Returns the complete messages that are there; None where the connection is closed."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


def join_names(processes: Iterable[int]) -> str:
    """Lists processes in words.

    >>> join_names([2]), join_names([3, 1, 2])
    ('process 2', 'processes 1, 2, 3')
    """
    indices = sorted(processes)
    word = "process" if len(indices) == 1 else "processes"
    return f"{word} {', '.join(map(str, indices))}"
