"""Files and folders that appear whole or not at all."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.errors import RunError, UserError
from data import storage
from tests.toys import ROOT


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


def test_a_device_and_a_link_stay_what_they_are(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to("real")
    for name in ("null", "link"):
        storage.atomic_write(tmp_path / name, "new")
        with storage.atomic_open(tmp_path / name) as file:
            file.write("newer")
        assert (tmp_path / name).is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (tmp_path / "real").read_text() == "newer"
    with pytest.raises(OSError, match="No space left"):
        storage.atomic_write(Path("/dev/full"), "x")
    assert {p.name for p in tmp_path.iterdir()} == {"null", "link", "real"}


def test_a_fifo_is_written_directly(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with storage.atomic_open(tmp_path / "fifo") as file:
            file.write("text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_the_standard_output_is_continued(tmp_path):
    script = (
        "from pathlib import Path\nfrom data.storage import atomic_open\nprint('first')\n"
        "for name in ('/dev/stdout', '/dev/fd/1', '/proc/self/fd/1'):\n"
        "    with atomic_open(Path(name)) as file:\n        file.write(name + '\\n')\n"
        "print('last')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=out, check=True)
    lines = ["first", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "last"]
    assert (tmp_path / "out").read_text().splitlines() == lines


def test_the_mode_of_a_file_stays(tmp_path):
    storage.atomic_write(tmp_path / "x", "old")
    (tmp_path / "x").chmod(0o600)
    storage.atomic_write(tmp_path / "x", "new")
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
            storage.check_output(name)
    assert {p.name for p in tmp_path.iterdir()} == {"circle", "file"}
    longest = tmp_path / ("\u00e4" * 127)
    storage.atomic_write(longest, "x")
    assert longest.read_text() == "x"


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


def test_a_full_disk_and_a_forbidden_place_are_different_errors(tmp_path):
    full = pytest.raises(RunError, match=r"the disk is full; nothing half-written .*--data_dir")
    with full, storage.whole_folder(tmp_path / "x"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    (tmp_path / "file").write_text("")
    forbidden = pytest.raises(UserError, match=r"cannot be written: .*  Give another --data_dir")
    with forbidden, storage.lock(tmp_path / "file" / "x"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def written(path: Path, rows: int) -> np.ndarray:
    """Writes rows in uneven parts; a chunk is 5 of them."""
    content = np.arange(rows * 3, dtype=np.uint16).reshape(rows, 3)
    with storage.GrowingArray(path, 3, np.uint16) as array:
        for part in np.split(content, [1, 3, 3, 9]):
            array.append(part)
    return content


@pytest.mark.parametrize("rows", [0, 10, 23])
def test_each_chunk_is_verified_when_first_read(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 5 * 6)
    path = tmp_path / "x.npy"
    content = written(path, rows)
    array = storage.CheckedArray(path, "Again.")
    assert (array.shape, array.size, len(array)) == ((rows, 3), 3 * rows, rows)
    array.verify_all()
    ids = np.arange(rows)[::-2]
    np.testing.assert_array_equal(array[ids], content[ids])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_verifying_a_file_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNKS_IN_MEMORY", 16)  # 1 MB
    with storage.GrowingArray(tmp_path / "x.npy", 256, np.uint16) as rows:
        rows.append(np.ones((60_000, 256), np.uint16))  # 31 MB
    array = storage.CheckedArray(tmp_path / "x.npy", "Again.")
    before = mapped_bytes()
    array.verify_all()
    assert mapped_bytes() < before + 8e6
    assert array[np.array([59_999])].sum() == 256


def mapped_bytes() -> int:
    """Returns how much of mapped files is in the memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssFile:"))


def test_every_changed_bit_of_a_row_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 5 * 6)
    path = tmp_path / "x.npy"
    content = written(path, 23)
    whole = path.read_bytes()
    start = len(whole) - content.nbytes
    for bit in range(8 * start, 8 * len(whole), 7):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        array, damaged = storage.CheckedArray(path, "Again."), (bit // 8 - start) // 6 // 5
        for chunk in range(5):
            if chunk != damaged:
                array[np.array([chunk * 5])]
        with pytest.raises(UserError, match=rf"x.npy: rows {damaged * 5} to .* damaged.  Again"):
            array[np.array([damaged * 5, 1])]
    with pytest.raises(UserError, match="damaged"):
        storage.verify_written(path)


@pytest.mark.parametrize("name", ["x.npy", "x.crc32.npy"])
def test_a_changed_bit_of_a_header_is_noticed_or_harmless(tmp_path, monkeypatch, name):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 5 * 6)
    content = written(tmp_path / "x.npy", 23)
    whole, refused = (tmp_path / name).read_bytes(), 0
    for bit in [*range(8 * 80), *range(8 * 80, 8 * 128, 7)]:  # the rest is spaces
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(changed)
        try:
            array = storage.CheckedArray(tmp_path / "x.npy", "Again.")
            array.verify_all()
            np.testing.assert_array_equal(array[np.arange(23)], content)
        except UserError as error:
            assert str(tmp_path) in str(error) and str(error).endswith("damaged.  Again.")
            refused += 1
    assert refused > 500


def test_sizes_are_of_the_files_that_are_still_there(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("1")
    (tmp_path / "link").symlink_to("removed")
    assert list(storage.sizes_below(tmp_path)) == [("kept", 1)]
