"""Folders that appear whole or not at all."""

import numpy as np
import pytest

from configs.errors import RunError, UserError
from data import storage


def test_a_growing_array_is_an_ordinary_npy_file(tmp_path):
    parts = [np.full((n, 3), n, np.uint16) for n in (2, 0, 5)]
    with storage.GrowingArray(tmp_path / "x.npy", 3, np.uint16) as array:
        for part in parts:
            array.append(part)
    assert (np.load(tmp_path / "x.npy", mmap_mode="r") == np.concatenate(parts)).all()


def test_a_folder_appears_whole_and_replaces_the_old(tmp_path):
    for text in ("old", "new"):
        with storage.whole_folder(tmp_path / "x") as folder:
            (folder / "file").write_text(text)
            assert not (tmp_path / "x").exists() or (tmp_path / "x/file").read_text() == "old"
    assert (tmp_path / "x/file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("x"), RuntimeError])
def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    with storage.whole_folder(tmp_path / "x") as folder:
        (folder / "file").write_text("old")
    with (
        pytest.raises((KeyboardInterrupt, ValueError, RuntimeError)),
        storage.whole_folder(tmp_path / "x") as folder,
    ):
        (folder / "file").write_text("half")
        raise error
    assert (tmp_path / "x/file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_full_disk_and_forbidden_place_are_told_apart(tmp_path):
    full = pytest.raises(RunError, match=r"the disk is full; nothing half-written .*--data_dir")
    with full, storage.whole_folder(tmp_path / "x"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    (tmp_path / "file").write_text("")
    forbidden = pytest.raises(UserError, match=r"cannot be written: .*  Give another --data_dir")
    with forbidden, storage.lock(tmp_path / "file" / "x"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
