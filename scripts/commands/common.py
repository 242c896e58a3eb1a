"""Reads the settings and input of commands, and writes their output."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from configs.errors import UserError
from configs.load import Config, load
from configs.paths import path_of
from configs.read import FLAG
from configs.spec import SPECS
from data.cache import TaskCaches
from data.packing.rows import Counts
from data.sources.clean import Clean
from data.sources.text import Source
from data.sources.text_files import decoded_lines, read_lines, without_carriage_return
from data.storage.files import atomic_open, write_errors
from data.task import Task
from data.vocab import Tokenizer
from scripts.commands.shared_flags import SavedSettingsFlags, Strings
from scripts.terminal import print_note
from trainer.metrics import jsonl
from trainer.model_dir import ModelDir
from trainer.multihost import check_same, from_first_process, is_first_process
from trainer.run import Run

STREAMS = ("-", "/dev/stdout")  # names of the standard output
DATA_DIR = Path("~/.cache/meshloom")


def settings(model_dir: Path | None, gin_file: Strings, gin_param: Strings) -> Config:
    """Returns the given settings, which override those in a model directory."""
    if model_dir is not None:
        return ModelDir(model_dir).load(gin_file, gin_param)
    if not gin_file and not gin_param:
        raise UserError("no settings.  Give --gin_file=FILE, as configs/runs/quickstart.gin.")
    return load(gin_file, gin_param)


def refuse_dispatch(gin_param: Strings) -> None:
    """Refuses a setting of Moe.dispatch for a command that drops no tokens."""
    for setting in gin_param:
        if setting.partition("=")[0].strip().endswith("Moe.dispatch"):
            raise UserError(
                f"--gin_param={setting!r}: it has no effect if no token is dropped, as in decoding "
                "and scoring (docs/experts.md).  Remove it."
            )


def data_dir_of(given: Path | None, model_dir: Path | None = None) -> Path:
    """Returns the directory of tokenized tasks: the given one, the run's, or the default."""
    if given is not None:
        return given
    last = None if model_dir is None else ModelDir(model_dir).record
    if last is None or last.data_dir is None:
        return DATA_DIR
    data_dir = path_of(last.data_dir)
    if not data_dir.exists():
        print_note(f"--data_dir of the run, {last.data_dir}, does not exist; using {DATA_DIR}.")
        return DATA_DIR
    return data_dir


def settings_of(flags: SavedSettingsFlags) -> Config:
    """Returns the settings that the flags name."""
    return settings(flags.model_dir, flags.gin_file, flags.gin_param)


def check_same_settings(config: Config) -> None:
    """Refuses processes of one run that were started with different settings."""
    values = {binding.name: repr(binding.value) for binding in config.bound.values()}
    check_same(values, "Start all with the same --gin_file and --gin_param.")


def warn_unused(config: Config, *used: type | str, kinds: tuple[type, ...] = (object,)) -> None:
    """Warns about settings of these kinds of specs that nothing uses.

    A later binding may replace a spec that has settings in a file, such as SentencePiece's if
    --gin_param names another tokenizer.  This is not a mistake.
    """
    replaced = config.replaced()
    for binding in config.unused(*used):
        is_mistake = binding.origin == FLAG or binding.spec not in replaced
        if is_mistake and issubclass(SPECS.get(binding.spec, object), kinds):
            print_note(f"Warning: {binding.origin}: {binding.name} is set, but nothing uses it.")


def task_of(config: Config) -> Task:
    """Returns the task that the settings name; other settings of a run may be missing.

    Warns about settings of data that nothing uses.
    """
    task = config.value("Run.task")
    task = task if isinstance(task, Task) else config.make(Task)
    used = "Run.task" if "Run.task" in config.bound else type(task)
    warn_unused(config, used, kinds=(Task, Source, Tokenizer, Clean))
    return task


def with_known_steps(run: Run, model_dir: Path | None, data_dir: Path | None) -> Run:
    """Returns a run of epochs with its steps, if its record or prepared data knows the rows.

    Prints how many steps it has, or that the data is missing.
    """
    if run.epochs is None:
        return run
    directory = None if model_dir is None else ModelDir(model_dir)
    record, rows = directory and directory.record, None
    if directory and record and directory.recorded_run().task == run.task:
        rows = record.train_rows
    if rows is None:
        caches = TaskCaches(run.task, data_dir_of(data_dir, model_dir))
        if (stored := caches.manifest()) is None:
            print_note(
                f"Run.epochs = {run.epochs:g}: its steps depend on the rows of task "
                f"{run.task.name}, which are not in {caches.data_dir}.  Run `meshloom prepare`."
            )
            return run
        rows = Counts.read(stored["splits"]["train"]).rows
    print_note(epochs_text(run, rows))
    return run.with_steps(rows)


def epochs_text(run: Run, rows: int) -> str:
    """Describes how many steps a run of epochs has."""
    steps = run.with_steps(rows).total_steps
    return f"Run.epochs = {run.epochs:g}: {steps:,} steps, for {rows:,} training rows."


def input_lines(path: str) -> list[str]:
    """Reads a plain, .gz, .xz or .zst file, or the standard input, once for all processes."""
    if path == "-":
        raw_lines = decoded_lines(sys.stdin.buffer, "standard input")
        return from_first_process(lambda: list(map(without_carriage_return, raw_lines)))
    return from_first_process(lambda: list(read_lines(path)))


@contextlib.contextmanager
def open_output(path: str) -> Iterator[TextIO]:
    """Opens the standard output, or a file that appears under its name only once it is complete.

    Drops what processes other than 0 write.
    """
    if path in STREAMS:
        yield sys.stdout
        return
    output = path_of(path if is_first_process() else os.devnull)
    with write_errors(output, "give another file"), atomic_open(output) as file:
        yield file


def write_json(path: str | None, result: object) -> None:
    if path is not None:
        with open_output(path) as file:
            file.write(json.dumps(jsonl.finite(result), indent=2) + "\n")
