"""Stores a task's packed rows and vocabs on disk, and finds the cache that matches a task.

A task has one cache for each combination of settings and text.  The first is in the folder `name`,
later ones are in `name@key`.  The name of a task contains no @.
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
"""Accepts the number of bytes read from files so far, and the number of all bytes."""
_EXAMPLES_PER_REPORT = 10_000
_FILES = (manifest.NAME, "*vocab.model", *(f"{split}.*.npy" for split in SPLITS), ".*")
"""Patterns of the file names in a cache, complete or damaged."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Holds a task's vocabs, its rows by split, and the manifest of its cache."""

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
        """Returns the hash of the text, and the hash of the training rows.

        If `first` is the task with only the first parts of a mixture, reads the text of these
        parts.  Returns the two hashes that this text may have, and the hash of its rows.
        """
        if first is None:
            return [self.manifest["content_hash"]], self.rows_hash
        source: Any = first.source
        parts = sum("train" in part.splits() for part in source.all_parts)
        rows = self.splits["train"].parts[parts - 1].rows.stop
        return content_hashes(manifest.split_hashes(first)), self._rows_hash(rows)

    def examples(self, task: Task, split: str, on_bytes: OnBytes) -> Iterator[Example]:
        """Yields the examples of a split, in the order in which `Documents` numbers them.

        Raises at the end if the rows were made from a different text.
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
    """Returns the rows of a task from data_dir; builds them first if they are not there yet.

    vocabs replace those that the task would train, for a model that was trained with them.
    content_hash identifies the text that a run began with: its cache is used even if the text has
    changed since.  Two or more workers are processes that import the main module again.
    """
    while True:
        caches = TaskCaches(task, data_dir, vocabs, content_hash)
        match = caches.find(allow_damaged=rebuild)
        if match.stored is not None and not rebuild:
            return caches.open(match)
        copy = folders.local_copy(match.folder)
        with folders.lock(copy):
            # Meanwhile, another process may have built it, or another cache with this name.
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
    """Holds the folder of the cache that matches a task, or of the one to build."""

    folder: Path
    stored: dict[str, Any] | None = None
    """The manifest of the cache; None if the cache has yet to be built."""
    reason: str = ""
    """Why it is built next to the task's most similar cache, if there is one."""


class TaskCaches:
    """Finds and opens the cache that matches a task, among those of other settings and texts."""

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
        """Returns the matching cache, or where to build it; raises if a cache is damaged."""
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
        """Returns the manifest of the matching cache; None if there is no complete one."""
        with contextlib.suppress(UserError):
            return self.find().stored
        return None

    def open_if_built(self) -> Prepared | None:
        """Opens the matching cache if data_dir has one; builds nothing."""
        match = self.find()
        return None if match.stored is None else self.open(match)

    def open(self, match: Match) -> Prepared:
        """Opens the matching cache."""
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
            try:  # a read-only cache is used as it is
                for place in dict.fromkeys([match.folder, folder]):  # and its local copy
                    manifest.write(place, stored)
            except Exception as error:  # a storage library raises almost anything
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
    """Returns the folders in data_dir that hold the rows of a task, complete or not."""
    paths = [path for path in path_of(data_dir).expanduser().glob("[!.]*") if path.is_dir()]
    kept = (manifest.NAME, "*.npy")
    return sorted(p for p in paths if any(next(p.glob(name), None) for name in kept))


def folders_of(task_name: str, data_dir: Path) -> list[Path]:
    """Returns the folders of a task's caches, newest first; remote ones only with a manifest.

    Anything with the name of the first cache counts as one, so that it is not overwritten.
    """
    paths = [data_dir / task_name, *data_dir.glob(f"{task_name}@*")]
    present = [p for p in paths if (p / manifest.NAME if is_remote(p) else p).exists()]
    return sorted(present, key=lambda f: lookup.written_s(f / manifest.NAME), reverse=True)


def foreign_name(folder: Path) -> str | None:
    """Returns the name of something that is not part of a cache: the folder must not be removed.

    Returns the name of the folder itself if it is a file.
    """
    if not folder.is_dir():
        return folder.name
    names = sorted(path.name for path in folder.iterdir())
    return next((n for n in names if not any(fnmatch.fnmatch(n, p) for p in _FILES)), None)


def check_rows(folder: Path) -> None:
    """Reads every row of a cache; raises `UserError` if one is damaged."""
    folder = folders.fetch(folder, last=manifest.NAME)
    for path in sorted(set(folder.glob("*.npy")) - set(folder.glob("*.crc32.npy"))):
        CheckedArray(path).verify_all()
