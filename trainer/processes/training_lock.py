"""Keeps a second training out of a model directory."""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax

from configs.errors import UserError
from data.storage import try_flock, write_errors
from trainer.multihost import gather

FILE = "train.lock"
BEAT_S = 10
"""How often a training touches its lock."""
SILENCE_S = 35
"""How long another host's lock stays untouched before its training counts as dead."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """Describes the process that trains in a model directory."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S %z"))

    @classmethod
    def read(cls, file: IO[str]) -> "Holder | None":
        """Returns what a lock says; None where nobody trains."""
        file.seek(0)
        try:
            return cls(**json.loads(file.read()))
        except (ValueError, TypeError):  # empty, or a process died while it wrote
            return None


@contextlib.contextmanager
def training_lock(model_dir: Path) -> Iterator[None]:
    """Locks a model directory for all processes of this run; raises where another run trains."""
    with contextlib.ExitStack() as stack:
        refusal = ""
        if jax.process_index() == 0:
            try:
                stack.enter_context(lock(model_dir))
            except UserError as error:
                refusal = str(error)
        if refusal := gather(refusal)[0]:
            raise UserError(refusal)
        yield


@contextlib.contextmanager
def lock(model_dir: Path) -> Iterator[None]:
    """Locks a model directory; the lock of a process that died is taken over."""
    path = model_dir / FILE
    with write_errors(path, "give another --model_dir"):
        model_dir.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
    with file:
        is_locked, other = try_flock(file), Holder.read(file)
        if is_locked is False or (other and _is_alive(path, other, is_locked=is_locked is True)):
            raise UserError(
                f"{model_dir}: another training is under way there: {other or 'just started'}.  "
                "Wait for its end, stop it, or choose another --model_dir."
            )
        if other:
            logger.warning("%s: %s has ended without a word; its lock is taken over.", path, other)
        file.seek(0)
        file.truncate()
        file.write(json.dumps(dataclasses.asdict(Holder.this_process())))
        file.flush()
        try:
            with _beating(path):
                yield
        finally:
            file.truncate(0)


def _is_alive(path: Path, other: Holder, *, is_locked: bool) -> bool:
    """Returns whether the process that a lock names still trains.

    On this host, a lock of the system tells.  A file system may keep those of each host apart, or
    have none: then it tells that the file is touched.
    """
    if other.host == socket.gethostname():
        return not is_locked and _is_running(other.pid)
    logger.info("%s names %s: waiting %d s for a sign of it.", path, other, SILENCE_S)
    before, until = path.stat().st_mtime_ns, time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        time.sleep(1)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touches a file regularly, for processes on other hosts."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="training lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
