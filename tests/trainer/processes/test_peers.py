"""Links between real processes: meeting, losses, failures, stalls and stopping together.

All groups of processes start together, as most of their time is waiting.
"""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from scripts.launch_local import free_port
from tests.toys import ROOT
from trainer.processes import peers

WAIT_S = 60
PROGRAM = """
import sys, time
from configs.errors import RunError, UserError
from trainer.processes import peers
address, count, index, timeout_s, what = sys.argv[1:]
try:
    links = peers.meet(address, int(count), int(index), float(timeout_s), print)
except (UserError, RunError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
others = peers.Peers(int(index), links)
print("joined", flush=True)
exec(what)
"""
SLEEP = "time.sleep(100)"
STEPS = """
step = 0
while not others.should_stop(step := step + 1):
    time.sleep(0.01 * (1 + int(index)))
    if index == "1" and step == 7:
        others.request_stop()
print("stopped at", step, flush=True)
others.leave()
"""


@dataclasses.dataclass
class Group:
    """Some of the processes of a run, by their index."""

    address: str
    processes: dict[int, "subprocess.Popen[str]"]

    @classmethod
    def start(
        cls, whats: dict[int, str], count: int | None = None, timeout_s: float = 30
    ) -> "Group":
        address = f"localhost:{free_port()}"
        places = [(address, count or len(whats), i, timeout_s, what) for i, what in whats.items()]
        return cls(address, {place[2]: start(*place) for place in places})

    def kill(self, index: int) -> None:
        """Kills a process, after all have joined."""
        for process in self.processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
        self.processes[index].send_signal(signal.SIGKILL)

    def ends(self) -> dict[int, tuple[int, str, str]]:
        """Exit code, output and errors of each process."""
        ends = {}
        for index, process in self.processes.items():
            out, error = process.communicate(timeout=WAIT_S)
            ends[index] = (process.returncode, out, error)
        return ends


def start(
    address: str, count: int, index: int, timeout_s: float, what: str
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, address, str(count), str(index), str(timeout_s), what]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


FAIL = 'others.fail(2, "no such file"); sys.exit(2)'
STALL = "others.should_stop(4); time.sleep(2); others.stalled(); time.sleep(100)"
GROUPS: dict[str, Callable[[], Group]] = {
    "stop": lambda: Group.start(dict.fromkeys(range(4), STEPS)),
    "hub lost": lambda: Group.start(dict.fromkeys(range(3), SLEEP)),
    "other lost": lambda: Group.start(dict.fromkeys(range(3), SLEEP)),
    "failed": lambda: Group.start({0: SLEEP, 1: FAIL, 2: FAIL}),
    "stalled": lambda: Group.start({0: STALL, 1: f"others.should_stop(3); {SLEEP}"}),
    "missing": lambda: Group.start(dict.fromkeys((0, 2), SLEEP), count=4, timeout_s=2),
    "no hub": lambda: Group.start({1: SLEEP}, count=2, timeout_s=1),
}


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, Group]]:
    groups = {name: make() for name, make in GROUPS.items()}
    groups["hub lost"].kill(0)
    groups["other lost"].kill(2)
    yield groups
    for group in groups.values():
        for process in group.processes.values():
            process.kill()
            process.communicate()


def test_all_stop_in_the_same_step(groups: dict[str, Group]) -> None:
    ends = groups["stop"].ends()
    assert [code for code, _, _ in ends.values()] == [0] * 4
    assert len({out for _, out, _ in ends.values()}) == 1
    assert re.fullmatch(r"joined\nstopped at \d+\n", ends[0][1])


@pytest.mark.parametrize(("name", "lost"), [("hub lost", 0), ("other lost", 2)])
def test_a_lost_process_is_named_at_once(groups: dict[str, Group], name: str, lost: int) -> None:
    ends = groups[name].ends()
    assert ends.pop(lost)[0] == -signal.SIGKILL
    for code, _, error in ends.values():
        [line] = error.splitlines()
        assert code == 1
        assert line.startswith(f"meshloom: process {lost} on ") and "is lost.  Start all" in line


def test_a_failure_ends_the_processes_that_do_not_fail_alike(groups: dict[str, Group]) -> None:
    ends = groups["failed"].ends()
    assert [code for code, _, _ in ends.values()] == [2] * 3
    assert re.search("process [12] ended with exit code 2: no such file", ends[0][2])
    assert ends[1][2] == ends[2][2] == ""


def test_a_stall_shows_all_stacks_and_who_is_behind(groups: dict[str, Group]) -> None:
    for code, _, error in groups["stalled"].ends().values():
        assert code == 75
        assert error.lower().count("thread 0x") == 2
        assert error.endswith("process 1 is behind, at step 3; the others are at 4.\n")


def test_who_does_not_come_is_named(groups: dict[str, Group]) -> None:
    group = groups["missing"]
    for code, _, error in group.ends().values():
        assert code == 1
        assert f"RunError: processes 1, 3 of 4 did not come to {group.address} within 2 s." in error
        assert "There are: 0 (this host), 2 (" in error
    [(code, _, error)] = groups["no hub"].ends().values()
    assert code == 1
    assert f"RunError: process 0 did not come to {groups['no hub'].address} within 1 s" in error


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
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'"joined"\n', b""):
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


def test_lists_of_processes() -> None:
    assert peers.names({3, 1}) == "processes 1, 3"
