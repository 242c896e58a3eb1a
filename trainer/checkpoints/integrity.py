"""Tells whole checkpoints from damaged ones by a list of their files, which is written last."""

import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

T = TypeVar("T")
MANIFEST = "manifest.json"
CHECKSUM_UP_TO_BYTES = 1 << 24
"""Larger files are known by size alone, so that a look at a huge checkpoint stays cheap."""


class DamagedCheckpoint(Exception):
    """Says why a checkpoint is not whole."""


class ListingHandler(ocp.PyTreeCheckpointHandler):
    """Saves as Orbax does, and lists the files that belong to the checkpoint.

    Orbax renames the folder after `finalize`: the list is there, or the checkpoint is not.
    """

    metric: float | None = None
    higher_is_better = False

    async def async_save(self, directory: Any, args: Any) -> Any:
        self.metric, self.higher_is_better = args.metric, args.higher_is_better
        return await super().async_save(directory, args=args)

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        names = [parent / name for parent, _, files in directory.walk() for name in files]
        files = {str(name.relative_to(directory)): fingerprint(name) for name in names}
        manifest = {
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "files": files,
        }
        (directory / MANIFEST).write_text(json.dumps(manifest))


@ocp.args.register_with_handler(ListingHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Save(ocp.args.PyTreeSave):
    """Holds what to save, its metric, and which way that metric is better."""

    metric: float | None = None
    higher_is_better: bool = False


def fingerprint(file: epath.Path) -> list[int]:
    """Returns a file's size, and its checksum unless it is large."""
    size = file.stat().length
    return [size] if size > CHECKSUM_UP_TO_BYTES else [size, zlib.crc32(file.read_bytes())]


def read_manifest(folder: epath.Path) -> dict[str, Any]:
    """Returns the list of a checkpoint's files, by name, and its metric."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is missing or unreadable") from error
    return manifest


def verify(folder: epath.Path) -> None:
    """Raises `DamagedCheckpoint` unless every file is there as it was saved."""
    for name, saved in read_manifest(folder)["files"].items():
        try:
            present = fingerprint(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} is missing or unreadable") from error
        if present[0] != saved[0]:
            raise DamagedCheckpoint(f"{name} has {present[0]:,} of {saved[0]:,} bytes")
        if present != saved:
            raise DamagedCheckpoint(f"{name} is not what was saved")


def read(call: Callable[[], T]) -> T:
    """Returns what the call reads; an error in the data is damage."""
    try:
        return call()
    except (MemoryError, TypeError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax raises Exception itself for an array that ends too early
        raise DamagedCheckpoint(one_line(error)) from error


def on_all_processes(call: Callable[[], T]) -> T:
    """Returns what the call reads; what is damaged for one process is damaged for all."""
    results: list[T] = []
    damage = None
    try:
        results.append(call())
    except DamagedCheckpoint as reason:
        damage = reason
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.array(damage is not None)))
        if failed.size and damage is None:
            damage = DamagedCheckpoint(f"process {failed[0]} cannot read it")
    if damage is not None:
        raise damage
    return results[0]


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
