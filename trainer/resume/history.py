"""Keeps the signed record of a run, at each start and in each checkpoint."""

import ast
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.dataclasses import dataclass

from configs.errors import UserError, brief
from configs.json_reader import CHECKSUM, sign, verified
from data import order
from data.storage.files import atomic_write
from trainer.metrics.jsonl import METRICS, Line, read_lines, split_lines, warn_once

FILE = "history.jsonl"
CHECKPOINTS, ITEM, MANIFEST = "checkpoints", "state", "manifest.json"


def time_now() -> str:
    """Returns the time, with the microseconds that name a start."""
    return datetime.now().astimezone().isoformat()


class Change(NamedTuple):
    """Holds a setting, its saved value and its new one."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {brief(repr(self.old))} there, {brief(repr(self.new))} now"


@dataclass(frozen=True)
class Start:
    """Records a start of training: its step, its data, its settings and those that changed."""

    step: int
    time: str
    """When it began."""
    data_dir: str | None = None
    content_hash: str | None = None
    rows_hash: str | None = None
    order: int = order.VERSION
    """Version of the order of the rows; version 1 was not recorded."""
    changes: Sequence[Mapping[str, str]] = ()
    """Name, old and new value of each setting that changed; values are Python literals."""
    vocab: Mapping[str, str] | None = None
    """The hashes of the vocabularies."""
    settings: str | None = None
    """The text of config.gin, only in the newest record; older versions did not record it."""
    saved: int | None = None
    """The step of the newest checkpoint that this start has saved or restored."""
    train_rows: int | None = None
    """Rows of training, from which the steps of Run.epochs follow."""
    began: str | None = None
    """When the run was at step 0, which identifies it; older versions did not record it."""

    @property
    def moment(self) -> float:
        """Returns the time in seconds since the epoch, which orders starts of any time zone."""
        return datetime.fromisoformat(self.time).timestamp()

    def is_of_other_run(self, other: "Start") -> bool:
        """Returns whether another run recorded this, one that began at step 0 by itself."""
        return self.began != other.began

    def dump(self) -> Line:
        """Returns a signed line for `parse`."""
        return sign(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: Any) -> "Start":
        """Parses the output of `dump`; raises ValueError or TypeError for any other line."""
        if (CHECKSUM in line) != ("settings" in line):  # older versions wrote neither
            raise ValueError("it has no checksum")
        start = cls(**{"order": 1, **verified(line)})
        datetime.fromisoformat(start.time)
        for change in start.changes:
            Change(**change)
        return start


def starts(model_dir: Path) -> list[Start]:
    """Returns the starts of training in a model directory, oldest first."""
    return _read(model_dir)[0]


def _read(model_dir: Path) -> tuple[list[Start], list[str]]:
    """Returns the starts in the history, and its damaged lines, which every start keeps."""
    (lines, damaged), records = split_lines(model_dir / FILE), list[Start]()
    for line in lines:
        try:
            records.append(Start.parse(line))
        except (ValueError, TypeError):
            damaged.append(json.dumps(line))
    if damaged:
        warn_once(f"{model_dir / FILE}: damaged records: {len(damaged)}.")
    return records, damaged


def record_of(model_dir: Path) -> Start | None:
    """Returns the newest record of a run: of its last start, or else in its newest checkpoint.

    The checkpoint's also counts if the run restarted at step 0 without it, and it is back; or if
    the line of the start that saved it is lost.
    """
    records, (step, saved) = starts(model_dir), next(saved_starts(model_dir), (0, None))
    last = records[-1] if records else None
    if saved is None or last is None or not last.settings:
        return saved or last
    if saved.time in [start.time for start in records]:
        return saved if saved.is_of_other_run(last) else last
    return last if saved.is_of_other_run(last) or last.step >= step else saved


def unknown_starts(model_dir: Path) -> Iterator[tuple[int, Start]]:
    """Yields the checkpoints that were saved by starts which an undamaged history lacks.

    Raises `UserError` if another run saved one; older records have only its text and vocabulary.
    """
    (records, damaged), run = _read(model_dir), record_of(model_dir)
    times = [record.time for record in records]
    for step, saved in saved_starts(model_dir):
        if run is not None and saved.is_of_other_run(run):
            raise not_of_run(model_dir, step, f"began {saved.began} there, {run.began} here")
        if not records or damaged:
            continue
        texts = {} if saved.began else {"content_hash": "text", "vocab": "vocabulary"}
        for name, kind in texts.items():
            now, there = getattr(saved, name), [getattr(start, name) for start in records]
            if now and any(there) and now not in there:
                raise not_of_run(model_dir, step, f"{kind} {now} there, {there[-1]} in {FILE}")
        if saved.time not in times:
            yield step, saved


def not_of_run(model_dir: Path, step: int, difference: str) -> UserError:
    """Returns the error for a checkpoint that another run saved."""
    return UserError(
        f"{model_dir}: checkpoint {step} and {FILE} are of different runs, or records are lost: "
        f"{difference}.  Copy back what belongs together, or move that checkpoint elsewhere."
    )


def saved_starts(model_dir: Path) -> Iterator[tuple[int, Start]]:
    """Yields the steps of the checkpoints that have a record, newest first, and their records."""
    folder = model_dir / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    for step in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            text = (folder / str(step) / ITEM / MANIFEST).read_text()
            yield step, Start.parse(json.loads(text)["run"])


def known_starts(model_dir: Path) -> list[Start]:
    """Returns the starts, including those of checkpoints whose lines are lost."""
    records, saved = starts(model_dir), {start.time: start for _, start in saved_starts(model_dir)}
    lost = [saved[time] for time in saved.keys() - {start.time for start in records}]
    return sorted([*records, *lost], key=lambda start: start.moment) if lost else records


def values_by_step(folder: Path | None, values: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Returns numbers of steps, and the values that some settings of a run have after them.

    `values` are the present ones; each start has recorded what it changed.  Steps that were
    repeated from an older checkpoint have their last values.
    """
    periods, run = list[tuple[int, dict[str, Any]]](), record_of(folder) if folder else None
    for start in reversed(known_starts(folder) if folder else []):
        if run is None or start.is_of_other_run(run):
            continue
        if not periods or start.step < periods[0][0]:
            periods.insert(0, (start.step, values))
        old = {change["name"]: change["old"] for change in start.changes}
        values = {n: _value(old[n]) if n in old else v for n, v in values.items()}
    return periods if periods and not periods[0][0] else [(0, values), *periods]


def _value(text: str) -> Any:
    """Parses a value of a change."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UserError(f"{FILE}: a setting was {brief(text)}, which is no value.") from None


def record_start(model_dir: Path, start: Start) -> None:
    """Adds a start of training to the history."""
    model_dir.mkdir(parents=True, exist_ok=True)
    _write(model_dir, [*known_starts(model_dir), start])


def amend_record(model_dir: Path, **fields: Any) -> None:
    """Changes fields of the last record: its step, or the step that has been saved."""
    if records := starts(model_dir):
        _write(model_dir, [*records[:-1], dataclasses.replace(records[-1], **fields)])


def last_saved(model_dir: Path) -> int:
    """Returns the largest step that ever had a checkpoint; 0 if none had.

    If the newest record is lost, the last step in the metrics counts as well.
    """
    records = starts(model_dir)
    has_newest = bool(records and records[-1].settings)
    lines = [] if has_newest else read_lines(model_dir / METRICS)
    return max([r.saved or r.step for r in records] + [line["step"] for line in lines], default=0)


def _write(model_dir: Path, records: Sequence[Start]) -> None:
    short = [dataclasses.replace(record, settings=None) for record in records[:-1]]
    lines = [json.dumps(record.dump()) for record in [*short, *records[-1:]]]
    text = "".join(f"{line}\n" for line in [*_read(model_dir)[1], *lines])
    atomic_write(model_dir / FILE, text)
