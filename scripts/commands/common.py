"""What each command does, in a few calls."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from configs.errors import UserError
from configs.load import Config, load
from configs.read import Reference
from configs.spec import SPECS
from data.cache import prepare
from data.packing.rows import Rows
from data.sources.text_files import read_lines
from data.storage import atomic_open
from data.task import Task
from layouts.layout import Layout
from layouts.mesh import batch_shards, make_mesh
from models.transformer import Transformer
from scripts.terminal import print_table, tell
from trainer.checkpoints.restore import Trained, TrainedModels
from trainer.checks import check_layout
from trainer.model_dir import Workspace
from trainer.run import Run

Strings = tuple[str, ...]
# What gin files may name without an import, beside what these are made of.
BUILT_IN = (Run, Layout, Transformer)


def settings(model_dir: Path | None, gin_file: Strings, gin_param: Strings) -> Config:
    """The given settings, over those that a model directory holds."""
    if model_dir is not None:
        return Workspace(model_dir).load(gin_file, gin_param)
    if not gin_file and not gin_param:
        raise UserError(
            "no settings.  Give --gin_file=configs/runs/quickstart.gin or another file."
        )
    return load(gin_file, gin_param)


def warn_unused(config: Config, *used: type) -> None:
    for binding in config.unused(*used):
        tell(f"Warning: {binding.where}: {binding.name} is set, but nothing uses it.")


def set_where(config: Config) -> dict[str, str]:
    """Which file set each value."""
    return {binding.name: binding.where for binding in config.bindings()}


def trained_models(model_dir: Path, gin_file: Strings, gin_param: Strings) -> TrainedModels:
    """The checkpoints of a run, once the layout given now was held against its model."""
    config = settings(model_dir, gin_file, gin_param)
    run, layout = config.make(Run), config.make(Layout)
    mesh_sizes = dict(make_mesh(layout).shape)
    rows = rounded(run.batch_sequences, batch_shards(layout, mesh_sizes) * rows_of_group(run))
    fitting = dataclasses.replace(run, batch_sequences=rows, microbatches=1)
    for warning in check_layout(fitting, layout, mesh_sizes, set_where(config)):
        tell(warning)
    return TrainedModels(model_dir, run, layout)


def task_of(config: Config) -> Task:
    """The task that the settings name; a run's other settings may be missing."""
    bound = {binding.name: binding.value for binding in config.bindings()}
    reference = bound.get("Run.task")
    task = config.make(SPECS[reference.target] if isinstance(reference, Reference) else Task)
    assert isinstance(task, Task)
    return task


def prepare_task(data_dir: Path, rebuild: bool, gin_file: Strings, gin_param: Strings) -> None:
    task = task_of(settings(None, gin_file, gin_param))
    prepared = prepare(task, data_dir, rebuild=rebuild)
    numbers = {name: rows.numbers() for name, rows in prepared.splits.items()}
    print_table(["split", *numbers["train"]], [(s, *n.values()) for s, n in numbers.items()])
    print_parts(prepared.splits)
    tell(f"content hash {prepared.manifest['content_hash']}")


def print_parts(splits: Mapping[str, Rows]) -> None:
    """What each part of a mixture gave to a split, and which pairs are in no row."""
    parts = [(split, part) for split, rows in splits.items() for part in rows.parts]
    if len(parts) > len(splits):
        found = [(split, p.name, p.counts.lines, p.counts.rows) for split, p in parts]
        print_table(["split", "part", "pairs", "rows"], found)
    lost = [
        (
            split,
            part.name,
            why,
            pairs,
            f"{pairs / (part.counts.lines + sum(part.dropped.values())):.2%}",
        )
        for split, part in parts
        for why, pairs in part.dropped.items()
    ]
    if lost:
        print_table(["split", "part", "not in the rows", "pairs", "share"], lost)


def only(steps: list[int | None]) -> int | None:
    if len(steps) != 1:
        raise UserError("--checkpoint=all: this command takes one checkpoint: latest, best, STEP.")
    return steps[0]


def batch_of(trained: Trained, wanted: int | None) -> int:
    """Rows at a time: what was asked for, rounded up to what the batch is split over."""
    pieces = batch_shards(trained.model.layout, trained.mesh.shape) * rows_of_group(trained.run)
    return rounded(wanted or trained.run.batch_sequences, pieces)


def rows_of_group(run: Run) -> int:
    """How many rows have whole groups of tokens, where experts serve groups of several rows."""
    lengths = run.task.array_lengths
    whole = [math.lcm(group, lengths[name]) // lengths[name]
             for name, group in run.model.groups.items()]  # fmt: skip
    return math.lcm(*whole)


def rounded(rows: int, pieces: int) -> int:
    """The next number of rows that divides over so many pieces."""
    return -(-rows // pieces) * pieces


def read_input(path: str) -> Iterator[str]:
    """Lines of a file, plain, .gz or .xz, or of the standard input."""
    return read_lines(path) if path != "-" else (line.rstrip("\n") for line in sys.stdin)


@contextlib.contextmanager
def open_output(path: str) -> Iterator[TextIO]:
    """A file that appears under its name only when it is whole, or the standard output."""
    if path == "-":
        yield sys.stdout
        return
    try:
        with atomic_open(Path(path)) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}.") from None


def short(value: float) -> float | str:
    return value if isinstance(value, int) else f"{value:.4f}"


def write_json(path: str | None, found: object) -> None:
    if path is not None:
        with open_output(path) as file:
            file.write(json.dumps(found, indent=2) + "\n")
