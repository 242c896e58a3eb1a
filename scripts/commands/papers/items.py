"""Reads what papers publish from the TOML files in this folder: items, their rows, and runs.

An item is a table, figure, algorithm, section or appendix.  A column defines how our value is
obtained: `by` names a function in `papers.py`, which is called with the words in a row's `of`.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from configs.json_reader import checked

FOLDER = Path(__file__).parent
Words = tuple[str, ...]
T = TypeVar("T")


class Strict(BaseModel):
    """Refuses names in a TOML file that are not fields of the class."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PublishedRun(Strict):
    """Holds the settings of a published run."""

    base: str = ""
    """The run whose files and settings come first."""
    model: str = ""
    """Replaces MODEL in file names. Default: the name of the run."""
    files: Words = ()
    settings: Words = ()
    topology: str = ""
    decoding: Mapping[str, Any] = {}
    """Flags of `plan --decode`; empty for a training step."""


class Column(Strict):
    """Describes a quantity: a figure, and the format of its values."""

    head: str
    by: Literal["", "count", "plan", "collective", "operator", "tensor", "order", "record"] = ""
    how: str = ""
    """How our value is obtained: counted, planned, ..."""
    figure: str = ""
    scale: float = 1.0
    inverse: bool = False
    format: str = "{:.2f}"
    ratio: bool = False
    """Whether the column is only for rows with `over`, or only for those without."""
    of: Words = ()
    """For records: page, heading, row and column, where ROW stands for the row's `of`."""


class Row(Strict):
    """Holds a row of an item."""

    name: str
    of: Words = ()
    over: Words = ()
    """Words of another figure; our value is the ratio to it."""
    published: Mapping[str, float | str] = {}
    """Published values, by column."""
    records: Mapping[str, Words] = {}
    """For our values on another page, by column: page, heading, row and column."""
    line: str = ""
    """The line of a plot to which the row adds a point."""


class Drawing(Strict):
    """Describes the picture of an item."""

    kind: Literal["bars", "lines", "grid"]
    x: str = ""
    y: str = ""
    """Columns; for bars, a figure with parts."""
    label: str = ""
    scale: float = 1.0
    logarithmic: bool = False


class Item(Strict):
    """Holds a table, figure, algorithm, section or appendix of a paper."""

    name: str
    shows: str
    published: str = ""
    """What the paper prints, in a few words; with rows, for the first one."""
    files: Words = ()
    """The files that implement it, and their tests."""
    reason: str = ""
    """Why our value is missing, or differs."""
    note: str = ""
    row: str = "model"
    """The header of the rows' names."""
    columns: Words = ()
    rows: tuple[Row, ...] = ()
    draw: Drawing | None = None
    picture: str = ""
    """Our picture, from another page."""
    command: str = ""
    """The command that repeats the records."""
    slow: bool = False
    """Whether tests compare only its inputs."""


class Paper(Strict):
    """Holds a paper and its items, in the order of the paper."""

    title: str
    citation: str
    items: tuple[Item, ...]


def read(name: str, kind: type[T]) -> T:
    """Reads a TOML file in this folder."""
    return checked(tomllib.loads((FOLDER / f"{name}.toml").read_text()), kind, f"{name}.toml")


def with_bases(runs: Mapping[str, PublishedRun]) -> dict[str, PublishedRun]:
    """Adds to each run what it inherits from its base, which must be an earlier run."""
    whole: dict[str, PublishedRun] = {}
    for name, run in runs.items():
        base = whole.get(run.base, PublishedRun())
        taken = {
            "files": base.files + run.files,
            "settings": base.settings + run.settings,
            "topology": run.topology or base.topology,
            "decoding": {**base.decoding, **run.decoding},
        }
        whole[name] = run.model_copy(update=taken)
    for name, run in whole.items():
        files = tuple(file.replace("MODEL", run.model or name) for file in run.files)
        whole[name] = run.model_copy(update={"files": files})
    return whole


RUNS = with_bases(read("runs", dict[str, PublishedRun]))
COLUMNS = read("columns", dict[str, Column])
NAMES = ("mesh_tensorflow", "gshard", "giant_models", "others")
PAPERS = {name: read(name, Paper) for name in NAMES}


def key_of(paper: str, item: Item) -> str:
    """Returns the name of an item for `meshloom papers --table`, such as gshard_table_3."""
    return re.sub(r"\W+", "_", f"{paper} {item.name}".lower()).strip("_")


ITEMS_BY_KEY = {key_of(name, item): item for name, paper in PAPERS.items() for item in paper.items}
