"""Runs `meshloom prepare --list` and `--prune`: shows and deletes prepared data."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from configs.errors import UserError
from data.cache import TaskCaches
from data.listing import CacheEntry, entries, prune
from scripts.commands.training.flags import PrepareFlags
from scripts.terminal import print_note, print_table
from trainer.multihost import is_first_process


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
