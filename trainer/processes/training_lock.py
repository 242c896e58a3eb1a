"""Prevents a second training in a model directory, and a second decoding to a remote output.

On a file system, the lock is a file with a system lock on it.  In remote storage, it is an object
that only its last writer can write or remove.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from configs.errors import UserError, one_line
from configs.json_reader import read_json
from configs.paths import is_remote
from data.storage.files import write_errors
from data.storage.folders import try_lock
from data.storage.remote import ConditionalObject
from trainer.multihost import gather, is_first_process
from trainer.processes.ending import FAILED, end_process

FILE = "train.lock"
TRAINING = ("training", "--model_dir")
"""The work that a model directory is locked for, and the flag that names another directory."""
BEAT_S = 10
"""How often a training touches its lock."""
SILENCE_S = 35
"""How long another host's lock stays untouched before its training counts as dead."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """Describes the process that trains in a model directory."""

    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    host: str
    since: str
    beat: int = 0
    """Number of the write in remote storage.  S3 distinguishes writes only by their content."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S %z"))

    def dump(self) -> str:
        """Returns text for `parse`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> "Holder | None":
        """Returns the process that a lock names; None if no process trains."""
        try:
            return read_json(text, cls, FILE)
        except UserError:  # empty, or a process died while it wrote
            return None


def holder_of(model_dir: Path) -> tuple[Holder, bool] | None:
    """Returns the process that a lock names, and whether it may still train; None without one."""
    with contextlib.suppress(OSError):
        if holder := Holder.parse((model_dir / FILE).read_bytes()):
            return holder, holder.host != socket.gethostname() or _is_running(holder.pid)
    return None


@contextlib.contextmanager
def training_lock(model_dir: Path) -> Iterator[None]:
    """Locks a model directory for all processes of this run; raises if another run trains."""
    with contextlib.ExitStack() as stack:
        refusal = ""
        if is_first_process():
            try:
                stack.enter_context(lock(model_dir))
            except UserError as error:
                refusal = str(error)
        if refusal := gather(refusal)[0]:
            raise UserError(refusal)
        yield


@contextlib.contextmanager
def lock(model_dir: Path) -> Iterator[None]:
    """Locks a model directory; takes over the lock of a process that died.

    If this makes the directory and nothing is written there, the directory is removed at the end.
    """
    path, is_new = model_dir / FILE, not model_dir.exists()
    if is_remote(path):
        with lock_object(path, model_dir, *TRAINING):
            yield
        return
    with write_errors(path, "give another --model_dir"):
        model_dir.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
    with file:
        is_locked, other = try_lock(file), Holder.parse(bytes(file.buffer.read()))
        is_removed = not os.fstat(file.fileno()).st_nlink  # by the previous holder as it ended
        is_taken = is_locked is False or is_removed
        if is_taken or (other and _is_alive(path, other, is_locked=is_locked is True)):
            raise _refusal(model_dir, *TRAINING, other)
        if other:
            _warn_of_dead(path, other)
        file.seek(0)
        file.truncate()
        file.write(Holder.this_process().dump())
        file.flush()
        try:
            with _beating(lambda: os.utime(path)):
                yield
        finally:
            file.truncate(0)
            if is_new and os.listdir(model_dir) == [FILE]:
                path.unlink()
                model_dir.rmdir()


@contextlib.contextmanager
def lock_object(path: Path, target: Path, work: str, flag: str) -> Iterator[None]:
    """Locks a target in remote storage for some work.  Each beat rewrites the object."""
    lock, holder = ConditionalObject(path), Holder.this_process()
    if (other := Holder.parse(lock.read())) is not None:
        before = lock.version
        is_gone = other.host == holder.host and not _is_running(other.pid)

        def is_written() -> bool:
            lock.read()
            return lock.version != before

        if not is_gone and _shows_sign(path, other, is_written):
            raise _refusal(target, work, flag, other)
        _warn_of_dead(path, other)

    def write() -> None:
        nonlocal holder
        later = dataclasses.replace(holder, beat=holder.beat + 1)
        if not lock.write(later.dump()):
            end_process(FAILED, f"{path}: another {work} took over the lock after a silence.")
        holder = later  # a write that raised may have been made, so the next one repeats it

    if not lock.write(holder.dump()):
        raise _refusal(target, work, flag, Holder.parse(lock.read()))
    try:
        with _beating(write):
            yield
    finally:
        lock.remove()


def _refusal(target: Path, work: str, flag: str, other: Holder | None) -> UserError:
    return UserError(
        f"{target}: another {work} is under way there: {other or 'just started'}.  Wait until it "
        f"ends, stop it, or choose another {flag}."
    )


def _warn_of_dead(path: Path, other: Holder) -> None:
    logger.warning("%s: %s has ended; its lock is taken over.", path, other)


def _is_alive(path: Path, other: Holder, *, is_locked: bool) -> bool:
    """Returns whether the process that a lock names still trains.

    On this host, the system lock decides.  On another host, a process trains if it touches the
    file, since a file system may keep locks per host, or have none.
    """
    if other.host == socket.gethostname():
        return not is_locked and _is_running(other.pid)
    before = path.stat().st_mtime_ns
    return _shows_sign(path, other, lambda: path.stat().st_mtime_ns != before)


def _shows_sign(path: Path, other: Holder, is_touched: Callable[[], bool]) -> bool:
    """Waits for a sign of life from the process that a lock names."""
    logger.info("%s names %s: waiting %d s to see whether it runs.", path, other, SILENCE_S)
    until = time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        time.sleep(1)
        if is_touched():
            return True
    return False


def _is_running(pid: int) -> bool:
    """Returns whether another process of this host has this id."""
    if pid == os.getpid():  # as after the restart of a container
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def _beating(touch: Callable[[], None]) -> Iterator[None]:
    """Touches a lock regularly, for processes on other hosts."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            try:
                touch()
            except Exception as error:  # a missed beat; the next may succeed
                logger.info("the lock was not touched: %s", one_line(error))

    thread = threading.Thread(target=beat, name="training lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
