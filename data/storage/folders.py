"""Makes folders that appear whole or not at all, copies remote ones; locks folders and files.

Copies of remote folders can be mapped into memory.
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
"""Folder of the copies of remote data, by bucket and name; those of S3 are in its folder s3:."""


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
            logger.info("%s: another process is writing it; waiting for that process", target)
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
            f"{path}: another process is writing it.  Wait until it ends, or give another --output."
        )
    return file


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder next to the target, which replaces the target at the end.

    After an error nothing is left.  After a kill, the temporary folder is left under a name that
    nothing reads, and the next call removes it.  The caller holds the lock of the target.
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

    After an error nothing is left.  After a kill, Ctrl-C, `Unfinished` or a request that the
    storage failed to answer, the next call gives the same folder again, with what is in it.  The
    caller holds the lock of the target.
    """
    folder = target.parent / f".{target.name}.building"
    with write_errors(target):
        for stale in target.parent.glob(f"{folder.name}-*"):  # what a kill left of an old one
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
    """Renames a folder; s3fs cannot, so in remote storage the objects are copied, and removed."""
    if not is_remote(folder):
        folder.rename(target)
        return
    names, files = [name for name, _ in sizes_below(folder)], remote.file_system(folder)
    files.copy([f"{folder}/{name}" for name in names], [f"{target}/{name}" for name in names])
    files.rm(str(folder), recursive=True)


def local_copy(path: Path) -> Path:
    """Returns the path itself; of a remote one, where this machine keeps what it copies or makes of
    it.
    """
    return SCRATCH.expanduser() / str(path).removeprefix("gs://") if is_remote(path) else path


def fetch(folder: Path, last: str) -> Path:
    """Returns a folder of this machine: the given one, or a copy of a remote one.

    `last` names the file that is written last.  A copy that has the same one is not made again.
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
    """Uploads the copy that this machine has of a remote folder: without `last` it is not whole."""
    if is_remote(folder):
        (folder / last).unlink(missing_ok=True)
        for name in sorted((name for name, _ in sizes_below(copy)), key=lambda name: name == last):
            remote.upload(copy / name, folder / name)
