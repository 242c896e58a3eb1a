"""Google Cloud Storage on this machine: an emulator, behind a proxy that fails as networks do."""

import contextlib
import dataclasses
import http.client
import http.server
import json
import logging
import random
import re
import threading
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from configs.paths import path_of
from tests.launch_local import free_port

BUCKET = "meshloom-tests"
FAULTS = ("429", "503", "cut before", "cut after")


@dataclasses.dataclass
class Cloud:
    """An emulated storage: what a process needs to know of it, and how often it fails."""

    emulator_port: int
    port: int
    rate: float = 0.0
    """Share of the requests that fail."""
    failures: int = 0
    chance: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))
    uploads: dict[str, Any] = dataclasses.field(default_factory=dict)
    writing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        address = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": address,  # of gcsfs and of Google's client
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google about the bucket
        }

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
        left_out = ("transfer-encoding", "connection", "content-length")
        sent = {k: v for k, v in dict(headers).items() if k.lower() not in left_out}
        with contextlib.closing(connection):
            connection.request(method, path, body, sent | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in left_out]
            return answer.status, kept, answer.read()

    def generation(self, name: str) -> str:
        """Number of the write that made an object; "0" where there is none."""
        quoted = urllib.parse.quote(name, safe="")
        status, _, body = self.forward("GET", f"/storage/v1/b/{BUCKET}/o/{quoted}")
        return json.loads(body)["generation"] if status == 200 else "0"

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Any:
        """Adds what the emulator lacks: moves, conditions on the generation and its header, and
        the last part of an upload that is sent twice.
        """
        move = re.fullmatch(r"(/storage/v1/b/([^/]+)/o/[^/]+)/moveTo/o/([^/?]+)(\?.*)?", path)
        if move:
            copied = self.forward("POST", f"{move[1]}/rewriteTo/b/{move[2]}/o/{move[3]}")
            self.forward("DELETE", move[1])
            return copied
        url = urllib.parse.urlsplit(path)
        if method == "GET" and "alt=media" in url.query:
            with self.writing:  # what is read belongs to the generation
                status, kept, content = self.forward(method, path, body, headers)
                name = urllib.parse.unquote(url.path.partition("/o/")[2])
                return status, [*kept, ("x-goog-generation", self.generation(name))], content
        if "upload_id=" in url.query:
            if path not in self.uploads:
                answer = self.forward(method, path, body, headers)
                if answer[0] != 200:  # 308: more parts are to come
                    return answer
                self.uploads[path] = answer
            return self.uploads[path]
        if method == "GET" or "ifGenerationMatch=" not in path:
            return self.forward(method, path, body, headers)
        query = urllib.parse.parse_qs(url.query)
        in_path = re.search(r"/o/([^/]+)$", url.path)
        in_body = re.search(rb'"name": ?"([^"]+)"', body)
        quoted = in_path[1] if in_path else query.get("name", [in_body and in_body[1].decode()])[0]
        with self.writing:
            if self.generation(urllib.parse.unquote(quoted)) != query["ifGenerationMatch"][0]:
                error = {"error": {"code": 412, "message": "conditionNotMet"}}
                return 412, [("Content-Type", "application/json")], json.dumps(error).encode()
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
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

    def body(self) -> bytes:
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
def running_cloud() -> Iterator[Cloud]:
    """Runs the emulator and the proxy in threads; this process uses them too."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    cloud = Cloud(free_port(), free_port())
    emulator = create_server(
        "127.0.0.1", cloud.emulator_port, in_memory=True, default_bucket=BUCKET
    )
    emulator.start()
    proxy = Server(("127.0.0.1", cloud.port), type("CloudProxy", (Proxy,), {"cloud": cloud}))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sending a large body", ResourceWarning)  # of gcsfs
        for name, value in cloud.environment.items():
            patch.setenv(name, value)
        path_of(f"gs://{BUCKET}/x")  # sets gcsfs up
        yield cloud
    proxy.shutdown()
    proxy.server_close()
    emulator.stop()
