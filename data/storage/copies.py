"""Keeps copies of remote folders on this machine, where they can be mapped into memory."""

import shutil
import tempfile
from pathlib import Path

from configs.paths import REMOTE, is_remote
from data.storage import remote
from data.storage.errors import write_errors
from data.storage.folders import whole_folder
from data.storage.locks import is_used, lock
from data.storage.lookup import sizes_below

SCRATCH = Path("~/.cache/meshloom/.remote")
"""Where copies of remote data lie, by bucket and name."""


def local_copy(path: Path) -> Path:
    """Returns the path itself; of a remote one, where this machine keeps what it copies or makes of
    it.
    """
    return SCRATCH.expanduser() / str(path).removeprefix(REMOTE) if is_remote(path) else path


def fetch(folder: Path, last: str) -> Path:
    """Returns a folder of this machine: the given one, or a copy of a remote one.

    `last` names the file that is written last.  A copy that has the same one is not made again.
    """
    copy = local_copy(folder)
    if is_remote(folder):
        with lock(copy):
            if not (copy / last).exists() or (
                (copy / last).read_bytes() != (folder / last).read_bytes()
            ):
                with whole_folder(copy) as building:
                    for name, _ in remote.sizes_below(folder):
                        remote.download(folder / name, building / name)
    return copy


def publish(copy: Path, folder: Path, last: str) -> None:
    """Uploads the copy that this machine has of a remote folder: without `last` it is not whole."""
    if is_remote(folder):
        (folder / last).unlink(missing_ok=True)
        for name in sorted((name for name, _ in sizes_below(copy)), key=lambda name: name == last):
            remote.upload(copy / name, folder / name)


def remove_unused(folder: Path, first: str) -> bool:
    """Removes a folder unless a process reads or builds it; returns whether it did.

    Without the file `first`, a remote folder is not whole.
    """
    copy = local_copy(folder)
    if is_used(copy):
        return False
    if is_remote(folder):
        for name in sorted((n for n, _ in sizes_below(folder)), key=lambda name: name != first):
            (folder / name).unlink()
    if copy.exists():
        with lock(copy), write_errors(copy):
            removed = Path(tempfile.mkdtemp(dir=copy.parent, prefix=f".{copy.name}.building-"))
            copy.rename(removed)  # a reader finds the folder whole or not at all
            shutil.rmtree(removed)
    return True
