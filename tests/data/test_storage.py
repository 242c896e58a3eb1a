"""Files and folders that appear whole or not at all."""

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


def test_a_file_is_replaced_in_one_go(tmp_path):
    path = tmp_path / "x"
    for content in ("old", b"new", "\u00e4\n"):
        storage.atomic_write(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    with storage.atomic_open(path) as file:
        file.write("half")
        file.flush()
        assert path.read_text(encoding="utf-8") == "\u00e4\n"
        [other] = (name for name in tmp_path.iterdir() if name != path)
        with storage.atomic_path(path) as temporary:
            assert temporary not in (other, path)  # two writers do not share a file
            temporary.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "half" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("x"), OSError("x")])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    storage.atomic_write(tmp_path / "x", "old")
    with (
        pytest.raises((KeyboardInterrupt, UserError, OSError)),
        storage.atomic_open(tmp_path / "x") as file,
    ):
        file.write("half")
        raise error
    assert (tmp_path / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


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
