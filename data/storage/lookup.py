"""Finds, measures and opens local and remote files."""

import contextlib
import glob
import io
import logging
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from configs.errors import UserError
from configs.paths import in_bucket, is_on_hub, is_remote, path_of
from data.storage import remote

logger = logging.getLogger(__name__)


def open_to_read(name: str, path: Path) -> io.BufferedReader:
    """Opens a file, a pipe or a terminal; refuses a device, which may never end."""
    if is_remote(path):
        if not path.exists():
            remote.check_bucket(path)
        if is_on_hub(path):
            return remote.from_hub(path).open("rb")
        remote_file: Any = path.open("rb")
        return io.BufferedReader(remote_file)
    if path.is_fifo():
        logger.info("%s: is a FIFO; waits for a process that writes to it.", name)
    file = path.open("rb")
    mode = os.fstat(file.fileno()).st_mode
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    if is_device and not file.isatty() and not os.path.samefile(path, os.devnull):
        file.close()
        raise UserError(f"{name}: is a device.  Legal: a file or a pipe.")
    return file


def read_bytes(name: str, path: Path) -> bytes:
    """Returns the content of a file; `name` identifies the file in an error."""
    try:
        with open_to_read(name, path) as file:
            return file.read()
    except OSError as error:
        remote.raise_failure(error)
        raise UserError(f"{name}: cannot be read: {error.strerror or error}.") from None


def exists(path: Path) -> bool:
    """Returns whether a path exists; raises `UserError` if its bucket does not."""
    if not path.exists():
        remote.check_bucket(path)
        return False
    return True


def size_of(path: Path) -> int:
    """Returns the size of a file in bytes; 0 if it does not exist."""
    try:
        return version(path)[0]
    except FileNotFoundError:
        return 0


def version(path: Path) -> list[int]:
    """Returns a file's size, and its modification time or a number for its version."""
    if is_remote(path):
        info = remote.file_system(path).info(str(path))
        version = remote.version_in(info)
        return [info["size"], int(version) if version.isdigit() else zlib.crc32(version.encode())]
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def written_s(path: Path) -> float:
    """Returns when a file was written, in seconds since 1970; 0 if it does not exist."""
    try:
        if is_remote(path):
            return float(remote.file_system(path).modified(str(path)).timestamp())
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def matches(pattern: str) -> list[str]:
    """Returns the files that a glob matches, sorted; a file with just this name is the only one."""
    if is_remote(path_of(pattern)):
        with contextlib.suppress(FileNotFoundError):  # the bucket does not exist
            if names := remote.file_system(pattern).glob(pattern):
                scheme = pattern.partition("://")[0]
                return sorted(f"{scheme}://{name}" for name in names)
        remote.check_bucket(path_of(pattern))
        return []
    path = os.path.expanduser(pattern)
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))


def sizes_below(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields the name and size of each file below a folder, at any depth."""
    if is_remote(folder):
        prefix = "/".join(in_bucket(folder))
        for name, info in remote.file_system(folder).find(str(folder), detail=True).items():
            yield str(PurePosixPath(name).relative_to(prefix)), info["size"]
        return
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # another process removed it
                continue
            yield str(path.relative_to(folder)), size
