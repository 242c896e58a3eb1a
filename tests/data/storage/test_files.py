"""Files that appear whole or not at all."""

import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import RunError, UserError
from data.storage import lookup
from data.storage.files import (
    WorkingFolder,
    atomic_open,
    atomic_path,
    atomic_write,
    check_output,
    write_errors,
)
from data.storage.folders import lock, whole_folder
from tests.toys import ROOT


def test_a_file_is_replaced_in_one_go(tmp_path):
    path = tmp_path / "x"
    for content in ("old", b"new", "\u00e4\n"):
        atomic_write(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    with atomic_open(path) as file:
        file.write("half")
        file.flush()
        assert path.read_text(encoding="utf-8") == "\u00e4\n"
        [other] = (name for name in tmp_path.iterdir() if name != path)
        with atomic_path(path) as temporary:
            assert temporary not in (other, path)  # two writers do not share a file
            temporary.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "half" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("x"), OSError("x")])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    atomic_write(tmp_path / "x", "old")
    with (
        pytest.raises((KeyboardInterrupt, UserError, OSError)),
        atomic_open(tmp_path / "x") as file,
    ):
        file.write("half")
        raise error
    assert (tmp_path / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_device_and_a_link_stay_what_they_are(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to("real")
    for name in ("null", "link"):
        atomic_write(tmp_path / name, "new")
        with atomic_open(tmp_path / name) as file:
            file.write("newer")
        assert (tmp_path / name).is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (tmp_path / "real").read_text() == "newer"
    with pytest.raises(OSError, match="No space left"):
        atomic_write(Path("/dev/full"), "x")
    assert {p.name for p in tmp_path.iterdir()} == {"null", "link", "real"}


def test_a_fifo_is_written_directly(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_open(tmp_path / "fifo") as file:
            file.write("text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_the_standard_output_is_continued(tmp_path):
    script = (
        "from pathlib import Path\nfrom data.storage.files import atomic_open\nprint('first')\n"
        "for name in ('/dev/stdout', '/dev/fd/1', '/proc/self/fd/1'):\n"
        "    with atomic_open(Path(name)) as file:\n        file.write(name + '\\n')\n"
        "print('last')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=out, check=True)
    lines = ["first", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "last"]
    assert (tmp_path / "out").read_text().splitlines() == lines


def test_the_mode_of_a_file_stays(tmp_path):
    atomic_write(tmp_path / "x", "old")
    (tmp_path / "x").chmod(0o600)
    atomic_write(tmp_path / "x", "new")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("")
    for name, problem in {
        tmp_path: "it is a folder",
        tmp_path / "none" / "x": "there is no folder .*none",
        tmp_path / "file" / "x": "there is no folder .*file",
        tmp_path / "circle": "cannot be written",
        tmp_path / ("x" * 256): "File name too long",
        str(tmp_path / "a\0b"): "null (byte|character)",  # in the words of each Python
        "": "is empty",
        f"{tmp_path}/folder/": "ends in /",
    }.items():
        with pytest.raises(UserError, match=problem):
            check_output(name)
    assert {p.name for p in tmp_path.iterdir()} == {"circle", "file"}
    longest = tmp_path / ("\u00e4" * 127)
    atomic_write(longest, "x")
    assert longest.read_text() == "x"


def test_files_grow_here_and_are_uploaded(there: Path) -> None:
    (there / "old").write_text("1\n")
    with WorkingFolder(there) as folder:
        folder.fetch("old", "absent")
        with (folder.path / "old").open("a") as file:
            file.write("2\n")
        folder.upload()
        assert (there / "old").read_text() == "1\n2\n"
        (folder.path / "events").mkdir()
        (folder.path / "events/new").write_text("3\n")
        (folder.path / "latest").symlink_to("removed")  # as wandb does
    assert dict(lookup.sizes_below(there)) == {"events/new": 2, "old": 4}
    assert not folder.path.exists()


def test_a_full_disk_and_a_forbidden_place_are_different_errors(tmp_path):
    full = pytest.raises(RunError, match=r"the disk is full.*; no partial file .*--data_dir")
    with full, whole_folder(tmp_path / "x"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    (tmp_path / "file").write_text("")
    forbidden = pytest.raises(UserError, match=r"cannot be written: .*  Give another --data_dir")
    with forbidden, lock(tmp_path / "file" / "x"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_disk_without_inodes_is_not_called_full(tmp_path, monkeypatch):
    found = os.statvfs(tmp_path)
    used_up = os.statvfs_result([*found[:6], 0, 0, *found[8:]])
    monkeypatch.setattr(os, "statvfs", lambda path: used_up)
    missing = OSError(errno.ENOSPC, "No space left on device")
    words = r"x: the disk has no inodes left: it holds [\d,]+ files"
    with pytest.raises(RunError, match=words), write_errors(tmp_path / "x"):
        raise missing


def test_a_file_that_cannot_be_created_beside_free_space_lacks_an_inode(tmp_path):
    """Nothing half-written is left, and so an inode is free again."""
    created = OSError(errno.ENOSPC, "No space left on device", "x")
    with pytest.raises(RunError, match="no inodes left"), write_errors(tmp_path / "x"):
        raise created


def test_a_limit_on_the_size_of_files_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*large\.txt"):
            atomic_write(tmp_path / "large.txt", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
