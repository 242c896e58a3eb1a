"""Keeps the history of a model directory: a line for each start of training and its changes."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data import order
from data.storage.files import atomic_write
from trainer.metrics.jsonl import Line, read_lines

FILE = "history.jsonl"


class Change(NamedTuple):
    """Holds a setting, its saved value and its new one."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} there, {self.new!r} now"


@dataclasses.dataclass(frozen=True)
class Start:
    """Records a start of training: its step, its data and the settings that changed."""

    step: int
    time: str
    data_dir: str | None = None
    content_hash: str | None = None
    order: int = 1
    """Version of the order of the rows; the first one was not written down."""
    changes: Sequence[Line] = ()
    """Name, old and new value of each setting that changed, values as Python writes them."""


def starts(model_dir: Path) -> list[Start]:
    """Returns the starts of training in a model directory, oldest first."""
    names = {field.name for field in dataclasses.fields(Start)}
    lines = read_lines(model_dir / FILE)
    return [
        Start(**{name: value for name, value in line.items() if name in names})
        for line in lines
        if "time" in line
    ]


def record_start(
    model_dir: Path,
    step: int,
    data_dir: Path,
    content_hash: str,
    changes: Sequence[Change],
) -> None:
    """Adds a start of training to the history."""
    start = Start(
        step=step,
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        data_dir=str(data_dir),
        content_hash=content_hash,
        order=order.VERSION,
        changes=[{"name": c.name, "old": repr(c.old), "new": repr(c.new)} for c in changes],
    )
    model_dir.mkdir(parents=True, exist_ok=True)
    lines = [*starts(model_dir), start]
    text = "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines)
    atomic_write(model_dir / FILE, text)
