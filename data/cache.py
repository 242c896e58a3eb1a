"""Keeps a task's packed rows and vocabs on disk, and checks that they still belong to it."""

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.paths import is_remote, path_of
from data import manifest, storage
from data.build import build
from data.packing.rows import Rows
from data.task import Task
from data.vocab import Vocab
from data.vocabs import Vocabs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Holds a task's vocabs, its rows by split, and what the cache says about them."""

    vocab: Vocab
    source_vocab: Vocab | None
    """Equal to vocab where one serves both sides; None where there is no source side."""
    splits: dict[str, Rows]
    manifest: dict[str, Any]

    @property
    def vocabs(self) -> Vocabs:
        return Vocabs(self.vocab, self.source_vocab)


def prepare(
    task: Task,
    data_dir: str | Path,
    *,
    vocab: Vocab | None = None,
    source_vocab: Vocab | None = None,
    rebuild: bool = False,
) -> Prepared:
    """Returns the rows of a task from data_dir, building them first where they are not there yet.

    vocab and source_vocab replace those that the task would train, for a model that was trained
    with them.
    """
    given = {"vocab": vocab, "source_vocab": source_vocab}
    folder = cache_folder(task, data_dir)
    if not rebuild and is_there(folder):
        return _open(folder, task, given)
    twin = storage.local_twin(folder)
    with storage.lock(twin):
        if rebuild or not is_there(folder):  # another process may have built it meanwhile
            with storage.whole_folder(twin) as building:
                build(building, task, vocab, source_vocab)
            storage.publish(twin, folder, last=manifest.NAME)
    return _open(folder, task, given)


def cache_folder(task: Task, data_dir: str | Path) -> Path:
    """Returns the folder of a task's rows in data_dir."""
    return path_of(data_dir).expanduser() / task.name


def is_there(folder: Path) -> bool:
    """Tells whether a folder of rows was written; a remote one is whole with its manifest."""
    return (folder / manifest.NAME if is_remote(folder) else folder).exists()


def open_prepared(task: Task, data_dir: str | Path) -> Prepared | None:
    """Returns the rows of a task where data_dir has them; builds nothing."""
    folder = cache_folder(task, data_dir)
    return _open(folder, task, {}) if is_there(folder) else None


def cache_folders(data_dir: str | Path) -> list[Path]:
    """Returns the folders of data_dir that hold the rows of a task, or did."""
    folders = [path for path in path_of(data_dir).expanduser().glob("[!.]*") if path.is_dir()]
    kept = (manifest.NAME, "*.npy")
    return sorted(f for f in folders if any(next(f.glob(name), None) for name in kept))


def check_rows(folder: Path) -> bool:
    """Reads every row of a cache and raises where one is damaged.

    Returns False where an older version wrote rows without checksums.
    """
    folder = storage.fetch(folder, last=manifest.NAME)
    sums = set(folder.glob("*.crc32.npy"))
    paths = sorted(set(folder.glob("*.npy")) - sums)
    for path in paths:
        storage.CheckedArray(path, manifest.rebuild_hint()).verify_all()
    return all(storage.checksums_path(path) in sums for path in paths)


def _open(folder: Path, task: Task, given: dict[str, Vocab | None]) -> Prepared:
    folder = storage.fetch(folder, last=manifest.NAME)
    stored = manifest.read(folder)
    now = manifest.settings(task)
    cached = dict(stored["settings"])
    for name, vocab in given.items():
        if vocab is not None:
            cached[name], now[name] = stored.get(f"{name}_hash", "")[:16], vocab.hash[:16]
    manifest.refuse(folder, cached, now)
    stored = _check_text(folder, stored, task)
    vocabs = Vocabs.load(folder, task.source_vocab_file)
    for name, hash_now in vocabs.hashes().items():
        if stored[name] != hash_now:
            file = folder / f"{name.removesuffix('_hash')}.model"
            raise UserError(f"{file}: the file is damaged.  {manifest.rebuild_hint()}")
    entries = stored["splits"].items()
    splits = {name: _rows(folder, name, entry, task, vocabs) for name, entry in entries}
    return Prepared(vocabs.target, vocabs.source, splits, stored)


def _check_text(folder: Path, stored: dict[str, Any], task: Task) -> dict[str, Any]:
    """Compares the text with the cache's: by sizes and dates, and only if these differ by hash."""
    stamps = task.source.fingerprint()
    if stamps is None:
        logger.info(
            "%s: its text is not on this machine; the cache in %s is used", task.name, folder
        )
    elif stamps != stored["fingerprint"]:
        logger.info(
            "%s: file dates or versions changed; comparing the text with the cache", task.name
        )
        text_hash = manifest.text_hash(task)
        manifest.refuse(folder, {"text": stored["content_hash"][:16]}, {"text": text_hash[:16]})
        stored = {**stored, "fingerprint": stamps}
        with contextlib.suppress(OSError):  # a cache that cannot be written serves all the same
            manifest.write(folder, stored)
    return stored


def _rows(folder: Path, split: str, entry: dict[str, Any], task: Task, vocabs: Vocabs) -> Rows:
    def array(name: str) -> storage.CheckedArray:
        return storage.CheckedArray(folder / f"{split}.{name}.npy", manifest.rebuild_hint())

    return task.cached_rows(split, entry, array, vocabs)
