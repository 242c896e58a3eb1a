"""Builds a cache: trains the vocab, then encodes and packs each split to disk, chunk by chunk."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from data import disk, manifest
from data.rows import Counts, packed_lines, read_word_list
from data.task import Task
from data.vocab import Vocab, make

Report = Callable[[str], None]

VOCAB = "vocab.model"
_LINES_A_REPORT = 500_000


def build(folder: Path, task: Task, given: Vocab | None, report: Report) -> None:
    """Fills a folder with the vocab, the rows of each split and the manifest."""
    stamps = task.source.fingerprint()
    if given is None:
        report(f"{task.name}: vocab of {task.vocab.size} sub-words")
        unk_word = task.word_list is not None
        given = make(task.vocab, task.source.lines("train"), unk_word=unk_word)
    given.save(folder / VOCAB)
    splits = {s: _build_split(folder, s, task, given, report) for s in task.source.splits()}
    if stamps not in (None, task.source.fingerprint()):
        raise UserError(f"{task.name}: its text changed while it was read.  Run again.")
    made = {
        "format": manifest.FORMAT,
        "settings": manifest.settings(task),
        "fingerprint": stamps or task.source.fingerprint(),
        "content_hash": manifest.combined_hash(
            {name: split["content_hash"] for name, split in splits.items()}
        ),
        "vocab_hash": given.hash,
        "splits": splits,
        "file_bytes": {p.name: p.stat().st_size for p in sorted(folder.iterdir())},
    }
    report(f"{task.name}: content hash {made['content_hash']}")
    manifest.write(folder, made)


def _build_split(
    folder: Path, split: str, task: Task, vocab: Vocab, report: Report
) -> dict[str, Any]:
    counts, digest, shown = Counts(), hashlib.sha256(), 0
    word_list = read_word_list(task.word_list)
    parts = packed_lines(
        task.source.lines(split), vocab, task.length, word_list, packs=task.packs, digest=digest
    )
    targets = disk.GrowingArray(folder / f"{split}.targets.npy", task.length, vocab.dtype)
    segments = disk.GrowingArray(folder / f"{split}.segments.npy", task.length, np.uint16)
    with targets, segments:
        for packed, more in parts:
            targets.append(packed.targets_BL)
            segments.append(packed.segments_BL)
            counts += more
            if counts.lines >= shown + _LINES_A_REPORT:
                shown = counts.lines
                report(f"{split}: {counts.lines:,} lines so far")
    if not counts.lines:
        raise UserError(
            f"{task.name}: the split {split!r} has no lines.  "
            "Give it files of its own, or more text."
        )
    fill = counts.tokens / (counts.rows * task.length)
    report(
        f"{split}: {counts.lines:,} lines, {counts.words:,} words, {counts.tokens:,} tokens in "
        f"{counts.rows:,} rows of {task.length}, {fill:.1%} full"
    )
    return {**dataclasses.asdict(counts), "fill": fill, "content_hash": digest.hexdigest()}
