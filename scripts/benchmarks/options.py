"""Defines the flags that the benchmarks share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from scripts.commands.shared_flags import JsonFile
from scripts.flag import Flag

Count = Annotated[int, Flag(min=1)]


@dataclass(frozen=True, kw_only=True)
class JsonFlags:
    """Names the file of the result."""

    json_file: JsonFile = None


@dataclass(frozen=True, kw_only=True)
class BaselineFlags(JsonFlags):
    """Selects what a benchmark compares in alternating rounds, each in a process of its own."""

    worker: Annotated[str | None, Flag(is_hidden=True)] = None
    """Runs this system, which answers the questions of the process that compares."""
    rounds: Count
    """Rounds to measure."""
    systems: tuple[str, ...]
    """Systems to compare, separated by commas."""
    baseline: Annotated[Path | None, Flag(metavar="CHECKOUT")] = None
    """Measures Meshloom also from another checkout of the project, and prints how many times as
    fast this one is."""
