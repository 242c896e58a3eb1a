"""A plain client of a server, for tests."""

import contextlib
import dataclasses
import http.client
import json
import time
from typing import Any, NamedTuple

WAIT_S = 60
"""Far beyond what any answer takes: a server that hangs fails here."""


class Reply(NamedTuple):
    """An answer of the server."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclasses.dataclass(frozen=True)
class Client:
    """Sends requests to a port of this machine."""

    port: int
    token: str | None = None

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        if self.token is not None:
            headers = {"Authorization": f"Bearer {self.token}", **headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.read().decode())

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, **headers)

    def post(self, path: str = "/v1/completions", **fields: Any) -> Reply:
        return self.post_bytes(json.dumps(fields).encode(), path)

    def post_bytes(
        self, body: bytes, path: str = "/v1/completions", kind: str = "application/json"
    ) -> Reply:
        return self.send("POST", path, body, **{"Content-Type": kind})

    def metric(self, name: str) -> float:
        """Reads a metric: the sum over its labels."""
        lines = [line.split() for line in self.get("/metrics").text.splitlines()]
        return sum(float(value) for key, *_, value in lines if key.partition("{")[0] == name)

    def wait_until_it_listens(self) -> None:
        until = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                assert self.get("/health").status == 200
                return
            assert time.monotonic() < until
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        until = time.monotonic() + WAIT_S
        while self.metric("meshloom_slots_busy") or self.metric("meshloom_queue_length"):
            assert time.monotonic() < until
            time.sleep(0.01)
