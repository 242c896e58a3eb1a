"""Functions in a child process: what comes back, and what its end leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.errors import UserError
from layouts.absent_devices import has_compiler
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from tests.trainer.planning.runs import RUNS
from trainer.planning.child import CompilerAborted, describe_abort, in_child
from trainer.planning.training import plan_compiled

PARENT = "import time; from trainer.planning.child import in_child; in_child(time.sleep, 600)"


def test_a_result_and_an_error_come_back() -> None:
    assert in_child(Topology.named, name="v3:2x2") == Topology.named("v3:2x2")
    with pytest.raises(UserError, match="unknown chip 'v9'") as error:
        in_child(Topology.named, "v9:2x2")
    assert type(error.value) is UserError


def test_an_abort_becomes_one_line() -> None:
    with pytest.raises(CompilerAborted, match=r"^the compiler aborts \(SIGABRT\)\.  Choose"):
        in_child(os.abort)


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
def test_an_abort_of_the_tpu_compiler_ends_no_test() -> None:
    """No slice of v5e has 32 chips in a row; libtpu makes its devices, and aborts on a program."""
    topology, layout = Topology.named("v5e:32x32"), Layout(mesh="data:1024", rules="")
    with pytest.raises(CompilerAborted, match=r"SIGABRT\): Check failed: "):
        in_child(plan_compiled, RUNS["dense"], layout, {"data": 1024}, topology)


def test_a_line_gives_the_reason() -> None:
    log = "W1123 02:59:01 7 a.cc:9] Slow\nF1123 02:59:01 7 a.cc:9] Check failed: x > 0\n  @ 0x7f\n"
    text = describe_abort(-11, log)
    assert text.startswith("the compiler aborts (SIGSEGV): Check failed: x > 0  ")
    assert "\n" not in text
    freed = describe_abort(-6, "WARNING: All log messages\nrealloc(): invalid pointer\n")
    assert freed.startswith("the compiler aborts (SIGABRT): realloc(): invalid pointer  ")
    assert describe_abort(-9, "").startswith("the compiler aborts (SIGKILL, as where memory")


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        deadline_s = time.monotonic() + 120
        while len(started := children(parent.pid)) < 2:  # the other one tracks semaphores
            assert parent.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
