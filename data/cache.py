"""The cache: a task's packed rows and vocab on disk, and the proof that they still belong to it."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from data import disk, manifest
from data.build import VOCAB, Report, build
from data.rows import Counts, Rows
from data.task import Task
from data.vocab import Vocab


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A task's vocab, its rows by split, and what the cache says about them."""

    vocab: Vocab
    splits: dict[str, Rows]
    manifest: dict[str, Any]


def prepare(
    task: Task,
    data_dir: str | Path,
    *,
    vocab: Vocab | None = None,
    rebuild: bool = False,
    report: Report = lambda line: None,
) -> Prepared:
    """Returns the rows of a task from data_dir, building them first where they are not there yet.

    vocab replaces the one that the task would train, for a model that was trained with it.
    """
    folder = Path(data_dir).expanduser() / task.name
    if not rebuild and folder.exists():
        return _open(folder, task, vocab, report)
    with disk.lock(folder):
        if rebuild or not folder.exists():  # another process may have built it meanwhile
            with disk.whole_folder(folder) as building:
                build(building, task, vocab, report)
    return _open(folder, task, vocab, report)


def _open(folder: Path, task: Task, given: Vocab | None, report: Report) -> Prepared:
    found = manifest.read(folder)
    now = manifest.settings(task)
    cached = dict(found["settings"])
    if given is not None:
        cached["vocab"], now["vocab"] = found["vocab_hash"][:16], given.hash[:16]
    manifest.refuse(folder, cached, now)
    found = _check_text(folder, found, task, report)
    vocab = Vocab.load(folder / VOCAB)
    if vocab.hash != found["vocab_hash"]:
        raise UserError(f"{folder / VOCAB}: the file is damaged.  {manifest.rebuild_hint()}")
    splits = {name: _rows(folder, name, entry) for name, entry in found["splits"].items()}
    return Prepared(vocab, splits, found)


def _check_text(folder: Path, found: dict[str, Any], task: Task, report: Report) -> dict[str, Any]:
    """Compares the text with the cache's: by sizes and dates, and only if these differ by hash."""
    stamps = task.source.fingerprint()
    if stamps is None:
        report(f"{task.name}: its text is not on this machine; the cache in {folder} is used")
    elif stamps != found["fingerprint"]:
        report(f"{task.name}: file dates or versions changed; comparing the text with the cache")
        text_hash = manifest.text_hash(task.source)
        manifest.refuse(folder, {"text": found["content_hash"][:16]}, {"text": text_hash[:16]})
        found = {**found, "fingerprint": stamps}
        with contextlib.suppress(OSError):  # a cache that cannot be written serves all the same
            manifest.write(folder, found)
    return found


def _rows(folder: Path, split: str, entry: dict[str, Any]) -> Rows:
    counts = Counts(**{f.name: entry[f.name] for f in dataclasses.fields(Counts)})
    targets_BL, segments_BL = (
        np.load(folder / f"{split}.{name}.npy", mmap_mode="r") for name in ("targets", "segments")
    )
    return Rows(targets_BL, segments_BL, counts)
