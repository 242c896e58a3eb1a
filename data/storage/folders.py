"""Makes folders atomically, copies remote ones, and locks folders and files.

Copies of remote folders can be memory-mapped.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from filelock import lock_descriptor

from configs.errors import UserError
from configs.paths import is_remote
from data.storage import remote
from data.storage.files import Unfinished, sync, write_errors
from data.storage.lookup import sizes_below

logger = logging.getLogger(__name__)

SCRATCH = Path("~/.cache/meshloom/.remote")
"""Folder for copies of remote data, by bucket and name; copies from S3 are in its folder s3:."""


def try_lock(file: IO[str] | int) -> bool | None:
    """Locks an open file until it is closed or this process ends.

    Returns False if another process holds the lock, and None if the file system has no locks.
    """
    try:
        return lock_descriptor(file if isinstance(file, int) else file.fileno(), blocking=False)
    except OSError:
        return None


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Waits until no other process on this file system builds the same folder.

    A file system without locks still gets complete folders, which may be built twice.
    """
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if try_lock(handle) is False:
            logger.info("%s: another process is writing it; waiting for that process", target)
            lock_descriptor(handle)
        yield
    finally:
        os.close(handle)


def open_alone(path: Path) -> TextIO:
    """Opens a file for appending; refuses one that another process has opened this way."""
    file = path.open("a", encoding="utf-8")
    if try_lock(file) is False:
        file.close()
        raise UserError(
            f"{path}: another process is writing it.  Wait until it ends, or give another --output."
        )
    return file


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder next to the target, which replaces the target at the end.

    After an error, nothing is left.  After a kill, the temporary folder is left under a name that
    nothing reads, and the next call removes it.  The caller must hold the lock of the target.
    """
    with write_errors(target):
        for stale in target.parent.glob(f".{target.name}.building-*"):
            shutil.rmtree(stale)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.building-"))
        try:
            yield folder
            _replace(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def resumable_folder(target: Path) -> Iterator[Path]:
    """Yields a folder next to the target, which replaces the target at the end.

    After an error, nothing is left.  After a kill, Ctrl-C, `Unfinished` or a failed storage
    request, the next call yields the same folder with its content.  The caller must hold the lock
    of the target.
    """
    folder = target.parent / f".{target.name}.building"
    with write_errors(target):
        for stale in target.parent.glob(f"{folder.name}-*"):  # old targets that a kill left
            shutil.rmtree(stale)
        folder.mkdir(exist_ok=True)
        try:
            yield folder
            _replace(folder, target)
        except Unfinished:
            raise
        except KeyboardInterrupt:
            logger.info("%s: run the same command again to resume.", target)
            raise
        except Exception as error:
            if remote.failure(error) is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _replace(folder: Path, target: Path) -> None:
    for path in folder.iterdir():
        sync(path)
    old = None
    if target.exists():
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.building-old-"))
        target.rename(old)
    sync(folder)
    folder.rename(target)
    sync(target.parent)
    if old:
        shutil.rmtree(old)


def rename(folder: Path, target: Path) -> None:
    """Renames a folder; copies and removes the objects in remote storage, as s3fs cannot rename."""
    if not is_remote(folder):
        folder.rename(target)
        return
    names, files = [name for name, _ in sizes_below(folder)], remote.file_system(folder)
    files.copy([f"{folder}/{name}" for name in names], [f"{target}/{name}" for name in names])
    files.rm(str(folder), recursive=True)


def local_copy(path: Path) -> Path:
    """Returns a local path unchanged; for a remote path, the path of its local copy."""
    return SCRATCH.expanduser() / str(path).removeprefix("gs://") if is_remote(path) else path


def fetch(folder: Path, last: str) -> Path:
    """Returns a local folder: the given one, or a copy of a remote one.

    `last` names the file that is written last.  A copy with the same content in it is reused.
    """
    copy = local_copy(folder)
    if is_remote(folder):
        with lock(copy):
            is_made = (copy / last).exists()
            if not is_made or (copy / last).read_bytes() != (folder / last).read_bytes():
                with whole_folder(copy) as building:
                    for name, _ in sizes_below(folder):
                        remote.download(folder / name, building / name)
    return copy


def publish(copy: Path, folder: Path, last: str) -> None:
    """Uploads the local copy of a remote folder, which is complete once it has the file `last`."""
    if is_remote(folder):
        (folder / last).unlink(missing_ok=True)
        for name in sorted((name for name, _ in sizes_below(copy)), key=lambda name: name == last):
            remote.upload(copy / name, folder / name)
