"""A failed write: what it means."""

import errno
import os

import pytest

from configs.errors import RunError, UserError
from data.storage import locks
from data.storage.errors import write_errors
from data.storage.folders import whole_folder


def test_a_full_disk_and_a_forbidden_place_are_different_errors(tmp_path):
    full = pytest.raises(RunError, match=r"the disk is full.*; nothing half-written .*--data_dir")
    with full, whole_folder(tmp_path / "x"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    (tmp_path / "file").write_text("")
    forbidden = pytest.raises(UserError, match=r"cannot be written: .*  Give another --data_dir")
    with forbidden, locks.lock(tmp_path / "file" / "x"):
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
