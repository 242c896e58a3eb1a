"""Checks the folders that a run writes to."""

import itertools
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from configs.paths import is_remote
from data.storage.errors import FULL, describe_full
from data.storage.files import atomic_write
from scripts.commands.doctor.findings import Finding
from scripts.commands.doctor.machine import GIB, MAX_SKEW_S

WRITTEN_BYTES = 32 << 20
SLOW_BYTES_PER_S = 50e6
"""Half of what a single hard disk writes."""
LEAST_FREE_BYTES = 1 << 30


def disk(flag: str, folder: Path, checkpoint_bytes: int = 0) -> Iterator[Finding]:
    """Writes to the file system of a folder, and removes what it wrote.

    checkpoint_bytes is the size of what a run will save there next.
    """
    if is_remote(folder):
        yield from bucket(flag, folder)
        return
    name, place = f"disk of {flag}", nearest(folder)
    free = shutil.disk_usage(place).free
    make_room = f"du -xh {place} | sort -h | tail  lists what is large."
    try:
        bytes_per_s, ahead_s = write_rate(place)
    except OSError as error:
        reason, mend = error.strerror, f"chmod u+rwx {place}, or give another {flag}."
        if error.errno in FULL:
            reason, mend = describe_full(place, error), make_room
        yield Finding(name, "error", f"{place} cannot be written: {reason or error}", mend)
        return
    text = f"{place} has {free / GIB:.1f} GiB free and writes {bytes_per_s / 1e6:,.0f} MB/s"
    if free < checkpoint_bytes:
        text += f"; the next checkpoint needs {checkpoint_bytes / GIB:.1f} GiB"
        yield Finding(name, "error", text, make_room)
    elif free < LEAST_FREE_BYTES:
        yield Finding(name, "warning", text, make_room)
    elif bytes_per_s < SLOW_BYTES_PER_S:
        yield Finding(name, "warning", text, f"Give a {flag} on a faster disk.")
    else:
        yield Finding(name, "ok", text)
    if abs(ahead_s) > MAX_SKEW_S:
        text = f"the dates of files in {place} differ from this host's clock by {ahead_s:.1f} s"
        yield Finding(f"clock of {flag}", "warning", text, "On the host and on the file server: "
                      "chronyc makestep.")  # fmt: skip
    else:
        yield Finding(f"clock of {flag}", "ok", "agrees with this host's")


def nearest(folder: Path) -> Path:
    """Returns a folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def write_rate(folder: Path) -> tuple[float, float]:
    """Returns the bytes a second that reach the disk, and by how much its dates are ahead."""
    block = os.urandom(1 << 20)  # not zeros, which some file systems do not store
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        start = time.monotonic()
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.monotonic() - start
        file.truncate()
        os.utime(file.fileno())  # the date is the file system's
        return WRITTEN_BYTES / seconds, os.fstat(file.fileno()).st_mtime - time.time()


def bucket(flag: str, folder: Path) -> Iterator[Finding]:
    """Writes an object, reads it back and removes it."""
    block, path = os.urandom(WRITTEN_BYTES), folder / f".doctor-{uuid.uuid4().hex}"
    name, megabytes = f"storage of {flag}", WRITTEN_BYTES / 1e6
    times = [time.monotonic()]
    atomic_write(path, block)
    times.append(time.monotonic())
    is_same = path.read_bytes() == block
    times.append(time.monotonic())
    path.unlink()
    if not is_same:
        text = f"{folder} gives back other bytes than were written"
        yield Finding(name, "error", text, f"Give another {flag}.")
        return
    written, read = (megabytes / (end - start) for start, end in itertools.pairwise(times))
    yield Finding(name, "ok", f"{folder} writes {written:,.0f} MB/s, reads {read:,.0f} MB/s")
