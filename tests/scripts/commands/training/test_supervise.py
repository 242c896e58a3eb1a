"""A supervisor of a command that fails in the ways of a training."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.toys import ROOT, ignoring

# Each start ends with the next of the codes; one with a "+" saves a checkpoint before, and one with
# a "0" in front has begun at a local checkpoint.
PROGRAM = """
import os, pathlib, sys
folder, codes = pathlib.Path(sys.argv[1].partition("=")[2]), sys.argv[2:]
starts = folder / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
code = codes[number]
if code.startswith("+"):
    (folder / "checkpoints" / str(10 * (number + 1))).mkdir(parents=True)
if len(code) == 2 and code[0] == "0":
    (folder / "history.jsonl").write_text('{"step": %d}\\n' % (15 + number))
if int(code) < 0:
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""


def supervised(folder: Path, *command: str, ignores: str = "") -> "subprocess.Popen[str]":
    supervisor = [
        *ignoring(ignores),
        sys.executable, "-m", "scripts.meshloom", "supervise", "--backoff_s=0.01", "--",
    ]  # fmt: skip
    return subprocess.Popen(
        [*supervisor, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("codes", "starts", "code", "line"),
    [
        (["1", "75", "0"], 3, 0, "Exit code 75 before the first checkpoint; restarting in"),
        (["2", "0"], 1, 2, ""),
        (["-15", "0"], 1, 143, ""),
        (["-9", "0"], 2, 0, "Exit code 137 before the first checkpoint; restarting in"),
        (["1", "1", "1", "0"], 3, 1, "Failed 3 times before the first checkpoint: not restarting"),
        (["1", "1", "+75", "1", "1", "0"], 5, 1, "Failed 3 times after step 30: not restarting"),
        (["+1", "1", "01", "01", "01", "0"], 6, 0, "Exit code 1 after step 10; restarting in"),
        (["1", "+1", "+75", "1", "0"], 5, 0, "Exit code 1 after step 30; restarting in"),
    ],
)
def test_failures_and_stalls_are_restarted(
    tmp_path: Path, codes: list[str], starts: int, code: int, line: str
) -> None:
    program = [sys.executable, "-c", PROGRAM, f"--model_dir={tmp_path}", *codes]
    process = supervised(tmp_path, *program)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert line in error
    assert len((tmp_path / "starts").read_text()) == starts


def test_a_signal_goes_to_the_command_which_is_not_restarted(tmp_path: Path) -> None:
    program = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
    process = supervised(tmp_path, sys.executable, "-c", program, str(tmp_path / "started"))
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 1


def test_an_ignored_signal_does_not_end_the_restarts(tmp_path: Path) -> None:
    program = """
import pathlib, sys, time
started, goes = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
if started.exists():
    sys.exit(0)
started.touch()
while not goes.exists():
    time.sleep(0.01)
sys.exit(1)
"""
    started, goes = tmp_path / "started", tmp_path / "goes"
    command = [sys.executable, "-c", program, str(started), str(goes)]
    process = supervised(tmp_path, *command, ignores="HUP")
    while not started.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    goes.touch()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Exit code 1 before the first checkpoint" in error


def test_nothing_to_supervise(tmp_path: Path) -> None:
    process = supervised(tmp_path)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and error.startswith("meshloom: no command.")
    process = supervised(tmp_path, "no-such-command")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error == "meshloom: no-such-command: No such file or directory.\n"
