"""What a process writes while JAX's runtime aborts it."""

import subprocess
import sys

import pytest

from tests.toys import ROOT

PROGRAM = """
import ctypes, os, sys, threading, time
from trainer.processes.native_log import hide_lost_processes
hide_lost_processes()
print("from Python", file=sys.stderr)
os.write(2, b"E1122 20:13:36.704 829 coordination_service_agent.cc:289] Polled\\nof it\\n")
os.write(2, b"W1122 20:13:37.704 829 other.cc:28] kept\\n")
os.write(2, b"F1122 20:13:38.705 829 client.h:80] Ends\\n*** stack trace: ***\\n    @ 0x1\\n")
threading.Thread(target=ctypes.CDLL(None).abort).start()
time.sleep(0.5)
os._exit(int(sys.argv[1])) if len(sys.argv) > 1 else time.sleep(60)
"""


@pytest.mark.parametrize("code", [1, pytest.param(None, marks=pytest.mark.faults)])
def test_an_abort_waits_and_its_trace_is_hidden(code: int | None) -> None:
    arguments = [] if code is None else [str(code)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == (-6 if code is None else code)
    assert sorted(done.stderr.splitlines()) == [
        "W1122 20:13:37.704 829 other.cc:28] kept",
        "from Python",
    ]
