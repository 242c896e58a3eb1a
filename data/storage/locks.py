"""Locks files and folders among the processes of a file system."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from filelock import lock_descriptor

from configs.errors import UserError
from data.storage.files import write_errors

logger = logging.getLogger(__name__)


def try_lock(file: IO[str] | int) -> bool | None:
    """Locks an open file until it is closed or this process ends.

    Returns False where another process holds the lock, and None where the file system has no locks.
    """
    try:
        return lock_descriptor(file if isinstance(file, int) else file.fileno(), blocking=False)
    except OSError:
        return None


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Waits until no other process on this file system builds the same folder.

    A file system without locks still gets whole folders, built twice at worst.
    """
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if try_lock(handle) is False:
            logger.info("%s: another process writes it; this one waits for that", target)
            lock_descriptor(handle)
        yield
    finally:
        os.close(handle)


def open_alone(path: Path) -> TextIO:
    """Opens a file to append to it; refuses one that another process has opened this way."""
    file = path.open("a", encoding="utf-8")
    if try_lock(file) is False:
        file.close()
        raise UserError(
            f"{path}: another process is writing it.  Wait for that, or give another --output."
        )
    return file
