"""Errors end in one line and an exit code that says whose mistake they are."""

import errno
import subprocess
import sys

import numpy as np
import pytest

from configs.errors import RunError, UserError
from scripts.exits import escape, report


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("Run: 2 problems.\n  One.\n  Two."), 2, "Run: 2 problems.\n  One.\n  Two."),
        (UserError("--rows=1\n2: legal are numbers"), 2, "--rows=1\\n2: legal are numbers"),
        (UserError("no \x1b[31m"), 2, "no \\x1b[31m"),
        (RunError("the save failed"), 1, "the save failed"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "x: File name too long."),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device."),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), 1,
         "/tmp/x: the disk has no inodes left"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 42252 bytes."), 2,
         "out of memory: 42,252 bytes more are needed.  Choose"),
        (RuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes."),
         2, "out of memory: 9 bytes more are needed"),
        (MemoryError(), 2, "out of memory.  Choose"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error)[0] == code
    assert capsys.readouterr().err.startswith(f"meshloom: {line}")


def test_what_numpy_cannot_allocate_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 58, np.uint8)
    assert report(caught.value)[0] == 2
    assert "out of memory: 256. PiB more are needed" in capsys.readouterr().err


def test_control_characters_of_a_message_are_escaped() -> None:
    assert escape("no file \x1b[31m\n  named that") == "no file \\x1b[31m\n  named that"


def test_a_thread_that_waits_without_end_does_not_keep_a_failed_command() -> None:
    """As those of Orbax after a save that could not begin."""
    code = """
import threading
from scripts import cli, meshloom
from configs.errors import RunError

def fail(**kwargs):
    threading.Thread(target=threading.Event().wait).start()
    raise RunError("the save failed")

cli.cli.main = fail
meshloom.time.sleep = lambda seconds: None
meshloom.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "meshloom: the save failed\n")
