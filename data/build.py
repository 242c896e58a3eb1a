"""Builds a cache: trains the vocabs, then encodes and packs each split to disk, chunk by chunk.

A chunk is a fixed amount of text, and its rows hold no other text.  So the rows are always the
same: with any number of processes, and when they are computed again after a kill.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.json_reader import whole_lines
from data import documents, manifest, workers
from data.documents import noted
from data.packing.rows import Counts
from data.sources.compression import counted_bytes
from data.storage.arrays import GrowingArray, verify_written
from data.task import Example, PartOfText, Task
from data.vocabs import Vocabs

logger = logging.getLogger(__name__)

BUILD_LOG = "building.jsonl"
# Limits of a chunk.  Rows of 256 are filled as well as with a single chunk, to within 0.5 %.
_CHUNK_CHARACTERS = 1 << 24
_CHUNK_EXAMPLES = 1 << 18
_LINES_PER_RECORD = 500_000

OnProgress = Callable[[str, Counts, float | None], None]
"""Accepts a split, the counts of its rows so far, and the share of its files read, if known."""
PackedChunk = tuple[dict[str, np.ndarray], Counts]


class BuildLog:
    """Keeps a log file with a line for the cache's key, its vocabs, and each chunk and split.

    A "chunk" line follows the chunk's rows.  It holds the split, the hash of the split's text up to
    the chunk's end, the counts, the checksums of the arrays and the number of pieces.
    """

    def __init__(self, folder: Path, key: str):
        """Reads the log in a folder; empties the folder and begins a new log if the key differs."""
        self._path = folder / BUILD_LOG
        lines = whole_lines(self._path)
        if not lines or lines[0] != {"key": key}:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            lines = [{"key": key}]
        self.vocab_hashes: dict[str, str] | None = None
        self.chunks: dict[str, list[dict[str, Any]]] = {}
        self.splits: dict[str, dict[str, Any]] = {}
        for line in lines[1:]:
            self._take(line)
        # Drops a last line that a kill has cut.
        self._path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _take(self, line: dict[str, Any]) -> None:
        if "chunk" in line:
            self.chunks.setdefault(line["chunk"]["split"], []).append(line["chunk"])
        elif "split" in line:
            self.splits[line["split"]] = line["entry"]
        elif line["vocabs"] != self.vocab_hashes:  # rows made with other vocabs are forgotten
            self.vocab_hashes = line["vocabs"]
            self.chunks.clear()
            self.splits.clear()

    def add(self, **line: Any) -> None:
        """Adds a line: the "vocabs", a "chunk", or a "split" with its "entry"."""
        self._take(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns a checksum of each array."""
    return {name: zlib.crc32(np.ascontiguousarray(a).data) for name, a in arrays.items()}


def packing(task: Task, vocabs: Vocabs) -> Callable[..., PackedChunk]:
    """Returns the function that packs a chunk into rows; each worker calls this once."""
    pack = task.chunk_packer(vocabs)

    def pack_arrays(*job: Any) -> PackedChunk:
        packed, counts = pack(*job)
        _, rows, segments = packed.pieces.T
        pieces = packed.pieces[np.lexsort((segments, rows)), :2].astype(np.uint32)
        return {**packed.arrays, "pieces": pieces}, counts

    return pack_arrays


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Holds examples of one part of a split, and the hash of the split's text up to their end."""

    part: int
    tag: str | None
    examples: list[Example]
    size: int
    text_hash: str
    bytes_read: int
    """Bytes read from the files of the split up to the end of the chunk."""


def build(
    folder: Path,
    task: Task,
    given: Vocabs | None,
    worker_count: int,
    on_progress: OnProgress | None = None,
) -> None:
    """Writes the vocabs, the rows of each split and the manifest into a folder.

    Keeps what a killed build left in the folder.
    """
    stamps = task.source.fingerprint()
    key = manifest.CacheKey.of(task, given)
    log = BuildLog(folder, key.digest(stamps))
    vocabs = _make_vocabs(folder, task, given, log)
    builder = SplitBuilder(folder, task, vocabs, log, worker_count, on_progress)
    built = {name: log.splits.get(name) or builder.build(name) for name in task.source.splits()}
    splits = {name: entry for name, entry in built.items() if entry}
    if stamps not in (None, task.source.fingerprint()):
        raise UserError(f"{task.name}: its text changed while it was read.  Run again.")
    digests = {name: split["content_hash"] for name, split in splits.items()}
    text_hash, of_chunks = content_hashes(digests)
    has_chunks = any(split["chunks"] > 1 for split in splits.values())  # once packed as one
    files = [p for p in sorted(folder.iterdir()) if p.name not in (BUILD_LOG, manifest.NAME)]
    made = {
        **key.written(),
        "fingerprint": stamps or task.source.fingerprint(),
        "content_hash": of_chunks if has_chunks else text_hash,
        "text_hash": text_hash,
        **vocabs.hashes(),
        "splits": splits,
        "file_bytes": {path.name: path.stat().st_size for path in files if path.is_file()},
    }
    logger.info("%s: content hash %s", task.name, made["content_hash"])
    manifest.write(folder, made)
    (folder / BUILD_LOG).unlink()  # the cache is complete


def content_hashes(digests: dict[str, str]) -> tuple[str, str]:
    """Returns the hash of splits whose parts are one chunk each, and the hash of larger splits."""
    chunk = {"chunk": f"{_CHUNK_CHARACTERS} {_CHUNK_EXAMPLES}"}
    return manifest.combined_hash(digests), manifest.combined_hash(digests | chunk)


def _make_vocabs(folder: Path, task: Task, given: Vocabs | None, log: BuildLog) -> Vocabs:
    if log.vocab_hashes is not None:
        with contextlib.suppress(UserError):
            vocabs = Vocabs.load(folder, task.source_vocab_file)
            if vocabs.hashes() == log.vocab_hashes:
                logger.info("%s: resumes what an earlier command built", task.name)
                return vocabs
    vocabs = task.make_vocabs(given)
    vocabs.save(folder)
    log.add(vocabs=vocabs.hashes())
    return vocabs


@dataclasses.dataclass(frozen=True)
class SplitBuilder:
    """Encodes and packs the splits of a task into a folder."""

    folder: Path
    task: Task
    vocabs: Vocabs
    log: BuildLog
    worker_count: int
    on_progress: OnProgress | None

    def build(self, split: str) -> dict[str, Any]:
        """Writes the rows of a split.  Returns its entry in the manifest, empty without lines."""
        columns = self.task.columns(self.vocabs) | documents.COLUMNS
        digest = hashlib.sha256()
        parts: list[tuple[PartOfText, list[Counts]]] = []  # each with the counts of its chunks
        sizes, files, numbers = list[tuple[int, int, int]](), list[tuple[str, int]](), list[int]()
        with contextlib.ExitStack() as stack:
            arrays = {
                name: stack.enter_context(GrowingArray(self._array(split, name), *kind))
                for name, kind in columns.items()
            }
            places = arrays.pop("numbers")  # written as they are read, before any packing
            total, split_bytes = Counts(), self.task.source.bytes_to_read(split)
            counter = stack.enter_context(counted_bytes())

            def chunks() -> Iterator[Chunk]:
                for number, part in enumerate(self.task.parts_of_text(split, digest)):
                    parts.append((part, []))
                    for examples in _grouped(noted(part.name, part.examples, files, numbers)):
                        text_hash, size = digest.hexdigest(), len(examples)
                        places.append(np.array(numbers, np.uint32)[:, None])
                        numbers.clear()
                        yield Chunk(number, part.tag, examples, size, text_hash, counter.total())

            for chunk, counts, pieces in self._written(split, chunks(), arrays):
                sizes.append((chunk.size, pieces, counts.rows))
                parts[chunk.part][1].append(counts)
                share = min(chunk.bytes_read / split_bytes, 1.0) if split_bytes else None
                self._report(split, total, total := total + counts, share)
            entry = self._entry(split, parts, digest.hexdigest())
            entry |= {"chunk_sizes": sizes, "files": files} if entry else {}
        if not entry:
            for path in self.folder.glob(f"{split}.*.npy"):
                path.unlink()
            return entry
        for name in columns:
            verify_written(self._array(split, name))
        self.log.add(split=split, entry=entry)
        return entry

    def _array(self, split: str, name: str) -> Path:
        return self.folder / f"{split}.{name}.npy"

    def _written(
        self, split: str, chunks: Iterator[Chunk], arrays: Mapping[str, GrowingArray]
    ) -> Iterator[tuple[Chunk, Counts, int]]:
        """Writes chunks in order, and yields each with its counts and its number of pieces."""
        rest = chunks
        for before in self.log.chunks.get(split, []):
            chunk = next(chunks, None)
            if chunk is None:
                return
            pieces = before.get("pieces", 0)
            lengths = dict.fromkeys(arrays, before["counts"]["rows"]) | {"pieces": pieces}
            rows = {name: array.next_rows(lengths[name]) for name, array in arrays.items()}
            kept = {name: array for name, array in rows.items() if array is not None}
            if before["text_hash"] != chunk.text_hash or before["checksums"] != checksums(kept):
                rest = itertools.chain([chunk], chunks)
                break
            for name, array in arrays.items():
                array.append(kept[name])
            yield chunk, Counts.read(before["counts"]), pieces
        sent = list[Chunk]()

        def jobs() -> Iterator[workers.Job]:
            for chunk in rest:
                sent.append(dataclasses.replace(chunk, examples=[]))  # frees their memory
                yield chunk.examples, chunk.tag, split == "train"

        start = functools.partial(packing, self.task, self.vocabs)
        for packed, counts in workers.in_order(jobs(), start, self.worker_count):
            chunk = sent.pop(0)
            for name, array in arrays.items():
                array.append(packed[name])
            written = {"split": split, "text_hash": chunk.text_hash, "checksums": checksums(packed)}
            pieces = len(packed["pieces"])
            self.log.add(chunk=written | {"counts": dataclasses.asdict(counts), "pieces": pieces})
            yield chunk, counts, pieces

    def _report(self, split: str, before: Counts, now: Counts, share: float | None) -> None:
        """Reports how much of the split is done: to `on_progress`, or now and then to the log."""
        if self.on_progress is not None:
            self.on_progress(split, now, share)
        elif now.lines // _LINES_PER_RECORD > before.lines // _LINES_PER_RECORD:
            done = "" if share is None else f", {share:.0%} of its files"
            logger.info("%s: %s lines so far%s", split, f"{now.lines:,}", done)

    def _entry(
        self, split: str, parts: list[tuple[PartOfText, list[Counts]]], content_hash: str
    ) -> dict[str, Any]:
        """Returns a split's entry in the manifest, given the counts of each part's chunks."""
        task, counts, dropped, entries = self.task, Counts(), Counter[str](), []
        for part, of_chunks in parts:
            part_counts = sum(of_chunks, Counts())
            if not part_counts.lines and split == "train":
                name = f"{split!r} of {part.name}"
                raise UserError(_no_lines(task, split, name, part_counts, part.dropped))
            counts += part_counts
            dropped.update(part.dropped)  # + would remove the reasons with a count of 0
            about = {"name": part.name, "dropped": dict(part.dropped)}
            entries.append(about | dataclasses.asdict(part_counts))
        if not counts.lines:
            if split != "validation" or +dropped or counts.left_out:
                raise UserError(_no_lines(task, split, repr(split), counts, dropped))
            return {}  # too few examples: the hash held out none
        logger.info("%s: %s%s", split, task.summary(counts), _losses(task, counts, dropped))
        entry = {**dataclasses.asdict(counts), **task.fills(counts), "content_hash": content_hash,
                 "chunks": max(len(of_chunks) for _, of_chunks in parts)}  # fmt: skip
        return entry | task.part_entries(dropped, entries)


def _grouped(examples: Iterable[Example]) -> Iterator[list[Example]]:
    group, characters = list[Example](), 0
    for example in examples:
        group.append(example)
        characters += len(example) if isinstance(example, str) else sum(map(len, example))
        if characters >= _CHUNK_CHARACTERS or len(group) >= _CHUNK_EXAMPLES:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _losses(task: Task, counts: Counts, dropped: Counter[str]) -> str:
    """Describes how many examples are not in the rows, by reason; a rule without effect shows 0."""
    reasons = dict(dropped)
    if counts.left_out:
        reasons |= dict.fromkeys(task.left_out, counts.left_out)
    not_taken = [f"{number:,} ({reason})" for reason, number in reasons.items()]
    return f"; not taken: {', '.join(not_taken)}" if not_taken else ""


def _no_lines(task: Task, split: str, name: str, counts: Counts, dropped: Counter[str]) -> str:
    """Describes why a split, or a part of one, has no example in its rows; `name` names it."""
    lost = _losses(task, counts, +dropped)  # without the rules that dropped nothing
    if lost:
        kind = type(task).__name__
        lengths = " and ".join(f"{kind}.{name}" for name in task.row_lengths)
        remedy = f"longer rows ({lengths}), a milder Clean, or more text"
    else:
        remedy = ", ".join([*task.source.remedies(split), "or more text"])
    return f"{task.name}: the split {name} has no lines{lost}.  Give it {remedy}."
