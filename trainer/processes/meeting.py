"""Connects the processes of a run to process 0, before JAX starts."""

import contextlib
import logging
import selectors
import socket
import time

from configs.errors import RunError, UserError
from trainer.processes.peers import Link, join_names

logger = logging.getLogger(__name__)

GREETING = "meshloom 1"
POLL_S = 0.2
LOG_EVERY_S = 10.0
CONNECT_EVERY_S = 0.5


def meet(address: str, count: int, index: int, timeout_s: float) -> dict[int, Link]:
    """Returns the links of this process, once all processes of the run are there."""
    if index == 0:
        return Hub(address, count, timeout_s).wait_for_all()
    return {0: reach_hub(address, count, index, timeout_s)}


class Hub:
    """Waits at the address of process 0 for all others."""

    def __init__(self, address: str, count: int, timeout_s: float):
        self._address, self._count, self._timeout_s = address, count, timeout_s
        self._links: dict[int, Link] = {}

    def wait_for_all(self) -> dict[int, Link]:
        start = logged = time.monotonic()
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
                    hosts = (f"{i} ({link.host})" for i, link in sorted(self._links.items()))
                    line = (
                        f"{join_names(self._missing)} of {self._count} did not connect to "
                        f"{self._address} within {self._timeout_s:g} s.  Connected: "
                        f"{', '.join(['0 (this host)', *hosts])}.  Read the logs of the missing "
                        "ones; --start_timeout_s waits longer."
                    )
                    raise RunError(self._send_all("end", line))
                if now - logged > LOG_EVERY_S:
                    missing = join_names(self._missing)
                    line = f"Waiting for {missing} of {self._count} at {self._address}."
                    logger.info(self._send_all("waiting", line))
                    logged = now
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
        """Admits a process that identifies itself; returns whether to go on listening to it."""
        try:
            if (messages := link.receive()) is None:
                raise EOFError
            greetings = [_greeting(*message) for message in messages]
        except (ValueError, TypeError, EOFError):  # it left, or is no process of a run
            for index in [index for index, other in self._links.items() if other is link]:
                del self._links[index]
                logger.info("Process %d left before the run started.", index)
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


def _greeting(greeting: str, index: int, count: int, host: str) -> tuple[int, int, str]:
    if greeting != GREETING:
        raise ValueError(greeting)
    return index, count, host


def reach_hub(address: str, count: int, index: int, timeout_s: float) -> Link:
    """Connects to process 0, says who this is and waits until all are there."""
    host, _, port = address.rpartition(":")
    start = logged = time.monotonic()
    reason = "no answer"
    while (left := start + timeout_s - time.monotonic()) > 0:
        try:
            peer = (host.strip("[]"), int(port))
            link = Link(socket.create_connection(peer, timeout=min(left, LOG_EVERY_S)))
            with contextlib.ExitStack() as stack:
                stack.callback(link.close)
                link.send([GREETING, index, count, socket.gethostname()])
                if _wait_until_ready(link, start + timeout_s + LOG_EVERY_S):
                    stack.pop_all()
                    return link
            reason = "it closed the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        except UserError:  # what process 0 refuses; it is a ValueError too
            raise
        except (ValueError, TypeError, LookupError):
            reason = "another program answers there"
        if time.monotonic() - logged > LOG_EVERY_S:
            logger.info("Waiting for process 0 at %s (%s).", address, reason)
            logged = time.monotonic()
        time.sleep(CONNECT_EVERY_S)
    raise RunError(
        f"process 0 did not open {address} within {timeout_s:g} s ({reason}).  Read its "
        "log, check --coordinator_address, or raise --start_timeout_s."
    )


def _wait_until_ready(link: Link, until: float) -> bool:
    """Returns whether all processes came; raises what process 0 says against it."""
    while (left := until - time.monotonic()) > 0:
        link.connection.settimeout(left)
        messages = link.receive()
        if messages is None:
            break
        for number, (kind, *values) in enumerate(messages, 1):
            if kind == "ready":
                link.unread = messages[number:]
                link.connection.settimeout(None)
                link.host = values[0]
                return True
            if kind == "waiting":
                logger.info(values[0])
            elif kind == "refused":
                raise UserError(values[0])
            elif kind == "end":
                raise RunError(values[0])
    return False
