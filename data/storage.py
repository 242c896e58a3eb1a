"""Writes files and folders that appear whole or not at all, and .npy files that grow.

What a file system can do and Google Cloud Storage cannot (rename, lock, append, map into memory,
wait for the disk) is done here alone, and in `data.remote` what replaces it there.
"""

import array
import contextlib
import errno
import fcntl
import glob
import logging
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, Self, TextIO

import numpy as np

from configs.errors import RunError, UserError
from configs.paths import REMOTE, is_remote, path_of
from data import remote

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
"""Rows that share a checksum take at most as much: part of the format of a cache."""
_CHUNKS_IN_MEMORY = 1 << 9
"""Chunks that `verify_all` reads before it gives their memory back."""
SCRATCH = Path("~/.cache/meshloom/.remote")
"""Where copies of remote data lie, by bucket and name."""
_STREAMS = {"/dev/stdin": "/dev/fd/0", "/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives an unused path beside the target; the file written there replaces the target.

    Until then a reader sees the old file, and so it stays after an error.  A device, a FIFO or an
    open file of this process such as /dev/stdout is written directly.  For a remote target the
    path is one of this machine, which is uploaded.
    """
    if is_stream(path):
        yield path
        return
    if is_remote(path):
        with WorkingFolder(path.parent) as folder:
            yield folder.path / path.name
        return
    check_output(path)
    path = path.resolve()  # a link stays, and what it names is replaced
    # The name cannot be guessed: every process writes its own, and nobody can lay a link there.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        sync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[TextIO]:
    """Opens a text file that replaces the target when it is closed without an error."""
    descriptor = _open_descriptor(path)
    if descriptor is not None:
        sys.stdout.flush()
        with open(os.dup(descriptor), "w", encoding="utf-8") as file:
            yield file
        return
    with atomic_path(path) as target, open(target, _mode(target, path), encoding="utf-8") as file:
        yield file


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file: a reader sees the old one or the new one."""
    with atomic_path(path) as target, target.open(_mode(target, path) + "b") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _mode(temporary: Path, path: Path) -> Literal["w", "x"]:
    return "w" if temporary == path else "x"


def is_stream(path: Path) -> bool:
    """Returns whether a path is a device, a FIFO or a file that this process has open."""
    if _open_descriptor(path) is not None:
        return True
    if is_remote(path):
        return False
    with contextlib.suppress(OSError, ValueError):
        mode = path.stat().st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def _open_descriptor(path: Path) -> int | None:
    """Returns the descriptor that /dev/stdout, /dev/fd/3 and the like name."""
    name = _STREAMS.get(str(path), str(path))
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return int(match[1]) if match else None


def check_output(name: str | Path) -> None:
    """Raises where no file can be written under a name, before work is done for it."""
    if name == "":
        raise UserError("the name of a file to write is empty.")
    path = path_of(name)
    if is_remote(path):
        problem = None if remote.bucket_exists(path) else "there is no such bucket"
    else:
        problem = None if is_stream(path) else _output_problem(path)
        if problem is None and os.fspath(name).endswith("/"):
            problem = "a name that ends in / is a folder's"
    if problem:
        raise UserError(f"{path}: cannot be written: {problem}.  Give another file.")


def _output_problem(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "it is a folder"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # raises where links form a circle; from Python 3.13 on, resolve does not
        folder = path.resolve().parent
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"the folder {folder} is read-only"
        if path.exists() and not os.access(path, os.W_OK):
            return "it is read-only"
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a null byte, a circle
        return getattr(error, "strerror", None) or str(error)
    return None


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


class Unfinished(RunError):
    """Says that work has stopped and can go on where it was."""


@contextlib.contextmanager
def resumable_folder(target: Path) -> Iterator[Path]:
    """Gives a folder beside the target, which takes the target's place at the end.

    After an error nothing is left.  After a kill, Ctrl-C, `Unfinished` or a request that the
    storage failed to answer, the next call gives the same folder again, with what is in it.  The
    caller holds the lock of the target.
    """
    folder = unfinished(target)
    with write_errors(target):
        for stale in target.parent.glob(f"{folder.name}-*"):  # what a kill left of an old one
            shutil.rmtree(stale)
        folder.mkdir(exist_ok=True)
        try:
            yield folder
            for path in folder.iterdir():
                sync(path)
            _replace(folder, target)
        except Unfinished:
            raise
        except Exception as error:
            if remote.failure(error) is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def unfinished(target: Path) -> Path:
    """Names the folder in which `resumable_folder` builds."""
    return target.parent / f".{target.name}.building"


def targets_unfinished(parent: Path) -> list[Path]:
    """Returns the folders that `resumable_folder` builds, or that a kill left."""
    return [p.with_name(p.stem.removeprefix(".")) for p in sorted(parent.glob(".*.building"))]


def remove_unfinished(target: Path) -> bool:
    """Removes what a kill left of a folder, unless a process builds it; returns whether it did."""
    if is_used(target):
        return False
    with lock(target), write_errors(target):
        shutil.rmtree(unfinished(target))
    return True


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Waits until no other process on this file system builds the same folder."""
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # A file system without locks still gets whole folders, built twice at worst.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("%s: another process writes it; this one waits for that", target)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Reading:
    """Keeps a folder of this machine from `remove_unused`, for as long as this object lives."""

    def __init__(self, folder: Path):
        handle = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_used(folder: Path) -> bool:
    """Tells whether a process on this machine's file systems reads or builds a folder."""
    lock_file = folder.parent / f".{folder.name}.lock"
    return any(_is_locked(path) for path in (folder, lock_file) if path.exists())


def _is_locked(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def remove_unused(folder: Path, first: str) -> bool:
    """Removes a folder unless a process reads or builds it; returns whether it did.

    Without the file `first`, a remote folder is not whole.
    """
    twin = local_twin(folder)
    if is_used(twin):
        return False
    if is_remote(folder):
        for name in sorted((n for n, _ in sizes_below(folder)), key=lambda name: name != first):
            (folder / name).unlink()
    if twin.exists():
        with lock(twin), write_errors(twin):
            removed = Path(tempfile.mkdtemp(dir=twin.parent, prefix=f".{twin.name}.building-"))
            twin.rename(removed)  # a reader finds the folder whole or not at all
            shutil.rmtree(removed)
    return True


def remove_folder(folder: Path) -> None:
    """Removes a folder, if there is one, with all that is in it."""
    if is_remote(folder):
        for name, _ in remote.sizes_below(folder):
            (folder / name).unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def open_alone(path: Path) -> TextIO:
    """Opens a file to append to; refuses it while another process has it open so."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"{path}: another process is writing it.  Wait for that, or give another --output."
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def try_flock(file: IO[str]) -> bool | None:
    """Locks a file until it is closed or this process ends.

    Returns False where another process has locked it, and None where there are no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class WorkingFolder:
    """Holds a folder in which files can grow: the target, or for a remote one a temporary folder of
    this machine, from which they are uploaded.
    """

    def __init__(self, target: Path):
        self._target = target
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="meshloom-") if is_remote(target) else None
        )
        self.path = target if self._temporary is None else Path(self._temporary.name)

    def fetch(self, *names: str) -> None:
        """Brings those of these files that are there."""
        for name in names if self._temporary is not None else ():
            if (self._target / name).exists():
                remote.download(self._target / name, self.path / name)

    def upload(self) -> None:
        """Uploads the files that changed since the last time; of a local folder does nothing."""
        for file in sorted(self.path.rglob("*")) if self._temporary is not None else ():
            name = str(file.relative_to(self.path))
            try:
                state = file.stat()
                version = (state.st_size, state.st_mtime_ns)
                if file.is_file() and self._uploaded.get(name) != version:
                    remote.upload(file, self._target / name)
                    self._uploaded[name] = version
            except FileNotFoundError:  # removed meanwhile, or a link to nothing
                if file.exists():
                    raise

    def close(self) -> None:
        """Uploads what changed, and removes the temporary folder."""
        try:
            self.upload()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        elif self._temporary is not None:
            self._temporary.cleanup()


@contextlib.contextmanager
def write_errors(target: Path, remedy: str = "give another --data_dir") -> Iterator[None]:
    """Says what a failed write means: a full disk, or a place that cannot be written."""
    try:
        yield
    except OSError as error:
        remote.raise_failure(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"{target}: the disk is full; nothing half-written is left.  "
                f"Free some space there, or {remedy}."
            ) from error
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}.  "
            f"{remedy[0].upper()}{remedy[1:]}."
        ) from error


class GrowingArray:
    """Writes a .npy file of rows in parts; its header is completed at the end."""

    def __init__(self, path: Path, columns: int, dtype: Any):
        """Opens a new file, or one that a kill left, of which `next_rows` reads what is there."""
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._rows = 0
        self._sums_path = checksums_path(path)
        self._sums = array.array("I")
        self._rows_a_chunk = _rows_a_chunk(columns, self._dtype)
        self._file = path.open("r+b" if path.exists() else "x+b")
        _write_header(self._file, (0, columns), self._dtype)
        self._start = self._file.tell()

    def next_rows(self, count: int) -> np.ndarray | None:
        """Returns rows that an earlier process wrote behind the last one; None without so many."""
        start = self._file.tell()
        content = self._file.read(count * self._columns * self._dtype.itemsize)
        self._file.seek(start)
        if len(content) < count * self._columns * self._dtype.itemsize:
            return None
        return np.frombuffer(content, self._dtype).reshape(count, self._columns)

    def flush(self) -> None:
        """Gives the rows to the system, which keeps them after a kill."""
        self._file.flush()

    def append(self, rows: np.ndarray) -> None:
        assert rows.shape[1:] == (self._columns,) and rows.dtype == self._dtype
        self._file.write(rows.tobytes())
        while len(rows):
            in_chunk = self._rows % self._rows_a_chunk
            if not in_chunk:
                self._sums.append(0)
            part, rows = np.split(rows, [self._rows_a_chunk - in_chunk])
            self._sums[-1] = zlib.crc32(part.tobytes(), self._sums[-1])
            self._rows += len(part)

    def __enter__(self) -> Self:
        return self

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
    """Reads rows of a .npy file; each chunk is compared with its checksum when first read."""

    def __init__(self, path: Path, remedy: str):
        """Opens a file that `GrowingArray` wrote; those of older versions have no checksums."""
        self._path, self._remedy, self._reading = path, remedy, Reading(path.parent)
        self._rows = self._load(path, dimensions=2, mmap_mode="r")
        self.shape, self.dtype, self.size = self._rows.shape, self._rows.dtype, self._rows.size
        self._rows_a_chunk = _rows_a_chunk(self.shape[1], self.dtype)
        sums_path = checksums_path(path)
        self._sums = self._load(sums_path, dimensions=1) if sums_path.exists() else None
        chunks = -(-len(self) // self._rows_a_chunk)
        if self._sums is not None and len(self._sums) != chunks:
            raise UserError(f"{path}: its number of rows is damaged.  {remedy}")
        self._is_verified = np.full(chunks, self._sums is None)

    def _load(self, path: Path, dimensions: int, mmap_mode: Literal["r"] | None = None) -> Any:
        """Opens a .npy file of integers, as this module writes them.

        A damaged header makes NumPy raise almost anything, or read other numbers from the file.
        """
        try:
            array = np.load(path, mmap_mode=mmap_mode)
            is_whole = array.dtype.kind in "iu" and array.dtype.isnative
            if is_whole and array.ndim == dimensions and 0 not in array.shape[1:]:
                return array
            error = None
        except OSError:
            raise
        except Exception as problem:
            error = problem
        raise UserError(f"{path}: its header is damaged.  {self._remedy}") from error

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, row_ids: np.ndarray | int) -> np.ndarray:
        self.verify(np.unique(np.asarray(row_ids) // self._rows_a_chunk))
        return np.asarray(self._rows[row_ids])

    def verify_all(self) -> None:
        """Reads every chunk and raises `UserError` where one is damaged."""
        count = len(self._is_verified)
        for start in range(0, count, _CHUNKS_IN_MEMORY):
            self.verify(np.arange(start, min(start + _CHUNKS_IN_MEMORY, count)))
            if isinstance(self._rows.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                self._rows.base.madvise(mmap.MADV_DONTNEED)

    def verify(self, chunks: np.ndarray) -> None:
        """Reads chunks that were not read yet; raises `UserError` where one is damaged."""
        for chunk in chunks[~self._is_verified[chunks]]:
            start = int(chunk) * self._rows_a_chunk
            rows = self._rows[start : start + self._rows_a_chunk]
            assert self._sums is not None
            if zlib.crc32(rows.data) != self._sums[chunk]:
                raise UserError(
                    f"{self._path}: rows {start:,} to {start + len(rows) - 1:,} are damaged.  "
                    f"{self._remedy}"
                )
            self._is_verified[chunk] = True


def verify_written(path: Path) -> None:
    """Reads back the rows of a file, from the disk where the system allows it."""
    sync(checksums_path(path))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    CheckedArray(path, "The disk or the memory is faulty.  Build it again elsewhere.").verify_all()


def checksums_path(path: Path) -> Path:
    """Names the file that holds a CRC-32 for each chunk of an array's rows."""
    return path.with_suffix(".crc32.npy")


def _rows_a_chunk(columns: int, dtype: np.dtype) -> int:
    return max(1, _CHUNK_BYTES // (columns * dtype.itemsize))


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


def size_of(path: Path) -> int:
    """Returns the bytes of a file; 0 where there is none."""
    try:
        return version(path)[0]
    except FileNotFoundError:
        return 0


def version(path: Path) -> list[int]:
    """Returns the size of a file and the time of its change, or the number of its last write."""
    if is_remote(path):
        return remote.version(path)
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def written_s(path: Path) -> float:
    """Returns when a file was written, in seconds since 1970; 0 where there is none."""
    try:
        return remote.written_s(path) if is_remote(path) else path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def matches(pattern: str) -> list[str]:
    """Returns the files that a glob matches, sorted; a file of just this name is the only one."""
    if is_remote(path_of(pattern)):
        return remote.matches(pattern)
    path = os.path.expanduser(pattern)
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def local_twin(path: Path) -> Path:
    """Returns the path itself; of a remote one, where this machine keeps what it copies or makes of
    it.
    """
    return SCRATCH.expanduser() / str(path).removeprefix(REMOTE) if is_remote(path) else path


def fetch(folder: Path, last: str) -> Path:
    """Returns a folder of this machine: the given one, or a copy of a remote one.

    `last` names the file that is written last.  A copy that has the same one is not made again.
    """
    twin = local_twin(folder)
    if is_remote(folder):
        with lock(twin):
            if not (twin / last).exists() or (
                (twin / last).read_bytes() != (folder / last).read_bytes()
            ):
                with whole_folder(twin) as copy:
                    for name, _ in remote.sizes_below(folder):
                        remote.download(folder / name, copy / name)
    return twin


def publish(twin: Path, folder: Path, last: str) -> None:
    """Uploads the copy that this machine has of a remote folder: without `last` it is not whole."""
    if is_remote(folder):
        (folder / last).unlink(missing_ok=True)
        for name in sorted((name for name, _ in sizes_below(twin)), key=lambda name: name == last):
            remote.upload(twin / name, folder / name)


def sizes_below(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields name and size of each file below a folder, at any depth."""
    if is_remote(folder):
        yield from remote.sizes_below(folder)
        return
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # another process removed it
                continue
            yield str(path.relative_to(folder)), size


def sync_below(folder: Path) -> None:
    """Waits until a folder and all below it are on the disk; remote objects are when written."""
    if not is_remote(folder):
        for parent, _, names in os.walk(folder, topdown=False):
            for name in names:
                sync(Path(parent, name))
            sync(Path(parent))


def sync(path: Path) -> None:
    """Waits until a file or a folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
