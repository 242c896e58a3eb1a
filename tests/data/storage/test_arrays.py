"""Files of rows: they grow, and each damaged chunk is noticed."""

from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from data.storage import arrays
from data.storage.arrays import CheckedArray, GrowingArray, verify_written


def test_a_growing_array_is_an_ordinary_npy_file(tmp_path):
    parts = [np.full((n, 3), n, np.uint16) for n in (2, 0, 5)]
    with GrowingArray(tmp_path / "x.npy", 3, np.uint16) as array:
        for part in parts:
            array.append(part)
    assert (np.load(tmp_path / "x.npy", mmap_mode="r") == np.concatenate(parts)).all()


def written(path: Path, rows: int) -> np.ndarray:
    """Writes rows in uneven parts; a chunk is 5 of them."""
    content = np.arange(rows * 3, dtype=np.uint16).reshape(rows, 3)
    with GrowingArray(path, 3, np.uint16) as array:
        for part in np.split(content, [1, 3, 3, 9]):
            array.append(part)
    return content


@pytest.mark.parametrize("rows", [0, 10, 23])
def test_each_chunk_is_verified_when_first_read(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", 5 * 6)
    path = tmp_path / "x.npy"
    content = written(path, rows)
    array = CheckedArray(path, "Again.")
    assert (array.shape, array.size, len(array)) == ((rows, 3), 3 * rows, rows)
    array.verify_all()
    ids = np.arange(rows)[::-2]
    np.testing.assert_array_equal(array[ids], content[ids])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_verifying_a_file_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_CHUNKS_IN_MEMORY", 16)  # 1 MB
    with GrowingArray(tmp_path / "x.npy", 256, np.uint16) as rows:
        rows.append(np.ones((60_000, 256), np.uint16))  # 31 MB
    array = CheckedArray(tmp_path / "x.npy", "Again.")
    before = mapped_bytes()
    array.verify_all()
    assert mapped_bytes() < before + 8e6
    assert array[np.array([59_999])].sum() == 256


def mapped_bytes() -> int:
    """Returns how much of mapped files is in the memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssFile:"))


def test_every_changed_bit_of_a_row_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", 5 * 6)
    path = tmp_path / "x.npy"
    content = written(path, 23)
    whole = path.read_bytes()
    start = len(whole) - content.nbytes
    for bit in range(8 * start, 8 * len(whole), 7):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        array, damaged = CheckedArray(path, "Again."), (bit // 8 - start) // 6 // 5
        for chunk in range(5):
            if chunk != damaged:
                array[np.array([chunk * 5])]
        with pytest.raises(UserError, match=rf"x.npy: rows {damaged * 5} to .* damaged.  Again"):
            array[np.array([damaged * 5, 1])]
    with pytest.raises(UserError, match="damaged"):
        verify_written(path)


@pytest.mark.parametrize("name", ["x.npy", "x.crc32.npy"])
def test_a_changed_bit_of_a_header_is_noticed_or_harmless(tmp_path, monkeypatch, name):
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", 5 * 6)
    content = written(tmp_path / "x.npy", 23)
    whole, refused = (tmp_path / name).read_bytes(), 0
    for bit in [*range(8 * 80), *range(8 * 80, 8 * 128, 7)]:  # the rest is spaces
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(changed)
        try:
            array = CheckedArray(tmp_path / "x.npy", "Again.")
            array.verify_all()
            np.testing.assert_array_equal(array[np.arange(23)], content)
        except UserError as error:
            assert str(tmp_path) in str(error) and str(error).endswith("damaged.  Again.")
            refused += 1
    assert refused > 500
