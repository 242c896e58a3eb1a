"""A run alone in which nothing moves."""

import subprocess
import sys

from tests.toys import ROOT

PROGRAM = """
import time
from types import SimpleNamespace
from trainer.processes.watchdog import Watchdog

def wait_for_data():
    time.sleep(60)

run = SimpleNamespace(stall_minutes=0.5 / 60)
watchdog = Watchdog()
watchdog.on_compiled(SimpleNamespace(run=run))
for step in range(1, 9):
    time.sleep(0.1)
    watchdog.on_step(SimpleNamespace(step=step))
print("moved", flush=True)
wait_for_data()
"""


def test_a_stall_shows_where_each_thread_is_and_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (75, "moved\n")
    assert "in wait_for_data" in done.stderr and "in _watch" in done.stderr
    assert done.stderr.endswith("within Run.stall_minutes: the last one that did is 8.\n")
