"""Builds a cache: trains the vocabs, then encodes and packs each split to disk, chunk by chunk."""

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data import manifest, storage
from data.packing.pair_rows import LONG
from data.packing.rows import Counts
from data.task import PackedPart, Task
from data.vocab import Vocab
from data.vocabs import Vocabs

logger = logging.getLogger(__name__)

_LINES_A_RECORD = 500_000


def build(folder: Path, task: Task, given: Mapping[str, Vocab | None]) -> None:
    """Fills a folder with the vocabs, the rows of each split and the manifest."""
    stamps = task.source.fingerprint()
    vocabs = task.make_vocabs(given.get("vocab"), given.get("source_vocab"))
    vocabs.save(folder)
    splits = {s: _build_split(folder, s, task, vocabs) for s in task.source.splits()}
    if stamps not in (None, task.source.fingerprint()):
        raise UserError(f"{task.name}: its text changed while it was read.  Run again.")
    made = {
        **manifest.CacheKey.of(task, given).written(),
        "fingerprint": stamps or task.source.fingerprint(),
        "content_hash": manifest.combined_hash(
            {name: split["content_hash"] for name, split in splits.items()}
        ),
        **vocabs.hashes(),
        "splits": splits,
        "file_bytes": {p.name: p.stat().st_size for p in sorted(folder.iterdir())},
    }
    logger.info("%s: content hash %s", task.name, made["content_hash"])
    manifest.write(folder, made)


def _build_split(folder: Path, split: str, task: Task, vocabs: Vocabs) -> dict[str, Any]:
    digest, counts, dropped, parts = hashlib.sha256(), Counts(), Counter[str](), []
    columns = task.columns(vocabs)
    with contextlib.ExitStack() as stack:
        arrays = {
            name: stack.enter_context(storage.GrowingArray(folder / f"{split}.{name}.npy", *kind))
            for name, kind in columns.items()
        }
        for part in task.packed_parts(split, vocabs, digest):
            part_counts = _write_part(part, arrays, split, counts.lines)
            if not part_counts.lines and split == "train":
                raise UserError(
                    _no_lines(task, f"{split!r} of {part.name}", part_counts, part.dropped)
                )
            counts += part_counts
            dropped.update(part.dropped)  # + would remove the reasons that drop no pair
            parts.append({"name": part.name, "dropped": dict(part.dropped)} | part_counts.written())
    if not counts.lines:
        raise UserError(_no_lines(task, repr(split), counts, dropped))
    for name in columns:
        storage.verify_written(folder / f"{split}.{name}.npy")
    logger.info("%s: %s%s", split, task.summary(counts), _losses(counts, dropped))
    entry = {**counts.written(), **task.fills(counts), "content_hash": digest.hexdigest()}
    return entry | task.part_entries(dropped, parts)


def _write_part(
    part: PackedPart, arrays: dict[str, storage.GrowingArray], split: str, lines_before: int
) -> Counts:
    """Writes the rows of a part, and logs now and then how many lines of the split are done."""
    counts, logged = Counts(), lines_before
    for packed, more in part.packed:
        for name, rows in packed.arrays().items():
            arrays[name].append(rows)
        counts += more
        if lines_before + counts.lines >= logged + _LINES_A_RECORD:
            logged = lines_before + counts.lines
            logger.info("%s: %s lines so far", split, f"{logged:,}")
    return counts


def _losses(counts: Counts, dropped: Counter[str]) -> str:
    """Describes how many pairs are not in the rows, by reason; a rule without effect has 0."""
    reasons = {**dropped, **({LONG: counts.left_out} if counts.left_out else {})}
    dropped_pairs = [f"{number:,} ({reason})" for reason, number in reasons.items()]
    return f"; not taken: {', '.join(dropped_pairs)}" if dropped_pairs else ""


def _no_lines(task: Task, split: str, counts: Counts, dropped: Counter[str]) -> str:
    lost = _losses(counts, +dropped)  # without the rules that drop no pair
    own = "a larger validation_fraction, files of its own" if "validation" in split else "files"
    remedy = "longer rows, a milder Clean" if lost else own
    return f"{task.name}: the split {split} has no lines{lost}.  Give it {remedy}, or more text."
