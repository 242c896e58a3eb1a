"""Writes files atomically, and grows files in remote folders."""

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from configs.errors import RunError, UserError
from configs.paths import is_remote, path_of
from data.storage import remote

FULL = (errno.ENOSPC, errno.EDQUOT)
_MANY_BYTES = 1 << 20


def describe_full(path: Path, error: Exception) -> str:
    """Describes what a path's file system has run out of, or which limit a file exceeds."""
    if "File too large" in str(error):
        return "the file exceeds the size limit of the shell (`ulimit -f`) or of the file system"
    state = os.statvfs(next(p for p in (path, *path.absolute().parents) if p.exists()))
    free_bytes = state.f_bavail * state.f_frsize
    # What was written may be removed by now; that a file could not be created still shows.
    is_of_creation = getattr(error, "filename", None) is not None and free_bytes >= _MANY_BYTES
    if state.f_files and (is_of_creation or not state.f_favail):
        return f"the disk has no inodes left: it holds {state.f_files:,} files and folders"
    return f"the disk is full, or a quota is used up: {free_bytes:,} bytes are free"


class Unfinished(RunError):
    """Reports work that stopped and can be resumed."""


@contextlib.contextmanager
def write_errors(target: Path, remedy: str = "give another --data_dir") -> Iterator[None]:
    """Explains a failed write: a full disk, or a path that cannot be written."""
    try:
        yield
    except OSError as error:
        remote.raise_failure(error)
        if error.errno in FULL:
            raise RunError(
                f"{target}: {describe_full(target, error)}; no partial file is left.  Remove files "
                f"there, or {remedy}."
            ) from error
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}.  "
            f"{remedy[0].upper()}{remedy[1:]}."
        ) from error


_STREAMS = {"/dev/stdin": "/dev/fd/0", "/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields an unused path next to the target; the file written there replaces the target.

    Until then, and after an error, readers see the old file.  A device, a FIFO or an open file of
    this process such as /dev/stdout is written directly.  For a remote target, the path is on this
    machine, and its file is uploaded.
    """
    if is_stream(path):
        yield path
        return
    if is_remote(path):
        with WorkingFolder(path.parent) as folder:
            yield folder.path / path.name
        return
    check_output(path)
    path = path.resolve()  # keeps a link, and replaces what it points to
    # The name cannot be guessed: each process writes its own, and nobody can plant a link there.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno == errno.EFBIG:  # the error of a write does not name its file
            error.filename = str(path)
        raise
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
    with atomic_path(path) as target, open(target, "w", encoding="utf-8") as file:
        yield file


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file; readers see either the old content or the new."""
    with atomic_path(path) as target, target.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


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
    """Returns the file descriptor that /dev/stdout, /dev/fd/3 and the like name."""
    name = _STREAMS.get(str(path), str(path))
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return int(match[1]) if match else None


def check_output(name: str | Path) -> None:
    """Raises `UserError` if no file can be written to a path, before any work is done for it."""
    if name == "":
        raise UserError("the name of a file to write is empty.")
    path, problem = path_of(name), None
    remote.check_bucket(path)
    if not is_remote(path):
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
            path.stat()  # raises if links form a circle; from Python 3.13 on, resolve does not
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


def sync_below(folder: Path) -> None:
    """Waits until a folder and everything in it is on disk; remote objects already are."""
    if not is_remote(folder):
        for parent, _, names in os.walk(folder, topdown=False):
            for name in names:
                sync(Path(parent, name))
            sync(Path(parent))


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WorkingFolder(contextlib.AbstractContextManager["WorkingFolder"]):
    """Holds a folder in which files can grow: the target, or a local one that is uploaded to it."""

    def __init__(self, target: Path):
        self.path = self._target = target
        self._uploaded, self._temporary = dict[str, tuple[int, int]](), contextlib.ExitStack()
        if is_remote(target):
            folder = tempfile.TemporaryDirectory(prefix="meshloom-")
            self.path = Path(self._temporary.enter_context(folder))

    def fetch(self, *names: str) -> None:
        """Downloads those of these files that exist."""
        for name in names if is_remote(self._target) else ():
            if (self._target / name).exists():
                remote.download(self._target / name, self.path / name)

    def upload(self) -> None:
        """Uploads the files that changed since the last upload; does nothing for a local folder."""
        for file in sorted(self.path.rglob("*")) if is_remote(self._target) else ():
            name = str(file.relative_to(self.path))
            try:
                state = file.stat()
                version = (state.st_size, state.st_mtime_ns)
                if file.is_file() and self._uploaded.get(name) != version:
                    remote.upload(file, self._target / name)
                    self._uploaded[name] = version
            except FileNotFoundError:  # removed meanwhile, or a broken link
                if file.exists():
                    raise

    def close(self) -> None:
        """Uploads what changed, and removes the temporary folder."""
        with self._temporary:
            self.upload()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._temporary.close()
