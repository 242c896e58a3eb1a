"""An output file that a crash does not lose: finished lines go to a journal, the whole is moved."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from configs.errors import UserError
from data.storage import atomic_open, atomic_write

Hypotheses = list[list[Any]]


def fingerprint(lines: Iterable[str]) -> str:
    """A hash of the input."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


@dataclasses.dataclass
class Journal:
    """What of an output is done.  Beside OUTPUT lies OUTPUT.made, which says what made it.

    While lines are missing, those that are there lie in OUTPUT.part, one JSON object each, behind
    a first one with the settings.
    """

    output: Path
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.part = self.output.with_name(self.output.name + ".part")
        self.made = self.output.with_name(self.output.name + ".made")
        self._file: TextIO | None = None

    def is_done(self) -> bool:
        """Whether the output is there already, made by these settings."""
        if not self.output.exists():
            return False
        self._compare(self.output, _read(self.made)[:1])
        return True

    def open(self) -> dict[int, Hypotheses]:
        """The lines that are done; from here on `add` keeps more."""
        found = _read(self.part)
        if found:
            self._compare(self.part, found[:1])
        done = {entry["line"]: entry["hypotheses"] for entry in found[1:]}
        # What a crash left half-written at the end is not taken over.
        kept = map(_line, found or [{"settings": self.settings}])
        try:
            atomic_write(self.part, "".join(kept))
            self._file = self.part.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.output}: cannot be written: {error.strerror}.") from None
        return done

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, entries: Iterable[tuple[int, Hypotheses]]) -> None:
        """Keeps some lines; after this no crash loses them."""
        assert self._file is not None
        for line, hypotheses in entries:
            self._file.write(_line({"line": line, "hypotheses": hypotheses}))
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, write: Callable[[TextIO], None]) -> None:
        """Writes the output under its name, in one go, and takes the journal away."""
        assert self._file is not None
        self._file.close()
        with atomic_open(self.output) as file:
            write(file)
            atomic_write(self.made, _line({"settings": self.settings}))
        self.part.unlink()

    def _compare(self, path: Path, header: list[dict[str, Any]]) -> None:
        before = header[0].get("settings", {}) if header else {}
        names = [n for n in {**before, **self.settings} if before.get(n) != self.settings.get(n)]
        if not names:
            return
        rows = "".join(
            f"\n  {name}: {before.get(name)!r} there, {self.settings.get(name)!r} now."
            for name in names
        ) if before else f"\n  {self.made.name}, which would say by which, is missing."  # fmt: skip
        raise UserError(
            f"{path}: exists and was made by other settings.{rows}\n"
            "  Choose another --output, or remove it."
        )


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """The entries of a journal up to the first that is not whole."""
    entries: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                entries.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return entries
