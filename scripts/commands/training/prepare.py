"""Runs `meshloom prepare`: tokenizes and packs a task."""

from collections.abc import Iterator, Mapping

from data.batch_sizes import BatchSizes
from data.packing.rows import Rows
from scripts.commands import common
from scripts.commands.training.flags import PrepareFlags
from scripts.commands.training.progress import build_bar
from scripts.terminal import print_note, print_table
from trainer.model_dir import starting_vocabs
from trainer.prepare import prepare
from trainer.run import Run


def prepare_task(flags: PrepareFlags) -> None:
    """Prepares a task, and prints the contents of its splits."""
    data_dir = common.data_dir_of(flags.data_dir)
    config = common.settings(None, flags.settings.gin_file, flags.settings.gin_param)
    common.check_same_settings(config)
    task = common.task_of(config)
    others = ("Run.start_from", "Teacher.model_dir", "Dpo.model_dir")
    named = {name: config.value(name) for name in others}
    folders = {name: folder for name, folder in named.items() if isinstance(folder, str)}
    vocabs = starting_vocabs(folders, task)
    with build_bar() as on_progress:
        prepared = prepare(
            task, data_dir, vocabs=vocabs, rebuild=flags.rebuild, worker_count=flags.workers,
            on_progress=on_progress,
        )  # fmt: skip
    numbers = {name: task.numbers(rows.counts) for name, rows in prepared.splits.items()}
    print_table(["split", *numbers["train"]], [(s, *n.values()) for s, n in numbers.items()])
    print_parts(prepared.splits)
    rows, length = prepared.splits["train"], None
    has_length = any(config.value(name) is not None for name in ("Run.steps", "Run.epochs"))
    if has_length and {"Run.model", "Run.batch_sequences"} <= {*config.bound}:
        run = config.make(Run)
        if run.epochs is not None:
            print_note(common.epochs_text(run, len(rows)))
        length = run.seed, run.with_steps(len(rows)).total_steps, run.batch_sizes
    print_note(*mixture_lines(rows, length))
    print_note(f"content hash {prepared.manifest['content_hash']}")


def mixture_lines(rows: Rows, length: tuple[int, int, BatchSizes] | None) -> Iterator[str]:
    """Describes each part of a mixture: its rates, its share, and how often a run reads a row.

    `length` holds seed, steps and batch sizes of the run; None if no run is known.
    """
    if rows.mix is None:
        return
    stages = [0, *(step for step, _ in rows.mix.stages)]
    rates = zip(*map(rows.mix.rates_after, stages), strict=True)
    for number, (part, (first, *later)) in enumerate(zip(rows.parts, rates, strict=True)):
        count = len(part.rows)
        line = f"{part.name}: {first:.1%} of the rows of training"
        for step, rate in zip(stages[1:], later, strict=True):
            line += f", {rate:.1%} after step {step:,}"
        line += f", {count / len(rows):.1%} of all"
        if length is not None:
            times = rows.mix.drawn_before(*length)[number] / count
            line += f"; the run reads each of its {count:,} rows {times:,.2f} times"
        yield line + "."


def print_parts(splits: Mapping[str, Rows]) -> None:
    """Prints what each part of a mixture adds to a split, and why examples are in no row.

    A rule of Clean that drops no pair shows 0; one that does not apply to a split shows nothing.
    """
    parts = [(split, part) for split, rows in splits.items() for part in rows.parts]
    reasons = list(dict.fromkeys(reason for _, part in parts for reason in part.dropped))
    rows = list[list[object]]()
    for split, part in parts:
        dropped = [part.dropped.get(reason, "") for reason in reasons]
        lost = f"{(part.read - part.counts.lines) / max(part.read, 1):.2%}"
        rows.append([split, part.name, part.counts.lines, part.counts.rows, *dropped, lost])
    if rows:
        print_table(["split", "part", "examples", "rows", *reasons, "not in the rows"], rows)
