"""Runs `meshloom prepare`: tokenizes and packs a task; shows and deletes prepared data."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from configs.errors import UserError
from data.cache import TaskCaches
from data.listing import CacheEntry, entries, prune
from data.packing.rows import Rows
from data.sources.clean import Clean
from data.sources.text import Source
from data.task import Task
from data.vocab import Tokenizer
from scripts.commands.common import (
    check_same_settings,
    data_dir_of,
    epochs_text,
    settings,
    task_of,
    warn_unused,
)
from scripts.commands.training.flags import PrepareFlags
from scripts.commands.training.progress import build_bar
from scripts.terminal import print_note, print_table
from trainer.model_dir import starting_vocabs
from trainer.multihost import is_first_process
from trainer.prepare import prepare
from trainer.run import Run

KINDS = (Task, Source, Tokenizer, Clean)  # a gin file may have other settings, for a run


def prepare_task(flags: PrepareFlags) -> None:
    """Prepares a task and prints what its splits hold; or lists or deletes caches."""
    data_dir, manages = data_dir_of(flags.data_dir), flags.lists or flags.prune
    if flags.yes and not flags.prune:
        raise UserError("--yes: it answers --prune alone.  Leave it out.")
    if manages and not flags.settings.gin_file and not flags.settings.gin_param:
        manage_caches(flags, data_dir, None)
        return
    config = settings(None, flags.settings.gin_file, flags.settings.gin_param)
    check_same_settings(config)
    task = task_of(config)
    used = "Run.task" if "Run.task" in config.bound else type(task)
    warn_unused(config, used, kinds=KINDS)
    start_from = config.value("Run.start_from")
    vocabs = starting_vocabs(start_from, task) if isinstance(start_from, str) else None
    if manages:
        target, source = (None, None) if vocabs is None else vocabs
        manage_caches(flags, data_dir, TaskCaches(task, data_dir, target, source))
        return
    with build_bar() as on_progress:
        prepared = prepare(
            task, data_dir, vocabs=vocabs, rebuild=flags.rebuild, worker_count=flags.workers,
            on_progress=on_progress,
        )  # fmt: skip
    numbers = {name: rows.numbers() for name, rows in prepared.splits.items()}
    print_table(["split", *numbers["train"]], [(s, *n.values()) for s, n in numbers.items()])
    print_parts(prepared.splits)
    if config.value("Run.epochs") is not None and "Run.model" in config.bound:
        print_note(epochs_text(config.make(Run), len(prepared.splits["train"])))
    steps, batch = config.value("Run.steps"), config.value("Run.batch_sequences")
    is_of_run = isinstance(steps, int) and isinstance(batch, int)
    for line in mixture_lines(prepared.splits["train"], steps * batch if is_of_run else None):
        print_note(line)
    print_note(f"content hash {prepared.manifest['content_hash']}")


def mixture_lines(rows: Rows, sequences: int | None) -> Iterator[str]:
    """Describes each part of a mixture: its rate, its share, and how often a run reads a row.

    `sequences` is how many rows the run reads; None where no run is known.
    """
    if rows.mix is None:
        return
    for part, rate in zip(rows.parts, rows.mix.rates, strict=True):
        count = len(part.rows)
        line = f"{part.name}: {rate:.1%} of the rows of training, {count / len(rows):.1%} of all"
        if sequences is not None:
            line += (
                f"; the run reads each of its {count:,} rows {sequences * rate / count:,.2f} times"
            )
        yield line + "."


def print_parts(splits: Mapping[str, Rows]) -> None:
    """Prints what each part of a mixture gave to a split, and why examples are in no row.

    A rule of Clean that drops no pair shows 0; one that does not apply to a split shows nothing.
    """
    parts = [(split, part) for split, rows in splits.items() for part in rows.parts]
    reasons = list(dict.fromkeys(reason for _, part in parts for reason in part.dropped))
    rows = [
        (
            split,
            part.name,
            part.counts.lines,
            part.counts.rows,
            *(part.dropped.get(reason, "") for reason in reasons),
            f"{1 - part.counts.lines / max(part.read, 1):.2%}",
        )
        for split, part in parts
    ]
    if rows:
        print_table(["split", "part", "examples", "rows", *reasons, "not in the rows"], rows)


def manage_caches(flags: PrepareFlags, data_dir: Path, caches: TaskCaches | None) -> None:
    """Lists the caches of a data_dir, or deletes those that the settings do without."""
    if flags.prune and caches is None:
        raise UserError(
            "--prune: it deletes what other settings than the given ones built.  Give the "
            "--gin_file and --gin_param of the caches to keep."
        )
    if not is_first_process():
        return
    listed = entries(data_dir, caches)
    if caches is not None and flags.prune:
        different = [entry for entry in listed if entry.is_compared and entry.reasons]
        if different:
            print_entries(different)
            prune_entries([e for e in different if e.is_prunable], is_sure=flags.yes)
        else:
            print_note(
                f"Nothing is deleted: {data_dir} has no cache of task {caches.task.name!r} with "
                "other settings or another text than these, and "
                f"{sum(entry.is_compared for entry in listed)} with these."
            )
    elif listed:
        print_entries(listed)
    else:
        print_note(f"There are no caches in {data_dir}.")


def print_entries(listed: Sequence[CacheEntry]) -> None:
    """Prints a table of caches."""
    rows = []
    for entry in listed:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.written_s))
        uses = ["a process uses it"] if entry.is_used else []
        if entry.is_compared:
            uses.insert(0, "other settings or text" if entry.reasons else "these settings")
        row = (entry.task_name, entry.folder.name, megabytes(entry), written, ", ".join(uses))
        rows.append((*row, "; ".join(entry.reasons)))
    print_table(["task", "folder", "MB", "written", "use", "differs"], rows)


def prune_entries(unused: Sequence[CacheEntry], *, is_sure: bool) -> None:
    """Deletes caches, after a question unless the user is sure."""
    if not unused:
        print_note("Nothing is deleted: a process uses each of them.")
        return
    names = ", ".join(entry.folder.name for entry in unused)
    if not is_sure and not sys.stdin.isatty():
        raise UserError(f"--prune would delete {names}.  Add --yes.")
    if not is_sure and not click.confirm(f"Delete {names}?"):
        print_note("Nothing is deleted.")
        return
    removed = [entry for entry in unused if prune(entry)]
    for entry in removed:
        print_note(f"Deleted {entry.folder} ({megabytes(entry)} MB).")
    for entry in unused:
        if entry not in removed:
            print_note(f"Kept {entry.folder}: a process began to use it.")


def megabytes(entry: CacheEntry) -> str:
    """Returns the size of a cache in megabytes."""
    return f"{entry.content_bytes / 1e6:,.1f}"
