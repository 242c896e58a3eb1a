"""Several processes on this machine: their places, their output, their exit codes."""

import subprocess
import sys

import pytest

from tests.toys import ROOT

PLACE = (
    "import os, sys; print(*(os.environ['MESHLOOM_' + name] for name in "
    "('DISTRIBUTED', 'PROCESS_COUNT', 'PROCESS_INDEX')), flush=True)"
)


def launch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.launch_local", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_each_process_knows_its_place() -> None:
    done = launch("3", "--", sys.executable, "-c", PLACE)
    assert (done.returncode, done.stdout) == (0, "manual 3 0\n")
    assert sorted(done.stderr.splitlines()) == ["[1] manual 3 1", "[2] manual 3 2"]


def test_the_first_failure_is_the_exit_code() -> None:
    program = "import os, sys; sys.exit(7 * int(os.environ['MESHLOOM_PROCESS_INDEX']))"
    assert launch("3", "--", sys.executable, "-c", program).returncode == 7


@pytest.mark.parametrize("arguments", [(), ("2",), ("two", "--", "ls"), ("0", "--", "ls")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = launch(*arguments)
    assert done.returncode == 2 and done.stderr.startswith("Usage: ")


def test_a_command_that_is_not_there() -> None:
    done = launch("2", "--", "no-such-command")
    assert done.returncode == 2 and done.stderr == "no-such-command: No such file or directory\n"
