"""Listens for HTTP, and stops on a signal once the requests that run are answered."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from scripts.commands.serving.guard import Guard
from trainer.serving.service import Job, Service, call_each

KEEP_ALIVE_S = 30


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C; the second of them ends it at once."""

    def __init__(
        self, guard: Guard, service: Service, drain_s: float, on_start: Callable[[], None]
    ):
        config = uvicorn.Config(
            guard, log_config=None, access_log=False, lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        super().__init__(config)
        self.guard, self.service, self.drain_s = guard, service, drain_s
        self.on_start = on_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens; jobs then announce their changes in the loop of the server."""
        self._loop = loop = asyncio.get_running_loop()

        def announce(jobs: Sequence[Job]) -> None:
            loop.call_soon_threadsafe(call_each, jobs)

        self.service.notify = announce
        await super().startup(sockets)
        self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes no more requests; ends when those that run are answered."""
        assert self._loop is not None
        if self._draining is not None or self.guard.is_stopping:
            self.should_exit = self.force_exit = True
            return
        self.guard.is_stopping = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self.guard.drain(self.drain_s)
        self.should_exit = True
