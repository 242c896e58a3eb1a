"""Keeps finished lines of an output in a journal, so that a crash does not lose them."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from configs.errors import UserError
from configs.json_reader import whole_lines
from configs.paths import is_remote
from data.storage.files import atomic_open, atomic_write, write_errors
from data.storage.folders import local_copy, open_alone
from trainer.processes.training_lock import lock_object

Hypotheses = list[list[Any]]


@dataclasses.dataclass
class Journal(contextlib.AbstractContextManager["Journal"]):
    """Keeps the finished lines of an output; OUTPUT.made holds the settings that made it.

    Until the output is complete, OUTPUT.part has a JSON object with the settings and one for each
    finished line.  For a remote output, that file is on this machine, and OUTPUT.lock keeps other
    processes from writing the output.
    """

    output: Path
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.journal_file = local_copy(self.output.with_name(self.output.name + ".part"))
        self.settings_file = self.output.with_name(self.output.name + ".made")
        self._open = contextlib.ExitStack()  # the file, and a lock

    def is_done(self) -> bool:
        """Returns whether the output exists; raises if other settings made it."""
        if not self.output.exists():
            return False
        self._compare(self.output, whole_lines(self.settings_file)[:1])
        return True

    def open(self) -> dict[int, Hypotheses]:
        """Opens the journal and returns its finished lines; `add` appends more."""
        if header := whole_lines(self.journal_file)[:1]:
            self._compare(self.journal_file, header)
        with write_errors(self.journal_file, "give another --output"):
            if is_remote(self.output):
                self.journal_file.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open.enter_context(open_alone(self.journal_file))
        if is_remote(self.output):
            lock = self.output.with_name(self.output.name + ".lock")
            self._open.enter_context(lock_object(lock, self.output, "decoding", "--output"))
        entries = whole_lines(self.journal_file)
        # Drops a last line that a crash left half-written.
        kept = "".join(map(_line, entries or [{"settings": self.settings}]))
        if self.journal_file.read_bytes().startswith(kept.encode()):
            self._file.truncate(len(kept.encode()))
        else:
            self._file.truncate(0)
            self._file.write(kept)
        return {entry["line"]: entry["hypotheses"] for entry in entries[1:]}

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, entries: Iterable[tuple[int, Hypotheses]]) -> None:
        """Appends some lines; after that, no crash loses them."""
        for line, hypotheses in entries:
            self._file.write(_line({"line": line, "hypotheses": hypotheses}))
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, write: Callable[[TextIO], None]) -> None:
        """Writes the output atomically, and removes the journal."""
        with atomic_open(self.output) as file:
            write(file)
            atomic_write(self.settings_file, _line({"settings": self.settings}))
        self.journal_file.unlink()

    def _compare(self, path: Path, header: list[dict[str, Any]]) -> None:
        before = header[0].get("settings", {}) if header else {}
        names = [n for n in {**before, **self.settings} if before.get(n) != self.settings.get(n)]
        if not names:
            return
        rows = f"\n  {self.settings_file.name}, which would list them, is missing."
        if before:
            now = self.settings
            rows = "".join(f"\n  {n}: {before.get(n)!r} there, {now.get(n)!r} now." for n in names)
        raise UserError(
            f"{path}: already exists, made with different settings.{rows}\n  Choose another "
            "--output, or remove it."
        )


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"
