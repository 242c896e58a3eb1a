"""A failed write: what it means."""

import pytest

from configs.errors import RunError, UserError
from data.storage import locks
from data.storage.folders import whole_folder


def test_a_full_disk_and_a_forbidden_place_are_different_errors(tmp_path):
    full = pytest.raises(RunError, match=r"the disk is full; nothing half-written .*--data_dir")
    with full, whole_folder(tmp_path / "x"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    (tmp_path / "file").write_text("")
    forbidden = pytest.raises(UserError, match=r"cannot be written: .*  Give another --data_dir")
    with forbidden, locks.lock(tmp_path / "file" / "x"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
