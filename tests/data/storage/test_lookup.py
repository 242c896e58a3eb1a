"""Names and sizes of files."""

import os
import threading
from pathlib import Path

import pytest

from configs.errors import UserError
from data.storage import lookup


def test_sizes_are_of_the_files_that_are_still_there(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("1")
    (tmp_path / "link").symlink_to("removed")
    assert list(lookup.sizes_below(tmp_path)) == [("kept", 1)]


def test_a_device_is_refused_except_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), Path("/dev/full"), tmp_path / "zeros"):
        with pytest.raises(UserError, match=r"mine: is a device.  Legal: a file or a pipe"):
            lookup.open_to_read("mine", path)
    assert lookup.read_bytes("mine", Path("/dev/null")) == b""


def test_a_fifo_is_read_and_says_that_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(b"one\n",))
    writer.start()
    assert lookup.read_bytes("mine", fifo) == b"one\n"
    writer.join()
    assert "mine: is a FIFO; waits for a process that writes to it." in caplog.messages
