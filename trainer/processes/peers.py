"""Links between the processes of a run: who is there, who is lost, and at which step all stop.

Process 0 is the hub: each other process keeps one TCP connection to it, from before JAX starts to
the end.  The kernel closes the connections of a process that dies, so that the others learn of it
at once, even while their main threads wait in a collective or in the compiler.  A thread of each
process reads its links; it never waits for the main thread.

A message is a JSON list on a line: its kind, then its values.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from configs.errors import RunError, UserError
from trainer.processes.ending import FAILED, RESTART, STALLED, dump_stacks, end_process

Message = list[Any]
Say = Callable[[str], None]

GREETING = "meshloom 1"
POLL_S = 0.2
SAY_EVERY_S = 10.0
CONNECT_EVERY_S = 0.5
GRACE_S = 10.0
"""How long a process may take to end by itself after another has failed."""
REPORT_S = 5.0
"""How long processes may take to report their step after one has stalled."""
# A host that vanishes closes nothing: the kernel asks for it from time to time, and gives up after
# 10 + 4 * 5 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Link:
    """One connection, and what was received of a message that is not complete."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.host = connection.getpeername()[0]
        self._rest = b""
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
            data = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_open(self) -> list[Message]:
        """Returns the complete messages that are there; raises where the connection is closed."""
        messages = self.receive()
        if messages is None:
            raise EOFError
        return messages

    def close(self) -> None:
        self.connection.close()


def names(processes: Iterable[int]) -> str:
    """Lists processes in words.

    >>> names([2]), names([3, 1, 2])
    ('process 2', 'processes 1, 2, 3')
    """
    indices = sorted(processes)
    word = "process" if len(indices) == 1 else "processes"
    return f"{word} {', '.join(map(str, indices))}"


# Meeting


def meet(address: str, count: int, index: int, timeout_s: float, say: Say) -> dict[int, Link]:
    """Returns the links of this process, once all processes of the run are there."""
    if index == 0:
        return Hub(address, count, timeout_s, say).wait_for_all()
    return {0: reach_hub(address, count, index, timeout_s, say)}


class Hub:
    """Waits at the address of process 0 for all others."""

    def __init__(self, address: str, count: int, timeout_s: float, say: Say):
        self._address, self._count, self._timeout_s, self._say = address, count, timeout_s, say
        self._links: dict[int, Link] = {}
        self._names: dict[int, str] = {}

    def wait_for_all(self) -> dict[int, Link]:
        start = said = time.monotonic()
        with self._listen() as server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while self._missing:
                for key, _ in selector.select(POLL_S):
                    if key.fileobj is server:
                        link = Link(server.accept()[0])
                        selector.register(link.connection, selectors.EVENT_READ, link)
                    elif not self._greet(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - start > self._timeout_s:
                    raise RunError(self._send_all("end", self._who_is_missing()))
                if now - said > SAY_EVERY_S:
                    self._say(self._send_all("waiting", f"Waiting for {names(self._missing)} of "
                              f"{self._count} at {self._address}."))  # fmt: skip
                    said = now
        for link in self._links.values():
            link.send(["ready", socket.gethostname()])
        return self._links

    def _listen(self) -> socket.socket:
        port = int(self._address.rpartition(":")[2])
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise RunError(
                f"process 0 cannot listen at {self._address}: {error.strerror}.  "
                "Choose another port in --coordinator_address, for all processes."
            ) from None

    @property
    def _missing(self) -> set[int]:
        return set(range(1, self._count)) - set(self._links)

    def _greet(self, link: Link) -> bool:
        """Lets a process in that says who it is; returns whether to go on listening to it."""
        try:
            greetings = [_greeting(*message) for message in link.receive_open()]
        except (ValueError, TypeError, EOFError):  # it left, or is no process of a run
            for index in [index for index, other in self._links.items() if other is link]:
                del self._links[index]
                self._say(f"Process {index} left before the run started.")
            link.close()
            return False
        for index, count, link.host in greetings:
            if count != self._count:
                self._refuse(link, f"process {index} on {link.host} was started with "
                             f"--process_count={count}, process 0 with {self._count}.")  # fmt: skip
            if index in self._links:
                self._refuse(link, f"--process_index={index} was given to two processes, on "
                             f"{self._links[index].host} and on {link.host}.")  # fmt: skip
            self._links[index] = link
        return True

    def _refuse(self, link: Link, line: str) -> None:
        link.send(["refused", line])
        raise UserError(self._send_all("refused", line))

    def _send_all(self, kind: str, line: str) -> str:
        for link in self._links.values():
            link.send([kind, line])
        return line

    def _who_is_missing(self) -> str:
        there = ", ".join(
            ["0 (this host)", *(f"{i} ({self._links[i].host})" for i in sorted(self._links))]
        )
        return (
            f"{names(self._missing)} of {self._count} did not come to {self._address} within "
            f"{self._timeout_s:g} s.  There are: {there}.  Look at the logs of those missing; "
            "--start_timeout_s waits longer."
        )


def _greeting(greeting: str, index: int, count: int, host: str) -> tuple[int, int, str]:
    if greeting != GREETING:
        raise ValueError(greeting)
    return index, count, host


def reach_hub(address: str, count: int, index: int, timeout_s: float, say: Say) -> Link:
    """Connects to process 0, says who this is and waits until all are there."""
    host, _, port = address.rpartition(":")
    start = said = time.monotonic()
    reason = "no answer"
    while (left := start + timeout_s - time.monotonic()) > 0:
        try:
            peer = (host.strip("[]"), int(port))
            link = Link(socket.create_connection(peer, timeout=min(left, SAY_EVERY_S)))
            link.send([GREETING, index, count, socket.gethostname()])
            if _wait_until_ready(link, start + timeout_s + SAY_EVERY_S, say):
                return link
            reason = "it closed the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() - said > SAY_EVERY_S:
            say(f"Waiting for process 0 at {address} ({reason}).")
            said = time.monotonic()
        time.sleep(CONNECT_EVERY_S)
    raise RunError(
        f"process 0 did not come to {address} within {timeout_s:g} s ({reason}).  Look at its "
        "log, and at --coordinator_address; --start_timeout_s waits longer."
    )


def _wait_until_ready(link: Link, until: float, say: Say) -> bool:
    """Returns whether all processes came; raises what process 0 says against it."""
    while (left := until - time.monotonic()) > 0:
        link.connection.settimeout(left)
        messages = link.receive()
        if messages is None:
            break
        for kind, *values in messages:
            if kind == "ready":
                link.connection.settimeout(None)
                link.host = values[0]
                return True
            if kind == "waiting":
                say(values[0])
            elif kind == "refused":
                raise UserError(values[0])
            elif kind == "end":
                raise RunError(values[0])
    link.close()
    return False


# Running


class Peers:
    """The other processes of a run.  Every method may be called from any thread."""

    def __init__(self, index: int, links: Mapping[int, Link]):
        self.index, self._links = index, dict(links)
        self.count = len(links) + 1 if index == 0 else 0  # only the hub counts
        self._changed = threading.Condition()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._failed: set[int] = set()
        # Of this process.
        self._step = 0
        self._checks = 0
        self._stop_requested = self._stop_sent = self._frozen = self._all_left = False
        self._stop_at: int | None = None
        # Of the hub: what the processes answered, by process.
        self._checks_of: dict[int, int] = {}
        self._step_of: dict[int, int] = {}
        self._left: set[int] = set()
        self._reporting = False
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    # Called by the main thread

    def request_stop(self) -> None:
        """Asks all processes to stop.  Safe in a signal handler: the thread sends it."""
        self._stop_requested = True

    def should_stop(self, step: int) -> bool:
        """Whether all processes stop now.  Every process makes the same calls.

        One that is asked to stop says so to all; each says how many calls it has made, and waits
        in its next one until all have: they stop together in the first that none has made.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen)
            self._checks += 1
            self._step = step
            return self._stop_at is not None and self._checks >= self._stop_at

    def leave(self) -> None:
        """Waits until all processes are done.  Their ends are then no losses."""
        with self._changed:
            self._to_hub(["left"])
            self._changed.wait_for(lambda: self._all_left)

    def fail(self, code: int, line: str) -> None:
        """Tells the others that this process ends, and why."""
        with self._changed:
            self._to_hub(["failed", code, line])
            if self.index == 0:  # JAX's services live here: the others leave first
                self._changed.wait_for(lambda: not self._links, GRACE_S)

    def stalled(self) -> None:
        """Makes all processes print their stacks and end, naming the one that is behind."""
        self._to_hub(["stalled"])

    # The thread

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for index, link in self._links.items():
            selector.register(link.connection, selectors.EVENT_READ, index)
        while True:
            for key, _ in selector.select(POLL_S):
                messages = self._links[key.data].receive()
                if messages is None:
                    selector.unregister(key.fileobj)
                    self._lose(key.data)
                for message in messages or []:
                    (self._collect if self.index == 0 else self._obey)(key.data, *message)
            with self._changed:
                if self._stop_requested and not self._stop_sent:
                    self._stop_sent = True
                    self._to_hub(["stop"])
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
            if self._all_left or index in self._failed:
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
        """Handles, in process 0, what a process says."""
        with self._changed:
            if kind == "stop" and not self._frozen and self._stop_at is None:
                self._to_all(["freeze"])
            elif kind == "checks":
                self._checks_of[sender] = values[0]
                if len(self._checks_of) == self.count:
                    self._to_all(["stop_at", max(self._checks_of.values()) + 1])
            elif kind == "stalled" and not self._reporting:
                self._reporting = True
                self._after(REPORT_S, self._end_stalled)
                self._to_all(["report"])
            elif kind == "step":
                self._step_of[sender] = values[0]
                if len(self._step_of) == self.count:
                    self._end_stalled()
            elif kind == "failed":
                self._failed.add(sender)
                self._to_all(["failed", sender, *values])
            elif kind == "left":
                self._left.add(sender)
                if len(self._left) == self.count:
                    self._to_all(["all_left"])

    def _obey(self, sender: int, kind: str, *values: Any) -> None:
        """Handles, in every process, what process 0 says to all."""
        with self._changed:
            if kind == "freeze":
                self._frozen = True
                self._to_hub(["checks", self._checks])
            elif kind == "stop_at":
                self._stop_at, self._frozen = values[0], False
            elif kind == "report":
                dump_stacks()
                self._to_hub(["step", self._step])
            elif kind == "failed":
                index, code, line = values
                self._failed.add(index)
                if index != self.index:  # most errors are found by all processes
                    why = f"process {index} ended with exit code {code}: {line}"
                    self._after(GRACE_S / 2, lambda: end_process(code, why))
            elif kind == "all_left":
                self._all_left = True
            elif kind == "end":
                code, line = values
                if self.index == 0:  # JAX's services live here: the others leave first
                    time.sleep(POLL_S)
                end_process(code, line)
            self._changed.notify_all()

    def _end_stalled(self) -> None:
        self._to_all(["end", STALLED, behind(self._step_of, self.count)])


def behind(steps: Mapping[int, int], count: int) -> str:
    """Says which processes are behind, given the steps of those that answered.

    >>> print(behind({0: 7, 1: 6}, 2))
    No step ended within Run.stall_minutes: process 1 is behind, at step 6; the others are at 7.
    """
    head = "No step ended within Run.stall_minutes:"
    silent, newest = set(range(count)) - set(steps), max(steps.values())
    late = {index for index, step in steps.items() if step < newest}
    if silent:
        return f"{head} {names(silent)} did not answer; the others are at step {newest}."
    if not late:
        return f"{head} all processes are at step {newest}."
    oldest = min(steps.values())
    return f"{head} {names(late)} is behind, at step {oldest}; the others are at {newest}."


_current: Peers | None = None


def current() -> Peers | None:
    """Returns the other processes of this one's run; None where it runs alone."""
    return _current


def set_current(peers: Peers | None) -> None:
    global _current
    _current = peers
