"""What a server with a token and little time refuses."""

import json
import socket
from collections.abc import Iterator

import pytest

from scripts.commands.serving import server
from tests.scripts.commands.serving.client import Client
from tests.scripts.commands.serving.servers import serving
from tests.scripts.conftest import Place

LONG = {"prompt": "lo", "n": 128, "max_tokens": 12, "min_tokens": 12}


@pytest.fixture(scope="module")
def client(trained: Place) -> Iterator[Client]:
    limits = {"slots": 1, "max_length": 15, "time_limit_s": 0.05, "token": "secret"}
    with serving(trained.folder / "run", **limits) as client:
        yield Client(client.port, "secret")


def test_an_answer_that_takes_too_long_is_given_up(client: Client) -> None:
    answer = client.post(**LONG)
    assert answer.status == 504 and "after 0.05 s" in answer.json["error"]["message"]
    client.wait_until_idle()  # its slots are free
    stream = client.post(**LONG, stream=True)
    *_, last = [line for line in stream.text.splitlines() if line]
    assert stream.status == 200 and json.loads(last[6:])["error"]["code"] == 504
    client.wait_until_idle()
    assert client.post(prompt="lo", max_tokens=1).status == 200


def test_a_body_that_takes_too_long_is_given_up(client: Client) -> None:
    head = [
        "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Length: 20",
        "Content-Type: application/json", "Authorization: Bearer secret", "", '{"prompt": ',
    ]  # fmt: skip
    with socket.create_connection(("127.0.0.1", client.port)) as slow:
        slow.sendall("\r\n".join(head).encode())
        assert slow.recv(99).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_takes_too_long_is_given_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port)) as slow:
        slow.sendall(ask + ask[:9])  # a whole request, and a part of the next one
        while not slow.recv(999).endswith(b"}"):
            pass
        monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
        assert slow.recv(1) == b""


def test_a_client_that_reads_nothing_is_given_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
    with (
        socket.create_connection(("127.0.0.1", client.port), timeout=10) as silent,
        pytest.raises(ConnectionError),  # not TimeoutError
    ):
        while True:
            silent.sendall(ask * 100)


def test_a_request_needs_the_token(client: Client) -> None:
    for token in (None, "secre", "secret2", "sécret"):
        for path in ("/v1/models", "/metrics"):
            assert Client(client.port, token).get(path).status == 401
        assert Client(client.port, token).post(prompt="lo").status == 401
        assert Client(client.port, token).get("/health").status == 200
    assert client.get("/v1/models", Host="its.name.example").status == 200
    small = {"Authorization": "bearer secret"}  # the case of a scheme means nothing
    assert Client(client.port, None).get("/v1/models", **small).status == 200
