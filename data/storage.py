"""Writes files and folders that appear whole or not at all, and .npy files that grow."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self, TextIO

import numpy as np

from configs.errors import RunError, UserError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives an unused path beside the target; the file written there replaces the target.

    Until then a reader sees the old file, and so it stays after an error.
    """
    # The name cannot be guessed: every process writes its own, and nobody can lay a link there.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[TextIO]:
    """Opens a text file that replaces the target when it is closed without an error."""
    with atomic_path(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        yield file


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file: a reader sees the old one or the new one."""
    with atomic_path(path) as temporary, temporary.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives a temporary folder beside the target, which takes the target's place at the end.

    After an error nothing is left.  After a kill, the temporary folder is left under a name that
    nothing reads, and the next call removes it.  The caller holds the lock of the target.
    """
    with write_errors(target):
        for stale in target.parent.glob(f".{target.name}.building-*"):
            shutil.rmtree(stale)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.building-"))
        try:
            yield folder
            for path in folder.iterdir():
                sync(path)
            _replace(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Waits until no other process on this file system builds the same folder."""
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # A file system without locks still gets whole folders, built twice at worst.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Says what a failed write means: a full disk, or a place that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"{target}: the disk is full; nothing half-written is left.  "
                "Free some space there, or give another --data_dir."
            ) from error
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}.  Give another --data_dir."
        ) from error


class GrowingArray:
    """Writes a .npy file of rows in parts; its header is completed at the end."""

    def __init__(self, path: Path, columns: int, dtype: Any):
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._rows = 0
        self._file = path.open("xb")
        _write_header(self._file, (0, columns), self._dtype)
        self._start = self._file.tell()

    def append(self, rows: np.ndarray) -> None:
        assert rows.shape[1:] == (self._columns,) and rows.dtype == self._dtype
        self._file.write(rows.tobytes())
        self._rows += len(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error:
            with contextlib.suppress(OSError):  # a full disk refuses the last bytes again
                self._file.close()
            return
        with self._file:
            self._file.seek(0)
            _write_header(self._file, (self._rows, self._columns), self._dtype)
            assert self._file.tell() == self._start, "numpy leaves room in the header for the rows"


def _write_header(file: IO[bytes], shape: tuple[int, int], dtype: np.dtype) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _replace(folder: Path, target: Path) -> None:
    old = None
    if target.exists():
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.building-old-"))
        target.rename(old)
    sync(folder)
    folder.rename(target)
    sync(target.parent)
    if old:
        shutil.rmtree(old)


def sync(path: Path) -> None:
    """Waits until a file or a folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
