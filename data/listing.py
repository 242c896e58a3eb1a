"""Lists the caches of a folder, and removes those of a task that it no longer uses."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from configs.errors import UserError
from configs.paths import is_remote, path_of
from data import manifest
from data.build import BUILD_LOG
from data.cache import TaskCaches, cache_folders, folders_of, foreign_name
from data.manifest import CacheKey
from data.storage import folders, locks, lookup


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """Describes a cache: its size and age, how it differs, and whether a process uses it."""

    folder: Path
    task_name: str
    content_bytes: int
    written_s: float
    """Seconds since 1970; 0 where it has no manifest."""
    reasons: tuple[str, ...]
    """How it differs: from the current settings and text, or from the newest of its task."""
    is_compared: bool
    """Whether `reasons` compares with the current settings and text."""
    is_finished: bool
    """Whether it is whole; a killed build leaves one that is not."""
    is_used: bool
    """Whether a process reads or builds it, as far as this machine knows."""

    @property
    def is_prunable(self) -> bool:
        """Returns whether neither the current settings and text nor a process use it."""
        return self.is_compared and bool(self.reasons) and not self.is_used


def entries(data_dir: str | Path, caches: TaskCaches | None = None) -> list[CacheEntry]:
    """Lists the caches of a folder; those of one task are compared with its settings and text."""
    data_dir = path_of(data_dir).expanduser()
    names = dict.fromkeys(map(_task_name, cache_folders(data_dir)))
    listed = []
    for name in names:
        of_task = caches if caches is not None and caches.task.name == name else None
        newest: CacheKey | None = None
        for folder in folders_of(name, data_dir):
            try:
                stored = manifest.load(folder)
            except UserError:
                if foreign_name(folder):
                    continue
                reasons = ["it is damaged"]
            else:
                newest = newest or CacheKey.read(stored)
                reasons = (of_task or newest).differences(stored)
            listed.append(_entry(name, folder, reasons, of_task is not None, is_finished=True))
    for unfinished in [] if is_remote(data_dir) else sorted(data_dir.glob(".*.building")):
        target = unfinished.with_name(unfinished.stem.removeprefix("."))
        name = _task_name(target)
        is_compared = caches is not None and caches.task.name == name
        listed.append(_entry(name, target, ["it is not finished"], is_compared, is_finished=False))
    return listed


def prune(entry: CacheEntry) -> bool:
    """Removes a cache; returns False where a process began to use it meanwhile."""
    assert entry.is_prunable
    if not entry.is_finished:
        return folders.remove_unfinished(entry.folder)
    return folders.remove_unused(entry.folder, first=manifest.NAME)


def _entry(
    task_name: str, folder: Path, reasons: Sequence[str], is_compared: bool, *, is_finished: bool
) -> CacheEntry:
    content = folder if is_finished else folders.unfinished(folder)
    last_file = content / (manifest.NAME if is_finished else BUILD_LOG)
    return CacheEntry(
        folder=folder,
        task_name=task_name,
        content_bytes=sum(size for _, size in lookup.sizes_below(content)),
        written_s=lookup.written_s(last_file),
        reasons=tuple(reasons),
        is_compared=is_compared,
        is_finished=is_finished,
        is_used=locks.is_used(folders.local_copy(folder)),
    )


def _task_name(folder: Path) -> str:
    return folder.name.partition("@")[0]
