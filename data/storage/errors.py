"""Says what a failed write means, and that work can go on later."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from configs.errors import RunError, UserError
from data.storage import remote


class Unfinished(RunError):
    """Says that work has stopped and can go on where it was."""


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
