"""Explains failed writes, and defines the error of work that can be resumed."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from configs.errors import RunError, UserError
from data.storage import remote

FULL = (errno.ENOSPC, errno.EDQUOT)
_MANY_BYTES = 1 << 20


def describe_full(path: Path, error: Exception) -> str:
    """Describes what the file system of a path has run out of: inodes or space."""
    state = os.statvfs(next(p for p in (path, *path.absolute().parents) if p.exists()))
    free_bytes = state.f_bavail * state.f_frsize
    # What was written is perhaps removed by now; that a file could not be created remains.
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
                f"{target}: {describe_full(target, error)}; nothing half-written is left.  "
                f"Remove files there, or {remedy}."
            ) from error
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}.  "
            f"{remedy[0].upper()}{remedy[1:]}."
        ) from error
