"""Logs which parts of a cache are built, so that a killed build continues there."""

import contextlib
import dataclasses
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.packing.rows import Counts

NAME = "building.jsonl"


@dataclasses.dataclass(frozen=True)
class WrittenChunk:
    """Describes a chunk whose rows are written."""

    split: str
    text_hash: str
    """Hash of the text of the split up to the end of the chunk."""
    counts: dict[str, int]
    checksums: dict[str, int]


class BuildLog:
    """Keeps a file with a line for the key of a cache, its vocabs, and each chunk and split."""

    def __init__(self, folder: Path, key: str):
        """Reads the log of a folder; begins a new one where the key is another."""
        self._path = folder / NAME
        lines = list[dict[str, Any]]()
        with contextlib.suppress(OSError, ValueError, RecursionError):
            lines.extend(map(json.loads, self._path.read_text().splitlines()))
        if not lines or lines[0] != {"key": key}:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            lines = [{"key": key}]
        self.vocab_hashes: dict[str, str] | None = None
        self.chunks: dict[str, list[WrittenChunk]] = {}
        self.splits: dict[str, dict[str, Any]] = {}
        for line in lines[1:]:
            if "vocabs" in line:
                self._take_vocabs(line["vocabs"])
            elif "chunk" in line:
                chunk = WrittenChunk(**line["chunk"])
                self.chunks.setdefault(chunk.split, []).append(chunk)
            else:
                self.splits[line["split"]] = line["entry"]
        # Without the line that a kill may have cut.
        self._path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def add_vocabs(self, hashes: Mapping[str, str]) -> None:
        self._take_vocabs(dict(hashes))
        self._append({"vocabs": dict(hashes)})

    def _take_vocabs(self, hashes: dict[str, str]) -> None:
        """Forgets the rows of other vocabs."""
        if hashes != self.vocab_hashes:
            self.chunks.clear()
            self.splits.clear()
        self.vocab_hashes = hashes

    def add_chunk(
        self, split: str, text_hash: str, counts: Counts, arrays: Mapping[str, np.ndarray]
    ) -> None:
        chunk = WrittenChunk(split, text_hash, counts.written(), checksums(arrays))
        self._append({"chunk": dataclasses.asdict(chunk)})

    def add_split(self, split: str, entry: Mapping[str, Any]) -> None:
        self._append({"split": split, "entry": dict(entry)})

    def remove(self) -> None:
        """Removes the file: the cache is complete."""
        self._path.unlink()

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns a checksum of each array."""
    return {name: zlib.crc32(np.ascontiguousarray(a).data) for name, a in arrays.items()}
