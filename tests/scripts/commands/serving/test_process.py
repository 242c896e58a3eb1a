"""`meshloom serve` as a process of its own: it starts, answers, and stops on SIGTERM."""

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from scripts.benchmarks.serve import announced_port
from scripts.commands.serving import server
from scripts.commands.serving.flags import ServeFlags
from scripts.commands.serving.guard import Guard
from scripts.commands.serving.launch import server_of
from scripts.commands.shared_flags import CheckpointFlags
from tests.scripts.commands.serving.client import WAIT_S, Client
from tests.scripts.conftest import Place
from tests.toys import ROOT, ignoring


def started(trained: Place, ignores: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*ignoring(ignores),
         sys.executable, "-m", "scripts.meshloom", "serve", trained.model_dir, "--port=0",
         "--slots=1", "--max_length=7", "--simulate_devices=1"],
        cwd=ROOT, env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache"),
             "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_sigterm_before_it_listens_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "end_process", sys.exit)
    starting = types.SimpleNamespace(_loop=None, guard=types.SimpleNamespace(is_stopping=False))
    with pytest.raises(SystemExit, match="143"):
        server.Server.handle_exit(cast(server.Server, starting), signal.SIGTERM, None)


def test_a_second_sigterm_ends_the_server_at_once(trained: Place) -> None:
    with started(trained) as process, ThreadPoolExecutor(1) as pool:
        try:
            client = Client(announced_port(process))
            running = pool.submit(client.post, prompt="lo", n=128, max_tokens=4, min_tokens=4)
            until = time.monotonic() + WAIT_S
            while not client.metric("meshloom_new_tokens_total"):
                assert time.monotonic() < until
            process.send_signal(signal.SIGTERM)
            while client.get("/health").status == 200:
                assert time.monotonic() < until
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 128 + signal.SIGTERM
            assert isinstance(running.exception(), ConnectionError | http.client.HTTPException)
            assert process.stderr is not None and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_sigterm_ends_the_server_after_the_requests_that_run(trained: Place) -> None:
    # A shell ignores Ctrl-C for a job in the background of a script.
    with started(trained, ignores="INT") as process, ThreadPoolExecutor(1) as pool:
        try:
            client = Client(announced_port(process))
            assert client.get("/health").json == {"status": "ok"}
            running = pool.submit(
                client.post, prompt="lo", n=128, max_tokens=4, min_tokens=4, seed=1
            )
            until = time.monotonic() + WAIT_S
            while not client.metric("meshloom_new_tokens_total"):
                assert time.monotonic() < until
            assert not running.done()
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            while client.get("/health").status == 200:
                assert time.monotonic() < until
            assert client.post(prompt="lo").status == 503
            answer = running.result()
            assert answer.status == 200
            assert answer.json["usage"]["completion_tokens"] == 128 * 4
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_who_connected_before_the_end_is_answered(trained: Place) -> None:
    model = CheckpointFlags(model_dir=trained.folder / "run")
    flags = ServeFlags(model=model, slots=1, port=0, max_length=7, reload_s=0)
    clients = list[socket.socket]()
    with server_of(flags) as (server, listener):

        def connect_and_stop() -> None:
            """Runs in the event loop, which so accepts none of these connections before."""
            for _ in range(20):
                clients.append(socket.create_connection(listener.getsockname(), WAIT_S))
                clients[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            server.guard.is_stopping = server.should_exit = True

        server.on_start = connect_and_stop
        server.run([listener])
    for client in clients:
        with client, client.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 503 ")


def test_refused_requests_do_not_delay_the_end() -> None:
    async def drained_s() -> float:
        async def hang(*_: object) -> None:
            await asyncio.sleep(WAIT_S)

        guard = Guard(hang, paths=(), token=None, hosts=None, registry=CollectorRegistry())
        guard.is_stopping = True
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        refused = asyncio.create_task(guard(scope, hang, hang))  # its client reads nothing
        await asyncio.sleep(0.01)
        start = time.monotonic()
        await guard.drain(WAIT_S)
        refused.cancel()
        return time.monotonic() - start

    assert asyncio.run(drained_s()) < WAIT_S / 2


def test_a_request_that_the_end_cuts_off_gets_an_error_like_others() -> None:
    async def answer() -> list[Any]:
        async def hang(*_: object) -> None:
            await asyncio.sleep(WAIT_S)

        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        guard = Guard(hang, paths=(), token=None, hosts=None, registry=CollectorRegistry())
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        running = asyncio.create_task(guard(scope, hang, send))
        await asyncio.sleep(0.01)
        await guard.drain(time_s=0.01)
        running.cancel()
        await running
        return sent

    start, body = asyncio.run(answer())
    assert start["status"] == 503 and b"The server is stopping" in body["body"]
