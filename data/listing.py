"""Lists the caches of a folder, and removes those of a task that its settings do without."""

import dataclasses
from pathlib import Path

from configs.errors import UserError
from configs.paths import path_of
from data import manifest, storage
from data.cache import TaskCaches, cache_folders, folders_of
from data.manifest import CacheKey


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """Describes a cache: its size and age, how it differs, and whether a process uses it."""

    folder: Path
    task_name: str
    content_bytes: int
    written_s: float
    """Seconds since 1970; 0 where it has no manifest."""
    reasons: tuple[str, ...]
    """How it differs: from the settings and the text of now, or from the newest of its task."""
    is_compared: bool
    """Whether `reasons` compares with the settings and the text of now."""
    is_used: bool
    """Whether a process reads or builds it, as far as this machine knows."""

    @property
    def is_prunable(self) -> bool:
        """Tells whether the settings and the text of now do without it, and no process uses it."""
        return self.is_compared and bool(self.reasons) and not self.is_used


def entries(data_dir: str | Path, caches: TaskCaches | None = None) -> list[CacheEntry]:
    """Lists the caches of a folder; those of one task are compared with its settings and text."""
    data_dir = path_of(data_dir).expanduser()
    names = dict.fromkeys(folder.name.partition("@")[0] for folder in cache_folders(data_dir))
    listed = []
    for name in names:
        of_task = caches if caches is not None and caches.task.name == name else None
        listed += _entries_of_task(name, folders_of(name, data_dir), of_task)
    return listed


def prune(entry: CacheEntry) -> bool:
    """Removes a cache; returns False where a process began to use it meanwhile."""
    assert entry.is_prunable
    return storage.remove_unused(entry.folder, first=manifest.NAME)


def _entries_of_task(name: str, folders: list[Path], caches: TaskCaches | None) -> list[CacheEntry]:
    newest: CacheKey | None = None
    listed = []
    for folder in folders:
        try:
            stored = manifest.load(folder)
        except UserError:
            reasons = ["it is damaged"]
        else:
            newest = newest or CacheKey.read(stored)
            reasons = (caches or newest).differences(stored)
        listed.append(
            CacheEntry(
                folder=folder,
                task_name=name,
                content_bytes=sum(size for _, size in storage.sizes_below(folder)),
                written_s=storage.written_s(folder / manifest.NAME),
                reasons=tuple(reasons),
                is_compared=caches is not None,
                is_used=storage.is_used(storage.local_twin(folder)),
            )
        )
    return listed
