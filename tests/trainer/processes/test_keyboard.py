"""Ctrl-C in real processes whose main threads do what cannot be interrupted."""

import signal
import subprocess
import sys
import time

import pytest

from tests.toys import ROOT, ignoring

PROGRAM = """
import hashlib, sys, time
from trainer.processes import keyboard
keyboard.end_on_interrupt()
print("ready", flush=True)
exec(sys.argv[1])
"""
NATIVE = "hashlib.pbkdf2_hmac('sha512', b'', b'', 10**9)"  # minutes, without the lock of Python
CALLBACK = """
class Noisy:
    def __del__(self):
        time.sleep(60)
x = Noisy()
del x
time.sleep(60)
"""
SWALLOWED = """
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""
CLEANED = """
try:
    time.sleep(60)
finally:
    print("cleaned", flush=True)
    keyboard.end_process(130)
"""


@pytest.mark.parametrize(
    ("program", "output"), [(NATIVE, ""), (CALLBACK, ""), (SWALLOWED, ""), (CLEANED, "cleaned\n")]
)
def test_ctrl_c_ends_the_process_in_two_seconds(program: str, output: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, program],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    sent_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert time.monotonic() - sent_at < 2
    assert (process.returncode, out, error) == (130, output, "")


def test_ctrl_c_stays_ignored_in_a_background_job() -> None:
    """A shell starts a job of a script (`command &`) with SIGINT ignored."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    command = [*ignoring("INT"), sys.executable, "-c", PROGRAM, program]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\nalive\n", "")


def test_an_import_ends_before_ctrl_c_is_raised() -> None:
    code = (
        "import os, signal\n"
        "from trainer.processes import keyboard\n"
        "keyboard.end_on_interrupt()\n"
        "try:\n"
        "    with keyboard.interrupted_after_import():\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        print('imported', flush=True)\n"
        "    print('went on', flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["imported", "interrupted"]
