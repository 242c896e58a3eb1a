"""Writes .npy files of rows that can grow, and reads them; each chunk of rows has a checksum."""

import array
import contextlib
import io
import mmap
import os
import zlib
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from configs.errors import UserError
from data.storage.files import sync

_CHUNK_BYTES = 1 << 16
"""Size limit of the rows that share a checksum; part of the format of a cache."""
REBUILD = "Build it again: meshloom prepare --rebuild, with the same flags."
"""What to do about a damaged file in a cache."""
_CHUNKS_IN_MEMORY = 1 << 9
"""Chunks that `verify_all` reads before it releases their memory."""


class GrowingArray(contextlib.AbstractContextManager["GrowingArray"]):
    """Writes a .npy file of rows in parts; completes its header at the end."""

    def __init__(self, path: Path, columns: int, dtype: Any):
        """Opens a new file, or one that a killed process left, whose rows `next_rows` returns."""
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._rows = 0
        self._sums_path = checksums_path(path)
        self._sums = array.array("I")
        self._rows_per_chunk = _rows_per_chunk(columns, self._dtype)
        self._file = path.open("r+b" if path.exists() else "x+b")
        _write_header(self._file, (0, columns), self._dtype)
        self._start = self._file.tell()

    def next_rows(self, count: int) -> np.ndarray | None:
        """Returns the next `count` rows that an earlier process wrote; None if it wrote fewer."""
        start = self._file.tell()
        numbers = np.fromfile(self._file, self._dtype, count * self._columns)
        self._file.seek(start)
        is_whole = len(numbers) == count * self._columns
        return numbers.reshape(count, self._columns) if is_whole else None

    def append(self, rows: np.ndarray) -> None:
        assert rows.shape[1:] == (self._columns,) and rows.dtype == self._dtype
        self._file.write(rows.tobytes())
        self._file.flush()  # so that they survive a kill
        while len(rows):
            in_chunk = self._rows % self._rows_per_chunk
            if not in_chunk:
                self._sums.append(0)
            part, rows = np.split(rows, [self._rows_per_chunk - in_chunk])
            self._sums[-1] = zlib.crc32(part.tobytes(), self._sums[-1])
            self._rows += len(part)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error:
            with contextlib.suppress(OSError):  # a full disk refuses the last bytes again
                self._file.close()
            return
        with self._file:
            self._file.truncate()
            self._file.seek(0)
            _write_header(self._file, (self._rows, self._columns), self._dtype)
            assert self._file.tell() == self._start, "numpy leaves room in the header for the rows"
        with self._sums_path.open("wb") as file:
            np.save(file, np.array(self._sums, np.uint32))


class CheckedArray:
    """Reads rows of a .npy file; compares each chunk with its checksum when it is first read."""

    def __init__(self, path: Path, remedy: str = REBUILD):
        """Opens a file that `GrowingArray` wrote."""
        self._path, self._remedy = path, remedy
        self._rows = self._load(path, dimensions=2, mmap_mode="r")
        self.shape, self.dtype, self.size = self._rows.shape, self._rows.dtype, self._rows.size
        self._rows_per_chunk = _rows_per_chunk(self.shape[1], self.dtype)
        self._sums = self._load(checksums_path(path), dimensions=1)
        chunks = -(-len(self) // self._rows_per_chunk)
        if len(self._sums) != chunks:
            raise UserError(f"{path}: its number of rows is damaged.  {remedy}")
        self._is_verified = np.zeros(chunks, bool)

    def _load(self, path: Path, dimensions: int, mmap_mode: Literal["r"] | None = None) -> Any:
        """Opens a .npy file of integers that this module wrote.

        With a damaged header, NumPy may raise almost anything, or read wrong numbers from the file.
        """
        try:
            array = np.load(path, mmap_mode=mmap_mode)
            is_whole = array.dtype.kind in "iu" and array.dtype.isnative
            if not is_whole or array.ndim != dimensions or 0 in array.shape[1:]:
                raise ValueError(f"found an array of {array.dtype}, {array.shape}")
            return array
        except FileNotFoundError:
            raise UserError(f"{path}: is missing.  {self._remedy}") from None
        except OSError:
            raise
        except Exception as error:
            raise UserError(f"{path}: its header is damaged.  {self._remedy}") from error

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, row_ids: np.ndarray | int) -> np.ndarray:
        self.verify(np.unique(np.asarray(row_ids) // self._rows_per_chunk))
        return np.asarray(self._rows[row_ids])

    def checksums(self, rows: int) -> bytes:
        """Returns the content of a checksum file for the first rows alone."""
        chunks, rest = divmod(rows, self._rows_per_chunk)
        last = [zlib.crc32(self[np.arange(rows - rest, rows)].tobytes())] if rest else []
        file = io.BytesIO()
        np.save(file, np.concatenate([self._sums[:chunks], np.array(last, np.uint32)]))
        return file.getvalue()

    def verify_all(self) -> None:
        """Reads every chunk; raises `UserError` if one is damaged."""
        count = len(self._is_verified)
        for start in range(0, count, _CHUNKS_IN_MEMORY):
            self.verify(np.arange(start, min(start + _CHUNKS_IN_MEMORY, count)))
            if isinstance(self._rows.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                self._rows.base.madvise(mmap.MADV_DONTNEED)

    def verify(self, chunks: np.ndarray) -> None:
        """Reads chunks that have not been read yet; raises `UserError` if one is damaged."""
        for chunk in chunks[~self._is_verified[chunks]]:
            start = int(chunk) * self._rows_per_chunk
            rows = self._rows[start : start + self._rows_per_chunk]
            if zlib.crc32(rows.data) != self._sums[chunk]:
                raise UserError(
                    f"{self._path}: rows {start:,} to {start + len(rows) - 1:,} are damaged.  "
                    f"{self._remedy}"
                )
            self._is_verified[chunk] = True


class MaskedArray:
    """Reads rows of an array with some segments set to 0, like padding."""

    _SEGMENTS = 1 << 21
    """More segments than a row can have."""

    def __init__(self, array: Any, segments: Any, masked: np.ndarray):
        """Accepts the segments of all positions, and a (row, segment) for each one to set to 0."""
        self._array, self._segments = array, segments
        self.shape, self.dtype, self.size = array.shape, array.dtype, array.size
        self._masked = np.sort(masked @ [self._SEGMENTS, 1])

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, row_ids: np.ndarray) -> np.ndarray:
        rows, first = self._array[row_ids].copy(), row_ids * self._SEGMENTS
        some = self._count(first) < self._count(first + self._SEGMENTS)  # most rows have none
        segments = first[some, None] + self._segments[row_ids[some]].astype(np.int64)
        rows[some] *= self._count(segments) == self._count(segments + 1)
        return rows

    def _count(self, segments: np.ndarray) -> np.ndarray:
        """Returns how many masked segments come before each of these segments."""
        return np.searchsorted(self._masked, segments)


def verify_written(path: Path) -> None:
    """Verifies the rows of a file, read from the disk where the system allows it."""
    sync(checksums_path(path))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    CheckedArray(path, "The disk or the memory is faulty.  Build it again elsewhere.").verify_all()


def checksums_path(path: Path) -> Path:
    """Returns the path of the file that holds a CRC-32 for each chunk of an array's rows."""
    return path.with_suffix(".crc32.npy")


def _rows_per_chunk(columns: int, dtype: np.dtype) -> int:
    return max(1, _CHUNK_BYTES // (columns * dtype.itemsize))


def _write_header(file: IO[bytes], shape: tuple[int, int], dtype: np.dtype) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
