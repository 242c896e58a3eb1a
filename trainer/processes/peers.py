"""Connects the processes of a run, to detect lost ones and to stop all at the same step.

Process 0 is the hub: each other process keeps one TCP connection to it, from before JAX starts to
the end.  The kernel closes the connections of a process that dies, so that the others learn of it
at once, even while their main threads wait in a collective or in the compiler.  A thread of each
process reads its links; it never waits for the main thread.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.processes.ending import FAILED, RESTART, STALLED, dump_stacks, end_process

Message = list[Any]

# A host that vanishes closes nothing: the kernel probes it from time to time, and gives up after
# 10 + 4 * 5 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Link:
    """Holds one connection, and the received part of an incomplete message.

    A message is a JSON list on a line: its kind, then its values.
    """

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
        """Sends a message; a lost connection is noticed only when messages are received."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Returns the complete messages received so far; None if the connection is closed."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def join_names(processes: Iterable[int]) -> str:
    """Lists processes in words."""
    indices = sorted(processes)
    word = "process" if len(indices) == 1 else "processes"
    return f"{word} {', '.join(map(str, indices))}"


POLL_S = 0.2
GRACE_S = 10.0
"""How long a process may take to end by itself after another has failed."""
REPORT_S = 5.0
"""How long processes may take to report their step after one has stalled."""


class Peers:
    """Talks to the other processes of a run.  Every method may be called from any thread."""

    def __init__(self, index: int, links: Mapping[int, Link]):
        self.index, self._links = index, dict(links)
        self.count = len(links) + 1 if index == 0 else 0  # only the hub counts
        self._changed = threading.Condition()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._failed: set[int] = set()
        self.failure: tuple[int, str] | None = None
        """Exit code and reason of the first other process that failed."""
        # Of this process.
        self._step = 0
        self._checks = 0
        self._frozen = self._all_left = False
        self._stop_requested: int | None = None
        self._stop_signal: int | None = None
        self._stop_at: int | None = None
        self._gathered: list[Any] | None = None
        # Of the hub: what the processes answered, by kind and process.
        kinds = ("checks", "step", "value", "left")
        self._answers: dict[str, dict[int, Any]] = {kind: {} for kind in kinds}
        self._reporting = False
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    # Called by the main thread

    def request_stop(self, number: int) -> None:
        """Asks all processes to stop for a signal.  Safe in its handler: the thread sends it."""
        self._stop_requested = number

    def stop_signal(self, step: int) -> int | None:
        """Returns the signal for which all processes stop now.  Every process makes the same calls.

        A process that is asked to stop tells all.  Each then reports how many calls it has made,
        and waits in its next call for all reports.  All stop in the first call that none has made.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen)
            self._checks += 1
            self._step = step
            is_due = self._stop_at is not None and self._checks >= self._stop_at
            return self._stop_signal if is_due else None

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, by index, once all have called this.

        Every process makes the same calls.  It uses no device, and has no time limit.
        """
        with self._changed:
            self._to_hub(["value", value])
            self._changed.wait_for(lambda: self._gathered is not None)
            gathered, self._gathered = self._gathered, None
            assert gathered is not None
            return gathered

    def leave(self) -> None:
        """Waits until all processes are done.  Then their ends do not count as losses."""
        with self._changed:
            self._to_hub(["left", None])
            self._changed.wait_for(lambda: self._all_left)

    def fail(self, code: int, line: str) -> None:
        """Tells the other processes that this one ends, and why."""
        with self._changed:
            self._to_hub(["failed", code, line])
            if self.index == 0:  # JAX's services live here: the others leave first
                self._changed.wait_for(lambda: not self._links, GRACE_S)

    def stalled(self) -> None:
        """Makes all processes print their stacks and end, with an error that names those behind."""
        self._to_hub(["stalled"])

    # The thread

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for index, link in self._links.items():
            selector.register(link.connection, selectors.EVENT_READ, index)
            for message in link.unread:
                self._obey(index, *message)
        while True:
            for key, _ in selector.select(POLL_S):
                if (messages := self._links[key.data].receive()) is None:
                    selector.unregister(key.fileobj)
                    self._lose(key.data)
                for message in messages or []:
                    (self._collect if self.index == 0 else self._obey)(key.data, *message)
            with self._changed:
                if (number := self._stop_requested) is not None:
                    self._stop_requested = None
                    self._to_hub(["stop", number])
                due = [call for when, call in self._timers if when <= time.monotonic()]
                self._timers = [t for t in self._timers if t[1] not in due]
                for call in due:
                    call()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, call))

    def _lose(self, index: int) -> None:
        with self._changed:
            host = self._links.pop(index).host
            self._changed.notify_all()
            if self._all_left or self._failed:  # after a failure, processes end in their own time
                return
            line = f"process {index} on {host} is lost.  {RESTART}"
            if self.index == 0:
                self._to_all(["end", FAILED, line])
            else:
                end_process(FAILED, line)

    def _to_hub(self, message: Message) -> None:
        with self._changed:
            if self.index == 0:
                self._collect(0, *message)
            elif 0 in self._links:
                self._links[0].send(message)

    def _to_all(self, message: Message) -> None:
        with self._changed:
            for link in self._links.values():
                link.send(message)
            self._obey(0, *message)

    def _collect(self, sender: int, kind: str, *values: Any) -> None:
        """Handles a message from any process, in process 0."""
        with self._changed:
            if kind == "stop" and not self._frozen and self._stop_at is None:
                self._to_all(["freeze", values[0]])
            elif kind == "stalled" and not self._reporting:
                self._reporting = True
                self._after(REPORT_S, self._end_stalled)
                self._to_all(["report"])
            elif kind == "failed":
                self._failed.add(sender)
                self._to_all(["failed", sender, *values])
            elif kind in self._answers:
                answers = self._answers[kind]
                answers[sender] = values[0]
                if len(answers) == self.count:
                    self._all_answered(kind, answers)

    def _all_answered(self, kind: str, answers: dict[int, Any]) -> None:
        match kind:
            case "checks":
                self._to_all(["stop_at", max(answers.values()) + 1])
            case "step":
                self._end_stalled()
            case "value":
                self._to_all(["gathered", [answers.pop(index) for index in range(self.count)]])
            case "left":
                self._to_all(["all_left"])

    def _obey(self, sender: int, kind: str, *values: Any) -> None:
        """Handles a message from process 0 to all, in every process."""
        with self._changed:
            if kind == "freeze":
                self._frozen, self._stop_signal = True, values[0]
                self._to_hub(["checks", self._checks])
            elif kind == "stop_at":
                self._stop_at, self._frozen = values[0], False
            elif kind == "report":
                dump_stacks()
                self._to_hub(["step", self._step])
            elif kind == "failed":
                index, code, line = values
                self._failed.add(index)
                if index != self.index and self.failure is None:  # most errors occur in all
                    why = f"process {index} ended with exit code {code}: {line}"
                    self.failure = code, why
                    self._after(GRACE_S / 2, lambda: end_process(code, why))
            elif kind == "gathered":
                self._gathered = values[0]
            elif kind == "all_left":
                self._all_left = True
            elif kind == "end":
                code, line = values
                if self.index == 0:  # JAX's services live here: the others leave first
                    time.sleep(POLL_S)
                end_process(code, line)
            self._changed.notify_all()

    def _end_stalled(self) -> None:
        self._to_all(["end", STALLED, behind(self._answers["step"], self.count)])


def behind(steps: Mapping[int, int], count: int) -> str:
    """Describes which processes are behind, given the steps of those that answered."""
    head = "No step ended within Run.stall_minutes:"
    silent, newest = set(range(count)) - set(steps), max(steps.values())
    late = {index for index, step in steps.items() if step < newest}
    if silent:
        return f"{head} {join_names(silent)} did not answer; the others are at step {newest}."
    if not late:
        return f"{head} all processes are at step {newest}."
    oldest = min(steps.values())
    return f"{head} {join_names(late)} is behind, at step {oldest}; the others are at {newest}."


_current: Peers | None = None


def current() -> Peers | None:
    """Returns the other processes of this one's run; None if it runs alone."""
    return _current


def is_first_process() -> bool:
    """Returns whether this process is the one that prints and writes."""
    others = current()
    return others is None or others.index == 0


def set_current(peers: Peers | None) -> None:
    global _current
    _current = peers
