"""Real processes that find each other, or do not."""

import contextlib
import socket
import threading
import time

import pytest

from configs.errors import RunError
from tests.launch_local import free_port
from tests.trainer.processes.test_peers import SLEEP, WAIT_S, Group, start
from trainer.processes.join import reach_hub
from trainer.processes.peers import Peers

NESTED = b"[" * 10_000 + b"\n"  # deeper than JSON is read


def test_who_does_not_come_is_named() -> None:
    group = Group.start(dict.fromkeys((0, 2), SLEEP), count=4, timeout_s=2)
    alone = Group.start({1: SLEEP}, count=2, timeout_s=1)
    for code, _, error in group.ends().values():
        assert code == 1
        assert (
            f"RunError: processes 1, 3 of 4 did not connect to {group.address} within 2 s." in error
        )
        assert "Connected: 0 (this host), 2 (" in error
    [(code, _, error)] = alone.ends().values()
    assert code == 1
    assert f"RunError: process 0 did not open {alone.address} within 1 s" in error


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 3), "was started with --process_count=3, process 0 with 2."),
        ((3, 3, 3), "--process_index=1 was given to two processes, on"),
    ],
)
def test_processes_that_contradict_each_other_are_refused(
    counts: tuple[int, ...], message: str
) -> None:
    address = f"localhost:{free_port()}"
    processes = [start(address, n, min(i, 1), 20, SLEEP) for i, n in enumerate(counts)]
    for process in processes:
        _, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1 and "UserError: " in error and message in error


def test_what_is_no_process_of_the_run_is_let_go() -> None:
    group = Group.start({0: "others.leave()"}, count=2)
    host, port = group.address.split(":")
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'"joined"\n', b"", NESTED):
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
                    stranger.sendall(text)
                break
            except ConnectionRefusedError:  # it has not begun to listen
                time.sleep(0.05)
    group.processes[1] = start(group.address, 2, 1, 20, "others.leave()")
    assert [code for code, _, _ in group.ends().values()] == [0, 0]


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 400 Bad request\r\n\r\n", b"7\n", b'["ready"]\n', NESTED]
)
def test_another_program_at_the_address_is_reported(answer: bytes) -> None:
    def serve() -> None:
        with contextlib.suppress(OSError):  # the test ends
            while True:
                with server.accept()[0] as client:
                    client.sendall(answer)
                    client.recv(1 << 10)

    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(RunError, match=r"within 1 s \(another program answers there\)"):
            reach_hub(address, count=2, index=1, timeout_s=1)


def test_what_comes_together_with_the_start_is_not_lost() -> None:
    with socket.create_server(("localhost", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            clients.append(client)
            client.recv(1 << 10)
            client.sendall(b'["ready", "host"]\n["gathered", [5, 6]]\n["all_left"]\n')

        clients = list[socket.socket]()
        threading.Thread(target=serve, daemon=True).start()
        link = reach_hub(f"localhost:{server.getsockname()[1]}", count=2, index=1, timeout_s=WAIT_S)
        assert link.unread == [["gathered", [5, 6]], ["all_left"]]
        others, gathered = Peers(1, {0: link}), list[list[int]]()
        call = threading.Thread(target=lambda: gathered.append(others.gather(6)), daemon=True)
        call.start()
        call.join(WAIT_S / 10)
        assert gathered == [[5, 6]]
        others.leave()
        clients[0].close()
