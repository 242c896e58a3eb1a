"""What a process writes, and how it ends, while JAX's runtime aborts it."""

import subprocess
import sys

import pytest

from tests.toys import ROOT

PROGRAM = """
import ctypes, os, sys, threading, time
from trainer.processes.native_log import hide_lost_processes
hide_lost_processes()
print("from Python", file=sys.stderr)
os.write(2, b"W1122 20:13:37.704 829 other.cc:28] kept\\n")
exec(sys.argv[1])
threading.Thread(target=ctypes.CDLL(None).abort).start()
time.sleep(60)
"""
LOST = r"""
os.write(2, b"E1122 20:13:36.704 829 coordination_service_agent.cc:289] Polled\nof it\n")
os.write(2, b"F1122 20:13:38.705 829 client.h:80] Ends.  absl::Status: UNAVAILABLE: Tasks\n")
os.write(2, b"3\nRPC: /xla\n*** Check failure stack trace: ***\n    @ 0x1 absl::Flush()\n")
"""


def run(what: str) -> tuple[int, list[str]]:
    """The exit code, and the lines on the standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done.returncode, sorted(done.stderr.splitlines())


def test_what_the_runtime_says_of_a_loss_becomes_one_line() -> None:
    code, lines = run(LOST)
    assert code == 1
    assert lines[0] == "W1122 20:13:37.704 829 other.cc:28] kept" and lines[1] == "from Python"
    [line] = lines[2:]
    assert line.startswith("meshloom: JAX lost another process: Tasks 3.  Start all processes")


@pytest.mark.faults
def test_any_other_abort_is_one() -> None:
    other = r'os.write(2, b"F1122 20:13:38.705 829 other.cc:8] Check failed\n")'
    code, lines = run(other)
    assert code == -6
    assert "F1122 20:13:38.705 829 other.cc:8] Check failed" in lines


ABORTS = """
import ctypes, os, sys, threading
from trainer.processes.native_log import name_layout_of_abort
name_layout_of_abort("layout other")
name_layout_of_abort("layout fsdp")
abort = ctypes.CDLL(None).abort
os.write(2, b"F1122 20:13:38.705 829 spmd_partitioner.cc:562] Check failed\\n")
if sys.argv[1] == "thread":
    threading.Thread(target=abort).start()
    threading.Event().wait()
abort()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_an_abort_ends_with_the_layout(where: str) -> None:
    command = [sys.executable, "-c", ABORTS, where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == -6
    assert done.stderr.splitlines()[-1].startswith(
        "meshloom: this process aborted under layout fsdp."
    )
