"""Finds and measures files of this machine and of Google Cloud Storage."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from configs.paths import is_remote, path_of
from data.storage import remote


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
