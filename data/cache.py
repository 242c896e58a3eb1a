"""Keeps a task's packed rows and vocabs on disk, and finds those that belong to it.

A task has a cache for each of its settings and texts: the first in the folder `name`, later ones
in `name@key`.  A task's name has no @.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.paths import is_remote, path_of
from data import manifest
from data.build import OnProgress, build, content_hashes
from data.documents import Documents
from data.manifest import CacheKey
from data.packing.rows import Rows
from data.sources.compression import counted_bytes
from data.sources.text import SPLITS
from data.storage import folders, lookup, remote
from data.storage.arrays import REBUILD, CheckedArray
from data.task import Example, Task
from data.vocabs import Vocabs

logger = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]
"""Takes how many bytes of files are read, and how many there are."""
_EXAMPLES_PER_REPORT = 10_000
_FILES = (manifest.NAME, "*vocab.model", *(f"{split}.*.npy" for split in SPLITS), ".*")
"""Patterns of the names in a cache, whole or damaged."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Holds a task's vocabs, its rows by split, and what the cache says about them."""

    vocabs: Vocabs
    splits: dict[str, Rows]
    manifest: dict[str, Any]
    folder: Path

    @functools.cached_property
    def rows_hash(self) -> str:
        """Returns a hash of the training rows."""
        return self._rows_hash(len(self.splits["train"]))

    def _rows_hash(self, rows: int) -> str:
        arrays: Mapping[str, Any] = self.splits["train"].arrays
        sums = b"".join(arrays[name].checksums(rows) for name in sorted(arrays))
        return hashlib.sha256(sums).hexdigest()[:16]

    def hashes(self, first: Task | None) -> tuple[Sequence[str], str]:
        """Returns the hash that the text has, and that of the training rows.

        Given the task of the first parts of a mixture, it reads their text, and returns the two
        hashes that this may have, and that of their rows.
        """
        if first is None:
            return [self.manifest["content_hash"]], self.rows_hash
        source: Any = first.source
        parts = sum("train" in part.splits() for part in source.all_parts)
        rows = self.splits["train"].parts[parts - 1].rows.stop
        return content_hashes(manifest.split_hashes(first)), self._rows_hash(rows)

    def examples(self, task: Task, split: str, on_bytes: OnBytes) -> Iterator[Example]:
        """Yields the examples of a split, in the order in which `Documents` counts them.

        Raises at the end where the rows were made from another text.
        """
        digest, total = hashlib.sha256(), task.source.bytes_to_read(split)
        with counted_bytes() as counter:
            parts = task.parts_of_text(split, digest)
            for number, example in enumerate(x for part in parts for x in part.examples):
                yield example
                if total and not number % _EXAMPLES_PER_REPORT:
                    on_bytes(min(counter.total(), total), total)
        if digest.hexdigest() != self.manifest["splits"][split]["content_hash"]:
            raise UserError(
                f"{task.name}: its text has changed since its rows of {split!r} were built.  "
                "Restore the old text."
            )


def prepare(
    task: Task,
    data_dir: str | Path,
    *,
    vocabs: Vocabs | None = None,
    content_hash: str | None = None,
    rebuild: bool = False,
    worker_count: int = 1,
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Returns the rows of a task from data_dir, building them first where they are not there yet.

    vocabs replace those that the task would train, for a model that was trained with them.
    content_hash names the text that a run began with: its cache serves although the text has
    changed since.  More workers than one are processes, which import the main module again.
    """
    while True:
        caches = TaskCaches(task, data_dir, vocabs, content_hash)
        match = caches.find(allow_damaged=rebuild)
        if match.stored is not None and not rebuild:
            return caches.open(match)
        copy = folders.local_copy(match.folder)
        with folders.lock(copy):
            # Another process may have built it meanwhile, or another cache of this name.
            if caches.find(allow_damaged=rebuild) != match:
                continue
            if match.reason:
                logger.info("%s: builds %s %s.", task.name, match.folder, match.reason)
            with folders.resumable_folder(copy) as building:
                build(building, task, vocabs, worker_count, on_progress)
            folders.publish(copy, match.folder, last=manifest.NAME)
        rebuild = False


@dataclasses.dataclass(frozen=True)
class Match:
    """Holds the folder that serves a task, or the one to build."""

    folder: Path
    stored: dict[str, Any] | None = None
    """The manifest of the cache; None where it is to be built."""
    reason: str = ""
    """Why it is built next to the nearest cache of the task, if there is one."""


class TaskCaches:
    """Finds and opens the cache of a task, among those of other settings and texts."""

    def __init__(
        self,
        task: Task,
        data_dir: str | Path,
        vocabs: Vocabs | None = None,
        content_hash: str | None = None,
    ):
        self.task, self.data_dir = task, path_of(data_dir).expanduser()
        remote.check_writable(self.data_dir)
        remote.check_bucket(self.data_dir)
        self.key = CacheKey.of(task, vocabs)
        self._content_hash = content_hash

    def find(self, *, allow_damaged: bool = False) -> Match:
        """Returns the cache that serves, or where to build it; raises where one is damaged."""
        readable, damaged = [], list[tuple[Path, UserError]]()
        for folder in folders_of(self.task.name, self.data_dir):
            try:
                readable.append((folder, manifest.load(folder)))
            except UserError as error:
                damaged.append((folder, error))
        for folder, stored in readable:
            if self._is_of_the_run(stored):
                return Match(folder, stored)
        differences = dict[Path, list[str]]()
        for folder, stored in readable:
            differences[folder] = self.differences(stored)
            if not differences[folder]:
                return Match(folder, stored)
        if damaged:
            place, problem = damaged[0]
            if name := foreign_name(place):
                raise UserError(
                    f"{place}: is not a cache, because it contains {name}.  Give another "
                    f"--data_dir or {type(self.task).__name__}.name."
                )
            if not allow_damaged:
                raise problem
            return Match(place)
        folder = self.data_dir / self.task.name
        if not differences:
            return Match(folder)
        name = f"{self.task.name}@{self.key.digest(self._stamps)}"
        nearest = min(differences, key=lambda folder: len(differences[folder]))
        reason = f"next to {nearest.name}, because {'; '.join(differences[nearest])}"
        return Match(folder.with_name(name), reason=reason)

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """Describes how a cache differs from the current settings, versions and text."""
        if reasons := self.key.differences(stored):
            return reasons
        if self._stamps in (None, stored["fingerprint"]) or stored["text_hash"] == self._text_hash:
            return []
        before = stored["fingerprint"] or {}
        changed = [
            manifest.difference(name, before.get(name), value)  # versions of packages
            for name, value in (self._stamps or {}).items()
            if isinstance(value, str) and value != before.get(name)
        ]
        return [f"the text changed ({', '.join(changed)})" if changed else "the text changed"]

    def manifest(self) -> dict[str, Any] | None:
        """Returns the manifest of the cache that serves; None without a whole one."""
        with contextlib.suppress(UserError):
            return self.find().stored
        return None

    def open_if_built(self) -> Prepared | None:
        """Returns the rows of the task where data_dir has them; builds nothing."""
        match = self.find()
        return None if match.stored is None else self.open(match)

    def open(self, match: Match) -> Prepared:
        """Opens the cache that serves."""
        task = self.task
        folder = folders.fetch(match.folder, last=manifest.NAME)
        stored = manifest.read(folder)
        if self._stamps is None:
            logger.info(
                "%s: its text is not on this machine; the cache in %s is used", task.name, folder
            )
        elif self._stamps != stored["fingerprint"] and self._is_of_the_run(stored):
            logger.info(
                "%s: the dates or versions of its text changed; the run keeps its original rows, "
                "in %s", task.name, folder,
            )  # fmt: skip
        elif self._stamps != stored["fingerprint"]:
            stored = {**stored, "fingerprint": self._stamps}
            try:  # a cache that cannot be written is used as it is
                for place in dict.fromkeys([match.folder, folder]):  # and its local copy
                    manifest.write(place, stored)
            except Exception as error:  # a storage raises almost anything
                if not isinstance(error, OSError | UserError) and not remote.failure(error):
                    raise
        vocabs = Vocabs.load(folder, task.source_vocab_file)
        for name, hash_now in vocabs.hashes().items():
            if stored.get(name) != hash_now:
                file = folder / f"{name.removesuffix('_hash')}.model"
                raise UserError(f"{file}: the file is damaged.  {REBUILD}")
        splits, columns = {}, [*task.columns(vocabs)]
        for name, entry in stored["splits"].items():
            arrays = {column: CheckedArray(folder / f"{name}.{column}.npy") for column in columns}
            documents = Documents.open(folder, name, entry)
            rows = task.cached_rows(name, entry, arrays, vocabs)
            splits[name] = dataclasses.replace(rows, documents=documents)
        return Prepared(vocabs, splits, stored, match.folder)

    def _is_of_the_run(self, stored: dict[str, Any]) -> bool:
        return (
            self._content_hash is not None
            and stored.get("content_hash") == self._content_hash
            and not self.key.differences(stored, any_version=True)
        )

    @functools.cached_property
    def _stamps(self) -> dict[str, Any] | None:
        return self.task.source.fingerprint()

    @functools.cached_property
    def _text_hash(self) -> str:
        logger.info(
            "%s: file dates or versions changed; comparing the text with the cache", self.task.name
        )
        return manifest.combined_hash(manifest.split_hashes(self.task))


def cache_folders(data_dir: str | Path) -> list[Path]:
    """Returns the folders of data_dir that hold the rows of a task, or did."""
    paths = [path for path in path_of(data_dir).expanduser().glob("[!.]*") if path.is_dir()]
    kept = (manifest.NAME, "*.npy")
    return sorted(p for p in paths if any(next(p.glob(name), None) for name in kept))


def folders_of(task_name: str, data_dir: Path) -> list[Path]:
    """Returns the folders of a task's caches, newest first; a remote one is whole by its manifest.

    Anything with the name of the first cache counts as one, so that it is not overwritten.
    """
    paths = [data_dir / task_name, *data_dir.glob(f"{task_name}@*")]
    present = [p for p in paths if (p / manifest.NAME if is_remote(p) else p).exists()]
    return sorted(present, key=lambda f: lookup.written_s(f / manifest.NAME), reverse=True)


def foreign_name(folder: Path) -> str | None:
    """Returns a name in a folder that no cache has: the folder is not to be removed.

    Returns the name of the folder itself where it is a file.
    """
    if not folder.is_dir():
        return folder.name
    names = sorted(path.name for path in folder.iterdir())
    return next((n for n in names if not any(fnmatch.fnmatch(n, p) for p in _FILES)), None)


def check_rows(folder: Path) -> None:
    """Reads every row of a cache and raises where one is damaged."""
    folder = folders.fetch(folder, last=manifest.NAME)
    for path in sorted(set(folder.glob("*.npy")) - set(folder.glob("*.crc32.npy"))):
        CheckedArray(path).verify_all()
