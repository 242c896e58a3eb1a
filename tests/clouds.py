"""Remote storage on this machine: emulators, behind a proxy that fails as networks do."""

import contextlib
import dataclasses
import http.client
import http.server
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from configs.paths import path_of

BUCKET = "meshloom-tests"
FAULTS = ("429", "503", "cut before", "cut after")

on_both = pytest.mark.parametrize("cloud", ["gs", "s3"], indirect=True)
"""For tests of what the two do differently."""


@dataclasses.dataclass
class Cloud:
    """An emulated storage: what a process needs to know of it, and how often it fails."""

    scheme: ClassVar[str]
    emulator_port: int
    port: int
    rate: float = 0.0
    """Share of the requests that fail."""
    failures: int = 0
    chance: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Where a process finds it."""
        raise NotImplementedError

    @contextlib.contextmanager
    def used(self) -> Iterator["Cloud"]:
        """This process, and those that it starts, use it."""
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending a large body", ResourceWarning)  # of gcsfs
            for name, value in self.environment.items():
                patch.setenv(name, value)
            path_of(f"{self.scheme}://{BUCKET}/x")  # sets fsspec up
            yield self

    def fault(self) -> str | None:
        if self.chance.random() >= self.rate:
            return None
        self.failures += 1
        return self.chance.choice(FAULTS)

    def forward(
        self, method: str, path: str, body: bytes = b"", headers: Any = ()
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and body that the emulator answers with."""
        connection = http.client.HTTPConnection("127.0.0.1", self.emulator_port, timeout=60)
        left_out = {"transfer-encoding", "connection", "content-length", "expect"}
        sent = {k: v for k, v in dict(headers).items() if k.lower() not in left_out}
        with contextlib.closing(connection):
            connection.request(method, path, body, sent | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            if method == "HEAD":  # it is the size of the object
                left_out.remove("content-length")
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in left_out]
            return answer.status, kept, answer.read()

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Any:
        """What the storage answers, where the emulator lacks something."""
        return self.forward(method, path, body, headers)


class Proxy(http.server.BaseHTTPRequestHandler):
    """Hands requests on to the emulator, or fails."""

    cloud: Cloud

    def handle_any(self) -> None:
        fault = self.cloud.fault()
        body = self.body()
        if fault == "cut before":
            return
        if fault in ("429", "503"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status, headers, content = self.cloud.answer(self.command, self.path, body, self.headers)
        if fault == "cut after":
            return
        self.send_response(status)
        for name, value in headers:
            if name.lower() == "location":  # of an upload in parts
                value = value.replace(str(self.cloud.emulator_port), str(self.cloud.port))
            self.send_header(name, value)
        if "content-length" not in [name.lower() for name, _ in headers]:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

    def body(self) -> bytes:
        if self.headers.get("Expect") == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, address: Any) -> None:
        """A process that was killed waits for no answer."""


@contextlib.contextmanager
def proxy(cloud: Cloud) -> Iterator[None]:
    """Runs the proxy in threads."""
    server = Server(("127.0.0.1", cloud.port), type("CloudProxy", (Proxy,), {"cloud": cloud}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()
