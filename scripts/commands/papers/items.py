"""Reads what papers publish from the TOML files of this folder: items, their rows, and runs.

An item is a table, a figure, an algorithm, a section or an appendix.  A column says how ours is
obtained: `by` names a function of `papers.py`, which the words of a row's `of` are given to.
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
    """Refuses names in a TOML file that a class lacks."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PublishedRun(Strict):
    """Holds the settings of a published run."""

    base: str = ""
    """The run whose files and settings come first."""
    model: str = ""
    """What MODEL stands for in names of files. Default: the name of the run."""
    files: Words = ()
    settings: Words = ()
    topology: str = ""
    decoding: Mapping[str, Any] = {}
    """Flags of `plan --decode`; none for a training step."""


class Column(Strict):
    """Describes a quantity: a figure, and how its values are written."""

    head: str
    by: Literal["", "count", "plan", "collective", "operator", "tensor", "order", "record"] = ""
    how: str = ""
    """What ours is called: counted, planned, ..."""
    figure: str = ""
    scale: float = 1.0
    inverse: bool = False
    format: str = "{:.2f}"
    ratio: bool = False
    """Whether it is of rows with `over` alone."""
    of: Words = ()
    """Of records: page, heading, row and column, where ROW stands for the row's `of`."""


class Row(Strict):
    """Holds a row of an item."""

    name: str
    of: Words = ()
    over: Words = ()
    """Ours is how many times that of these words it is."""
    published: Mapping[str, float | str] = {}
    """By column."""
    records: Mapping[str, Words] = {}
    """By column, where ours stands on another page: page, heading, row and column."""
    line: str = ""
    """The line of a plot that the row is a point of."""


class Drawing(Strict):
    """Describes the picture of an item."""

    kind: Literal["bars", "lines", "grid"]
    x: str = ""
    y: str = ""
    """Columns; of bars, a figure with parts."""
    label: str = ""
    scale: float = 1.0
    logarithmic: bool = False


class Item(Strict):
    """Holds a table, figure, algorithm, section or appendix of a paper."""

    name: str
    shows: str
    published: str = ""
    """What the paper prints, in a few words; of rows, that of the first."""
    files: Words = ()
    """What implements it, and what tests that."""
    reason: str = ""
    """Why ours is missing, or differs."""
    note: str = ""
    row: str = "model"
    """The head of the rows' names."""
    columns: Words = ()
    rows: tuple[Row, ...] = ()
    draw: Drawing | None = None
    picture: str = ""
    """A picture of another page that is ours."""
    command: str = ""
    """Repeats the records."""
    slow: bool = False
    """Whether tests compare only its inputs."""


class Paper(Strict):
    """Holds a paper and its items, in the order of the paper."""

    title: str
    citation: str
    items: tuple[Item, ...]


def read(name: str, kind: type[T]) -> T:
    """Reads a TOML file of this folder."""
    return checked(tomllib.loads((FOLDER / f"{name}.toml").read_text()), kind, f"{name}.toml")


def with_bases(runs: Mapping[str, PublishedRun]) -> dict[str, PublishedRun]:
    """Gives each run what it takes from its base, which is a run before it."""
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
    """Returns the name of an item for `meshloom papers --table`: gshard_table_3."""
    return re.sub(r"\W+", "_", f"{paper} {item.name}".lower()).strip("_")


ITEMS_BY_KEY = {key_of(name, item): item for name, paper in PAPERS.items() for item in paper.items}
