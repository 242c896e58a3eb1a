"""Reads and writes a model directory: what training stores there for later commands.

config.gin         model, task and all settings of the run, self-contained; without the layout
layout.gin         the last layout, to give to a later command; never loaded by default
history.jsonl      a signed record for each start of training: its step, data, vocabulary, settings
                   and changes; each checkpoint has one too, which is checked with its weights
vocab.model        the vocabulary
source_vocab.model the vocabulary of the source, if it differs
train.lock         names the process that is training there
model.gin          of an imported model: only its settings, for runs that start from it
huggingface/       of an imported model: its settings and tokenizer, for a later export
checkpoints/       weights, opt_state and step
metrics.jsonl, evaluations.jsonl, events/, loss.png, plan.json
wandb.id           the run's id at Weights & Biases, if Run.trackers names it
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.load import Config, load
from configs.paths import path_of
from configs.write import diff, dump
from data import order
from data.cache import Prepared
from data.storage import lookup
from data.storage.files import atomic_write
from data.task import Task
from data.vocabs import SOURCE_FILE, Vocabs, load_vocab
from layouts.layout import Layout
from models.spec import TransformerSpec
from trainer.resume.history import (
    Change,
    Start,
    known_starts,
    not_of_run,
    record_of,
    record_start,
    saved_starts,
    time_now,
    unknown_starts,
)
from trainer.run import Run

HUGGINGFACE = "huggingface"


class ModelDir:
    """Reads and writes the small files of a model directory."""

    def __init__(self, model_dir: Path):
        self.model_dir = model_dir
        self.config_file = model_dir / "config.gin"
        self.layout_file = model_dir / "layout.gin"

    def has_run(self) -> bool:
        return lookup.exists(self.config_file)

    def load(self, gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> Config:
        """Loads the saved settings, overridden by the given ones; never the saved layout."""
        if not self.has_run():
            remedy = (
                "Give the directory of a run; `meshloom train` with --gin_file=FILE starts one."
            )
            if lookup.exists(self.model_dir / "config.json"):
                remedy = "`meshloom import hf` makes one from a folder in Hugging Face's format."
            elif self.record is not None:
                remedy = "It had one: copy config.gin back."
            raise UserError(
                f"{self.model_dir}: no trained model there (config.gin is missing).  {remedy}"
            )
        self.check_config()
        return self.settings(gin_files, gin_params)

    def check_config(self) -> None:
        """Raises `UserError` if config.gin differs from the settings in the run's record."""
        record = self.record if self.has_run() else None
        text = record and self.config_file.read_bytes().decode("utf-8", "replace")
        if record is None or record.settings == text:
            return
        written = self.settings().make(Run)
        if changes := [str(Change(*row)) for row in diff(self.recorded_run(), written)]:
            raise UserError(
                f"{self.config_file}: not the settings of the run: {'; '.join(changes)}.  Change "
                "them back.  `meshloom train --override` accepts those that may change."
            )

    def settings(self, gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> Config:
        """Loads the settings of config.gin, overridden by the given ones."""
        return load([str(self.config_file), *gin_files], gin_params)

    def recorded_run(self) -> Run:
        """Returns the run in its record, or the one in config.gin if no settings are recorded."""
        record = self.record
        recorded = load((), [record.settings]) if record and record.settings else self.settings()
        return recorded.make(Run)

    def save(self, config: Config, run: Run, vocabs: Vocabs, step: int = 0, **record: Any) -> None:
        """Saves vocabularies and settings; config.gin, written last, makes the folder a run."""
        self.model_dir.mkdir(parents=True, exist_ok=True)
        for name, model in vocabs.files().items():
            atomic_write(self.model_dir / name, model)
        settings = dump([run], config.imports)
        record = {"time": time_now(), "vocab": vocabs.hashes(), "settings": settings, **record}
        record_start(self.model_dir, Start(step, **record))
        atomic_write(self.config_file, settings)

    def keep_imported(self, start_from: str) -> None:
        """Copies the files that an import kept from the run that this one starts from."""
        source, target = path_of(start_from) / HUGGINGFACE, self.model_dir / HUGGINGFACE
        for file in source.iterdir() if source.exists() else ():
            target.mkdir(exist_ok=True)
            atomic_write(target / file.name, file.read_bytes())

    def vocabs(self, task: Task) -> Vocabs:
        """Returns the vocabularies of the run; raises if they have changed."""
        record = self.record
        data_dir = (record and record.data_dir) or "--data_dir"
        copy_back = f"Copy it back from {data_dir}/{task.name}*."
        self.check_records()
        try:
            vocabs = Vocabs.load(self.model_dir, task.source_vocab_file)
        except UserError as error:  # advice for other vocabularies follows its first sentence
            raise UserError(f"{str(error).partition('  ')[0]}  {copy_back}") from None
        before, now = (record and record.vocab) or {}, vocabs.hashes()
        if before and before != now:
            hashes = (f"{file}: hash {before.get(name)} in its record, now {now[name]}"
                      for file, name in zip(vocabs.files(), now, strict=False))  # fmt: skip
            raise UserError(
                f"{self.model_dir}: not the vocabulary of the run ({', '.join(hashes)}).  "
                f"{copy_back}"
            )
        return vocabs

    def check_records(self) -> None:
        """Raises `UserError` if another run, or other settings, saved one of the checkpoints."""
        for step, saved in unknown_starts(self.model_dir):
            before: dict[str, str] = {}  # what later starts changed
            for start in reversed(known_starts(self.model_dir)):
                if start.moment > saved.moment:
                    before |= {change["name"]: change["old"] for change in start.changes}
            changes = self.changes_since(step, self.recorded_run())
            if others := [str(c) for c in changes if before.get(c.name) != repr(c.old)]:
                raise not_of_run(self.model_dir, step, "; ".join(others))

    def changes_since(self, step: int, run: Run) -> list[Change]:
        """Returns the settings that differ from those in a checkpoint, if it has some."""
        saved = next((start for n, start in saved_starts(self.model_dir) if n == step), None)
        settings = saved and saved.settings
        return [Change(*x) for x in diff(load((), [settings]).make(Run), run)] if settings else []

    def check_text(self, prepared: Prepared, task: Task, first: Task | None = None) -> None:
        """Raises if a run would continue on other text, on other rows, or in another order of rows.

        `first` is the task before parts were added to its mixture.
        """
        record = self.record
        before = (record.content_hash, record.rows_hash) if record else (None, None)
        texts, rows = prepared.hashes(first)
        for name, then, now in zip(("text", "rows"), before, (texts, [rows]), strict=True):
            if None not in (then, *now) and then not in now:
                raise UserError(
                    f"{self.model_dir} was trained on other {name} of task {task.name} (hash "
                    f"{then}, now {now[0]}).  Give the --data_dir of that training, or choose "
                    "another --model_dir."
                )
        if record is not None and record.order != order.VERSION:
            raise UserError(
                f"{self.model_dir} was trained on the rows in another order (version "
                f"{record.order}, now {order.VERSION}).  Resume with that version of Meshloom, or "
                "give another --model_dir and the Run.start_from of this one."
            )

    @property
    def content_hash(self) -> str | None:
        """Returns the hash of the run's text; None before the run has begun."""
        record = self.record
        return None if record is None else record.content_hash

    @property
    def record(self) -> Start | None:
        """Returns the newest record, from history.jsonl or the newest checkpoint."""
        return record_of(self.model_dir)

    @property
    def layout(self) -> Layout | None:
        """Returns the layout that was given last."""
        if not self.layout_file.exists():
            return None
        return load([str(self.layout_file)]).make(Layout)

    def save_layout(self, layout: Layout) -> None:
        """Saves a layout, so that users can give it again."""
        atomic_write(self.layout_file, dump([layout]))


def starting_vocabs(folders: Mapping[str, str], task: Task) -> Vocabs | None:
    """Returns the common vocabularies of the runs whose weights a new run uses, if any.

    `folders` are the folders of these runs by setting; `task` is the task of the new run.
    """
    taken = {setting: _vocabs_of(setting, folder, task) for setting, folder in folders.items()}
    if len({str(vocabs.hashes()) for vocabs in taken.values()}) > 1:
        raise UserError(
            f"{' and '.join(f'{name} = {folder!r}' for name, folder in folders.items())} have "
            "different vocabularies.  Legal: runs of one vocabulary."
        )
    return next(iter(taken.values()), None)


def _vocabs_of(setting: str, folder: str, task: Task) -> Vocabs:
    directory = _directory_of(setting, folder)
    source_file = task.source_vocab_file
    has_source_vocab = (directory.model_dir / SOURCE_FILE).exists()
    if source_file is not None and (source_file == SOURCE_FILE) != has_source_vocab:
        raise UserError(
            f"{setting} = {folder!r}: task {task.name} and that run differ in whether source "
            "and target share a vocabulary.  Set Translation.source_vocab as in that run."
        )
    for name, settings in task.vocab_settings.items():
        given = settings.given()
        if given is not None and given.hash != load_vocab(path_of(folder) / name).hash:
            raise UserError(
                f"{setting} = {folder!r}: its weights belong to the vocabulary {name} there, and "
                f"task {task.name} has @{type(settings).__name__}() with {settings.given_path!r}.  "
                "Use Task.vocab = @SentencePiece() without a model_file: the run then uses that "
                "vocabulary."
            )
    directory.load()  # raises if its settings are not those that its weights were trained with
    return directory.vocabs(task)


@functools.cache
def teacher_spec(setting: str, model_dir: str, student: TransformerSpec) -> TransformerSpec:
    """Returns the model of a trained run, which must predict the same tokens as its student."""
    title = f"{setting} = {model_dir!r}"
    spec = _directory_of(setting, model_dir).load().make(Run).merged.model
    if not isinstance(spec, TransformerSpec) or spec.has_encoder != student.has_encoder:
        raise UserError(
            f"{title}: @{type(spec).__name__}() with encoder_layers = "
            f"{getattr(spec, 'encoder_layers', 0)}.  Legal: a model of the same kind, here with "
            f"encoder_layers = {student.encoder_layers}."
        )
    for name in ("vocab", "source_vocab"):
        if (rows := getattr(spec, name)) != getattr(student, name):
            raise UserError(
                f"{title}: its model has {name} = {rows}, this one {getattr(student, name)}.  "
                "Legal: the same in both; a new model uses the same rows and vocabulary with "
                f"Transformer.{name} = {rows}."
            )
    return spec


def _directory_of(setting: str, folder: str) -> ModelDir:
    """Returns the model directory that a setting names; raises if it has no run."""
    directory = ModelDir(path_of(folder))
    if not directory.has_run():
        raise UserError(
            f"{setting} = {folder!r}: no trained model there (config.gin is missing).  "
            "Legal: the model directory of a run that has saved a checkpoint."
        )
    return directory
