"""Reads files with one JSON object per line, and prepares numbers for JSON."""

import functools
import logging
import math
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.json_reader import read_json
from data.storage import lookup

logger = logging.getLogger(__name__)

Line = dict[str, Any]
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
DAMAGED, REPLACED = ".damaged", ".replaced"
"""Suffixes of the files for damaged lines, and for lines of steps that are repeated."""
WALL_TIME = "wall_time"
"""When a line was written, in seconds since 1970."""
LARGEST = 1e39
"""Above all finite numbers in float32."""


def read_lines(path: Path, *numbers: str) -> list[Line]:
    """Returns the undamaged lines of a metrics file in which these numbers are not null.

    Damaged lines are skipped with a warning.
    """
    lines, damaged = split_lines(path, *numbers)
    if damaged:
        warn_once(f"{path}: damaged lines are left out.")
    return [line for line in lines if all(line[name] is not None for name in numbers)]


@functools.cache
def warn_once(text: str) -> None:
    """Warns once, however often a command reads a file."""
    logger.warning("%s", text)


def split_lines(path: Path, *numbers: str) -> tuple[list[Line], list[str]]:
    """Returns the objects with a step and these numbers, and the text of all other lines.

    A skipped step has null in place of NaN or infinity.  A last line without a line end, which was
    cut short when a process was killed, is in neither list.
    """
    if not lookup.exists(path):
        return [], []
    lines: list[Line] = []
    damaged: list[str] = []
    *texts, last = path.read_bytes().decode("utf-8", "replace").split("\n")
    for text in [*texts, last]:
        try:
            line = read_json(text, Line, "line")
        except UserError:
            line = {}
        is_step = type(line.get("step")) is int
        nulls = {name for name in numbers if line.get("skipped") and line.get(name, 0) is None}
        if is_step and all(is_number(line.get(name)) for name in {"step", *numbers} - nulls):
            lines.append(line)
        elif text is not last and text:
            damaged.append(text)
    return lines, damaged


def is_number(value: object) -> bool:
    """Returns whether a value of a line is a number that can be plotted."""
    if type(value) is int:
        return abs(value) < 1 << 63
    return type(value) is float and not LARGEST < abs(value) < math.inf


def finite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
