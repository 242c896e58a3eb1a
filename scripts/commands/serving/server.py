"""Listens for HTTP, and stops on a signal once the running requests are answered."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from configs.errors import UserError
from scripts.commands.serving.bodies import ApiError
from scripts.commands.serving.guard import Guard
from trainer.processes.ending import STOPS, end_process, is_ignored
from trainer.serving.service import Job, Service, call_each

PASSES, LAST_S = 10, 1.0
"""At shutdown, the least number of times that the event loop looks for requests on its connections,
and the seconds it waits for the first requests of connections and the ends of answers."""
KEEP_ALIVE_S = 30
"""Seconds that a connection may have no complete request, or leave an answer unread."""


class Protocol(H11Protocol):
    """Speaks HTTP/1.1, and answers anything else with a JSON error."""

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not a request, and closes the connection.

        If they are part of a request's body, that request gets no other answer.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        error = ApiError(400, "This is not valid HTTP/1.1.").response()
        headers = [*error.raw_headers, (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # the request already has an answer
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(error.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C; a second signal ends it at once."""

    def __init__(self, guard: Guard, service: Service, drain_s: float, ready: Callable[[], None]):
        config = uvicorn.Config(
            guard, log_config=None, access_log=False, lifespan="off", http=Protocol, ws="none",
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        super().__init__(config)
        self.guard, self.service, self.drain_s = guard, service, drain_s
        self.on_start = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting_since = dict[tuple[object, ...], float]()  # by state of a connection

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens; jobs then announce their changes in the event loop of the server."""
        self._loop = loop = asyncio.get_running_loop()

        def announce(jobs: Sequence[Job]) -> None:
            with contextlib.suppress(RuntimeError):  # at the end, when the loop is closed
                loop.call_soon_threadsafe(call_each, jobs)

        self.service.notify = announce
        try:
            await super().startup(sockets)
        except OSError as error:  # such as another server that bound the port at the same time
            reason = error.strerror or error
            raise UserError(f"cannot listen: {reason}.  Choose another --port.") from None
        self.on_start()

    async def on_tick(self, counter: int) -> bool:
        """Ends connections of clients that keep the server waiting: uvicorn has no limit for that.

        Such a client is slow to send a request, or reads none of an answer that fills its buffers.
        """
        now, waiting_since = time.monotonic(), self._waiting_since
        self._waiting_since = {}
        for connection in [*self.server_state.connections]:
            assert isinstance(connection, H11Protocol)
            last, is_unread = connection.cycle, connection.flow.write_paused
            if is_unread or last is None or last.response_complete:
                state = connection, last, is_unread
                since = self._waiting_since[state] = waiting_since.get(state, now)
                if now - since > KEEP_ALIVE_S:
                    connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts down once clients that had connected are answered; uvicorn would reset these."""
        accepted = []
        for listener in sockets or []:
            listener.setblocking(False)
            with contextlib.suppress(OSError):  # no more connections, or too many open files
                while True:
                    accepted.append(listener.accept()[0])
        for server in self.servers:
            server.close()  # nothing is left to accept; later connections are refused
        loop = asyncio.get_running_loop()
        state = (self.config, self.server_state, self.lifespan.state)
        for connection in accepted:
            await loop.connect_accepted_socket(lambda: Protocol(*state), connection)
        passes, until, is_unanswered = 0, time.monotonic() + LAST_S, True
        while passes < PASSES or (is_unanswered and time.monotonic() < until):
            await asyncio.sleep(0.01)
            passes += 1
            connections = self.server_state.connections
            cycles = [c.cycle for c in connections if isinstance(c, H11Protocol)]
            is_unanswered = any(cycle is None or not cycle.response_complete for cycle in cycles)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals like uvicorn, except those that were ignored when this started."""
        ignored = [number for number in STOPS if is_ignored(number)]
        with super().capture_signals():
            for number in ignored:
                if not is_ignored(number):  # uvicorn handles none outside the main thread
                    signal.signal(number, signal.SIG_IGN)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accepts no more requests; ends once the running ones are answered."""
        if self._loop is None or self.guard.is_stopping:  # not started yet, or the second signal
            end_process(128 + sig)
        self.guard.is_stopping = True

        async def drain() -> None:
            await self.guard.drain(self.drain_s)
            self.should_exit = True

        # Kept because the loop has only a weak reference.
        self._draining = asyncio.run_coroutine_threadsafe(drain(), self._loop)
