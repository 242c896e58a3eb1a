"""Builds a cache: trains the vocabs, then encodes and packs each split to disk, chunk by chunk."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.errors import UserError
from data import manifest, storage
from data.packing.pack import Packed
from data.packing.pair_rows import LONG, packed_pairs
from data.packing.rows import Counts, packed_lines, read_word_list
from data.sources.pairs import Pair
from data.task import Task, Translation
from data.vocab import Vocab
from data.vocabs import Report, Vocabs, make_vocabs

_LINES_A_REPORT = 500_000


class _Part(NamedTuple):
    """One part of a split while it is packed; dropped is complete after the last rows."""

    name: str
    packed: Iterator[tuple[Packed, Counts]]
    dropped: Counter[str]


def build(
    folder: Path, task: Task, vocab: Vocab | None, source_vocab: Vocab | None, report: Report
) -> None:
    """Fills a folder with the vocabs, the rows of each split and the manifest."""
    stamps = task.source.fingerprint()
    vocabs = make_vocabs(task, vocab, source_vocab, report)
    vocabs.save(folder)
    splits = {s: _build_split(folder, s, task, vocabs, report) for s in task.source.splits()}
    if stamps not in (None, task.source.fingerprint()):
        raise UserError(f"{task.name}: its text changed while it was read.  Run again.")
    made = {
        "format": manifest.FORMAT,
        "settings": manifest.settings(task),
        "fingerprint": stamps or task.source.fingerprint(),
        "content_hash": manifest.combined_hash(
            {name: split["content_hash"] for name, split in splits.items()}
        ),
        **vocabs.hashes(),
        "splits": splits,
        "file_bytes": {p.name: p.stat().st_size for p in sorted(folder.iterdir())},
    }
    report(f"{task.name}: content hash {made['content_hash']}")
    manifest.write(folder, made)


def _build_split(
    folder: Path, split: str, task: Task, vocabs: Vocabs, report: Report
) -> dict[str, Any]:
    digest, counts, dropped, parts = hashlib.sha256(), Counts(), Counter[str](), []
    columns = _columns(task, vocabs)
    with contextlib.ExitStack() as stack:
        arrays = {
            name: stack.enter_context(storage.GrowingArray(folder / f"{split}.{name}.npy", *kind))
            for name, kind in columns.items()
        }
        for part in _parts(task, split, vocabs, digest):
            own = _write_part(part, arrays, _progress(report, split, counts.lines))
            if not own.lines and split == "train":
                raise UserError(_no_lines(task, f"{split!r} of {part.name}", own, part.dropped))
            counts, dropped = counts + own, dropped + part.dropped
            parts.append({"name": part.name, "dropped": dict(part.dropped)} | own.written())
    if not counts.lines:
        raise UserError(_no_lines(task, repr(split), counts, dropped))
    report(f"{split}: {_summary(task, counts, dropped)}")
    entry = {**counts.written(), **_fills(task, counts), "content_hash": digest.hexdigest()}
    if isinstance(task, Translation):
        entry |= {"dropped": dict(dropped), "parts": parts}
    return entry


def _columns(task: Task, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
    """Names the arrays of a split's rows, each with its columns and its type."""
    found: dict[str, tuple[int, type]] = {
        "targets": (task.length, vocabs.target.dtype),
        "segments": (task.length, np.uint16),
    }
    if isinstance(task, Translation):
        found["sources"] = (task.source_length, vocabs.of_source.dtype)
        found["source_segments"] = (task.source_length, np.uint16)
    return found


def _parts(task: Task, split: str, vocabs: Vocabs, digest: "hashlib._Hash") -> Iterator[_Part]:
    """Yields the parts of a split, one after another; digest is fed the raw text."""
    if not isinstance(task, Translation):
        lines, words = task.source.lines(split), read_word_list(task.word_list)
        packed: Iterator[tuple[Packed, Counts]] = packed_lines(
            lines, vocabs.target, task.length, words, packs=task.packs, digest=digest
        )
        yield _Part(type(task.source).__name__, packed, Counter())
        return
    for name, source in task.source.parts_of(split).items():
        dropped = Counter[str]()
        pairs = _hashed(source.untagged(split, task.clean.errors), digest)
        kept = task.clean.kept(pairs, split, dropped)
        yield _Part(
            name,
            packed_pairs(
                kept, vocabs.of_source, vocabs.target, task.source_length, task.length,
                packs=task.packs, tag=source.tag,
            ),
            dropped,
        )  # fmt: skip


def _hashed(pairs: Iterable[Pair], digest: "hashlib._Hash") -> Iterator[Pair]:
    for pair in pairs:
        digest.update(manifest.hashed_bytes("\t".join(pair)))
        yield pair


def _write_part(
    part: _Part, arrays: dict[str, storage.GrowingArray], progress: Callable[[int], None]
) -> Counts:
    counts = Counts()
    for packed, more in part.packed:
        for name, rows in packed.arrays().items():
            arrays[name].append(rows)
        counts += more
        progress(counts.lines)
    return counts


def _progress(report: Report, split: str, before: int) -> Callable[[int], None]:
    """Returns what reports a number of lines, beyond those before, now and then."""
    shown = before

    def progress(lines: int) -> None:
        nonlocal shown
        if before + lines >= shown + _LINES_A_REPORT:
            shown = before + lines
            report(f"{split}: {shown:,} lines so far")

    return progress


def _fills(task: Task, counts: Counts) -> dict[str, float]:
    fills = {"fill": counts.tokens / (counts.rows * task.length)}
    if isinstance(task, Translation):
        fills["source_fill"] = counts.source_tokens / (counts.rows * task.source_length)
    return fills


def _summary(task: Task, counts: Counts, dropped: Counter[str]) -> str:
    fill = _fills(task, counts)
    if not isinstance(task, Translation):
        return (
            f"{counts.lines:,} lines, {counts.words:,} words, {counts.tokens:,} tokens in "
            f"{counts.rows:,} rows of {task.length}, {fill['fill']:.1%} full"
        )
    return (
        f"{counts.lines:,} pairs, {counts.source_words:,} and {counts.words:,} words, "
        f"{counts.source_tokens:,} and {counts.tokens:,} tokens in {counts.rows:,} rows of "
        f"{task.source_length} and {task.length}, {fill['source_fill']:.1%} and "
        f"{fill['fill']:.1%} full{_losses(counts, dropped)}"
    )


def _losses(counts: Counts, dropped: Counter[str]) -> str:
    """Says how many pairs are not in the rows, and why."""
    reasons = {**dropped, LONG: counts.left_out}
    found = [f"{number:,} ({reason})" for reason, number in reasons.items() if number]
    return f"; not taken: {', '.join(found)}" if found else ""


def _no_lines(task: Task, split: str, counts: Counts, dropped: Counter[str]) -> str:
    lost = _losses(counts, dropped)
    remedy = "longer rows, a milder Clean" if lost else "files of its own"
    return f"{task.name}: the split {split} has no lines{lost}.  Give it {remedy}, or more text."
