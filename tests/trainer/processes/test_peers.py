"""Links between real processes: losses, failures, stalls and stopping together.

All groups of processes start together, as most of their time is waiting.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.launch_local import free_port
from tests.toys import ROOT
from trainer.processes import peers

WAIT_S = 60
PROGRAM = """
import sys, time
from configs.errors import RunError, UserError
from trainer.processes import peers
from trainer.processes.join import meet
address, count, index, timeout_s, what = sys.argv[1:]
try:
    links = meet(address, int(count), int(index), float(timeout_s))
except (UserError, RunError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
others = peers.Peers(int(index), links)
print("joined", flush=True)
exec(what)
"""
SLEEP = "time.sleep(100)"
STEPS = """
step = 0
while not (number := others.stop_signal(step := step + 1)):
    time.sleep(0.01 * (1 + int(index)))
    if index == "1" and step == 7:
        others.request_stop(15)
print("stopped at", step, "by", number, flush=True)
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


GATHER = """
for call in range(3):
    time.sleep(0.1 * (int(index) == call))
    print(others.gather([call, index]), flush=True)
others.leave()
"""
FAIL = 'others.fail(2, "no such file"); sys.exit(2)'
STALL = "others.stop_signal(4); time.sleep(2); others.stalled(); time.sleep(100)"
GROUPS: dict[str, Callable[[], Group]] = {
    "stop": lambda: Group.start(dict.fromkeys(range(4), STEPS)),
    "gather": lambda: Group.start(dict.fromkeys(range(3), GATHER)),
    "hub lost": lambda: Group.start(dict.fromkeys(range(3), SLEEP)),
    "other lost": lambda: Group.start(dict.fromkeys(range(3), SLEEP)),
    "failed": lambda: Group.start({0: SLEEP, 1: FAIL, 2: FAIL}),
    "failed alone": lambda: Group.start({0: SLEEP, 1: FAIL, 2: SLEEP}),
    "hub failed": lambda: Group.start({0: FAIL, 1: SLEEP}),
    "stalled": lambda: Group.start({0: STALL, 1: f"others.stop_signal(3); {SLEEP}"}),
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
    assert re.fullmatch(r"joined\nstopped at \d+ by 15\n", ends[0][1])


def test_all_get_what_each_gives(groups: dict[str, Group]) -> None:
    lines = [str([[call, str(index)] for index in range(3)]) for call in range(3)]
    for code, out, error in groups["gather"].ends().values():
        assert (code, out.splitlines()) == (0, ["joined", *lines]), error


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


@pytest.mark.parametrize(("name", "failed"), [("failed alone", 1), ("hub failed", 0)])
def test_a_failure_is_no_loss(groups: dict[str, Group], name: str, failed: int) -> None:
    ends = groups[name].ends()
    assert ends.pop(failed)[0] == 2
    for code, _, error in ends.values():
        assert (code, error) == (
            2, f"meshloom: process {failed} ended with exit code 2: no such file\n"
        )  # fmt: skip


def test_a_stall_shows_all_stacks_and_who_is_behind(groups: dict[str, Group]) -> None:
    for code, _, error in groups["stalled"].ends().values():
        assert code == 75
        assert error.lower().count("thread 0x") == 2
        assert error.endswith("process 1 is behind, at step 3; the others are at 4.\n")


def test_processes_are_listed_in_words() -> None:
    assert peers.join_names([2]) == "process 2"
    assert peers.join_names([3, 1, 2]) == "processes 1, 2, 3"


def test_a_stall_names_the_process_that_is_behind() -> None:
    text = peers.behind({0: 7, 1: 6}, 2)
    assert text.endswith("process 1 is behind, at step 6; the others are at 7.")
