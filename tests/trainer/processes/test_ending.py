"""A process that ends at once, whatever its other threads do."""

import os
import subprocess
import sys

from tests.toys import ROOT
from trainer.processes.ending import STALLED

PROGRAM = """
import atexit, threading, time
from trainer.processes.ending import dump_stacks, end_process
def wait_for_ever(): time.sleep(1000)
threading.Thread(target=wait_for_ever).start()
atexit.register(print, "unwound")
print("before")
dump_stacks()
try:
    end_process(75, "no step ended.")
finally:
    print("unwound")
"""


def test_a_process_prints_why_and_ends_without_unwinding() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == STALLED and done.stdout == "before\n"
    assert "wait_for_ever" in done.stderr
    assert done.stderr.endswith("meshloom: no step ended.\n")


def test_a_process_whose_output_nobody_reads_ends_as_well() -> None:
    """As after `train 2>&1 | tee log`, where tee was killed."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        command = [sys.executable, "-c", PROGRAM.replace('print("before")', "")]
        done = subprocess.run(command, cwd=ROOT, stdout=closed, stderr=closed, timeout=60)
    assert done.returncode == STALLED
