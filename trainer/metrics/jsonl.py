"""Reads files of one JSON object a line."""

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Returns the whole lines of a metrics file; others cost only themselves."""
    lines, damaged = split_lines(path)
    if damaged:
        logger.warning("%s: %d damaged lines are left out.", path, len(damaged))
    return lines


def split_lines(path: Path) -> tuple[list[Line], list[str]]:
    """Returns the lines that are objects with a step, and the text of all others.

    A last line without an end, which a kill cut short, is neither.
    """
    if not path.exists():
        return [], []
    lines: list[Line] = []
    damaged: list[str] = []
    *texts, last = path.read_bytes().decode("utf-8", "replace").split("\n")
    for text in [*texts, last]:
        line = _line_of(text)
        if line is not None:
            lines.append(line)
        elif text is not last and text:
            damaged.append(text)
    return lines, damaged


def _line_of(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    has_step = isinstance(line, dict) and type(line.get("step")) in (int, float)
    return line if has_step else None
