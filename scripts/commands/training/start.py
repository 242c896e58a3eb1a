"""Starts or continues a run: its settings, what changed, and how to continue."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from configs.errors import UserError, brief
from configs.load import Config, load
from configs.paths import absolute
from data.cache import Prepared
from layouts.layout import Layout
from models.transformer import Transformer
from scripts.commands.common import data_dir_of, epochs_text, settings
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.prepare import mixture_lines
from scripts.commands.training.progress import build_bar
from scripts.flag import given_flags
from scripts.terminal import print_note
from trainer.checkpoints.huggingface.convert import closest_family
from trainer.checks import check_vocabs
from trainer.model_dir import ModelDir, starting_vocabs
from trainer.multihost import is_first_process
from trainer.observers import Observer
from trainer.prepare import prepare
from trainer.resume.changes import adds_parts, check_changes
from trainer.resume.history import Change, last_saved
from trainer.run import Run


def settings_to_train(flags: TrainFlags, step: int | None) -> Config:
    """Returns the given settings, over those in the model directory if it has a run.

    A run without a checkpoint has trained nothing: settings of another complete run replace it.
    """
    given = flags.settings.gin_file, flags.settings.gin_param
    if flags.settings.gin_file and step is None:
        config = load(*given)
        if config.bound.keys() >= {"Run.model", "Run.task"}:
            return config
    directory = ModelDir(flags.model_dir)
    if directory.has_run():  # differences from its record count as changes, like given settings
        return directory.settings(*given)
    return settings(None if flags.settings.gin_file else flags.model_dir, *given)


def changes_since(flags: TrainFlags, run: Run, step: int | None) -> list[Change]:
    """Returns the settings that changed since the last start; raises if one must not change."""
    directory, override = ModelDir(flags.model_dir), flags.override
    saved, has_run = last_saved(directory.model_dir), directory.has_run()
    lost = None
    if step is None and saved:
        lost = f"its checkpoints are missing, but it reached step {saved}.  Mount or copy them back"
    elif step is not None and not has_run:
        lost = "it has checkpoints, but config.gin is missing.  Copy it back"
    if lost and not override:
        raise UserError(f"{directory.model_dir}: {lost}, or add --override to continue without.")
    record = directory.record
    if step is None or not (has_run or (record and record.settings)):
        return []
    title = f"{directory.model_dir} contains a run with different settings"
    return check_changes(title, directory.recorded_run(), run, override=override, step=step)


def note_no_export(run: Run) -> None:
    """Prints, before training, that other libraries cannot read this model."""
    if not isinstance(model := run.merged.model, Transformer):
        return
    kind, problems = closest_family(model)
    if problems:
        names = ", ".join(problem.split(" = ")[0] for problem in problems)
        print_note(
            f"`meshloom export hf` cannot write this model: Hugging Face's {kind} has another "
            f"{names} (docs/importing.md)."
        )


class ChangeNotes(Observer):
    """Prints what changes after the checkpoint that is restored, and which rows that affects."""

    def __init__(self, model_dir: Path, run: Run):
        self._model_dir, self._run = model_dir, run

    def on_start(self, run: Run, first_step: int) -> None:
        step, steps = first_step, run.total_steps
        changes = ModelDir(self._model_dir).changes_since(step, self._run)
        for name, old, new in changes:
            values = f"{name} = {brief(repr(new))}, it was {brief(repr(old))}"
            print_note(f"Changed after step {step}: {values}.")
            if name == "Run.batch_sequences":  # with the step, it is the position in the data
                before = dataclasses.replace(run, batch_sequences=old)
                first, end = sorted(each.batch_sizes.before(step) for each in (before, run))
                what = "skipped" if new > old else "read again"
                print_note(f"Rows {first:,} to {end - 1:,} of the data order are {what}.")
        if changes and step < steps:
            rate = run.optimizer.schedule.rate(steps)
            now, last = (float(rate(jnp.asarray(s))) for s in (step, steps - 1))
            print_note(
                f"Learning rate {now:.3g}; the schedule ends at step {steps:,} with {last:.3g}."
            )
        if step > steps:
            print_note(
                f"Warning: the run ends at step {steps}, below step {step} of its checkpoint, so "
                "nothing is trained.  Raise Run.steps or Run.epochs to train on."
            )


def prepared_data(flags: TrainFlags, run: Run, *, is_continued: bool) -> Prepared:
    """Prepares the task, with the vocabularies that belong to the weights, if there are any."""
    directory, vocabs, content_hash = ModelDir(flags.model_dir), None, None
    if is_continued:
        vocabs, content_hash = directory.vocabs(run.task), directory.content_hash
    else:
        vocabs = starting_vocabs(run.vocabs_from, run.task)
    data_dir = data_dir_of(flags.data_dir, flags.model_dir)
    with build_bar() as on_progress:
        prepared = prepare(
            run.task, data_dir, vocabs=vocabs, content_hash=content_hash,
            on_progress=on_progress,
        )  # fmt: skip
    rows = prepared.splits["train"].without(run.exclude)
    if run.epochs is not None:
        print_note(epochs_text(run, len(rows)))
    steps = run.with_steps(len(rows)).total_steps
    print_note(*mixture_lines(rows, (run.seed, steps, run.batch_sizes)))
    check_vocabs(run, prepared.vocabs)
    if is_continued:
        saved = directory.recorded_run().task
        first = saved if adds_parts(saved.source, run.task.source) else None
        directory.check_text(prepared, run.task, first)
    return prepared


def save_start(
    flags: TrainFlags, config: Config, run: Run, layout: Layout, prepared: Prepared,
    step: int | None, changes: Sequence[Change], begin: str,
) -> None:  # fmt: skip
    """Records what this part of the run is made from, for those who continue it."""
    directory = ModelDir(flags.model_dir)
    record = directory.record
    began = begin if step is None else record and record.began
    is_layout_given = any(name.startswith("Layout.") for name in config.bound)
    if is_first_process():
        if is_layout_given:
            directory.save_layout(layout)
        directory.save(
            config, run, prepared.vocabs, step or 0, data_dir=str(absolute(prepared.folder.parent)),
            saved=max(step or 0, last_saved(directory.model_dir)) or None, began=began,
            content_hash=prepared.manifest["content_hash"], rows_hash=prepared.rows_hash,
            train_rows=len(prepared.splits["train"]), time=begin,
            changes=[{"name": c.name, "old": repr(c.old), "new": repr(c.new)} for c in changes],
        )  # fmt: skip
        if run.start_from is not None and not step:
            directory.keep_imported(run.start_from)
    if not is_layout_given and directory.layout not in (None, layout):
        print_note(
            f"The last layout of this run is in {directory.layout_file}.  To use it again, "
            f"add --gin_file={shlex.quote(str(directory.layout_file))}."
        )


def continue_command(flags: TrainFlags, layout: Layout) -> str:
    """Returns the command that continues the run as it ran, without what the run remembers."""
    directory = ModelDir(flags.model_dir)
    given: list[tuple[str, object]] = [("--model_dir", flags.model_dir)]
    if directory.layout == layout:
        given.append(("--gin_file", directory.layout_file))
    if flags.local_checkpoint_dir is not None:
        given.append(("--local_checkpoint_dir", flags.local_checkpoint_dir))
    given += [("--gin_import_path", folder) for folder in flags.settings.gin_import_path]
    given += given_flags(flags.devices).items()
    return shlex.join(["meshloom", "train", *(f"{flag}={value}" for flag, value in given)])


def remedy(flags: TrainFlags, run: Run, layout: Layout, step: int) -> str:
    """Describes how to continue after a loss that is NaN or infinite."""
    schedule, optimizer = type(run.optimizer.schedule).__name__, type(run.optimizer).__name__
    peak = getattr(run.optimizer.schedule, "peak", None)
    lower = "…" if peak is None else f"{schedule}.peak={peak / 2:g}"
    command = f"{continue_command(flags, layout)} --override {shlex.quote(f'--gin_param={lower}')}"
    return (
        f"  Resume with a lower learning rate, or with {optimizer}.clip_global_norm set lower:\n"
        f"    {command}\n"
        f"  Look at the rows: meshloom inspect data --model_dir={shlex.quote(str(flags.model_dir))}"
        f" --step={step}"
    )
