"""Reads and writes a model directory: what training leaves there for every later command.

config.gin         model, task and all settings of the run, self-contained; never a layout
layout.gin         the layout given last, for the next command line; never read by itself
history.jsonl      a line for each start of training: from which step, on which data, what changed
vocab.model        the vocabulary
source_vocab.model that of the source, where it has its own
train.lock         the process that trains there, while it does
model.gin          of an imported model: its settings alone, for runs that start from it
huggingface/       of an imported model: its settings and tokenizer, which an export gives back
checkpoints/       weights, opt_state and step
metrics.jsonl, evaluations.jsonl, events/, loss.png, plan.json
wandb.id, mlflow.id the run's ids at these services, where Run.trackers names them
"""

from collections.abc import Sequence
from pathlib import Path

from configs.errors import UserError
from configs.load import Config, load
from configs.paths import path_of
from configs.write import dump
from data import order
from data.cache import Prepared
from data.mixture import TABLE_ROWS
from data.storage.files import atomic_write
from data.task import Task
from data.vocabs import SOURCE_FILE, Vocabs, load_vocab
from layouts.layout import Layout
from trainer.resume.history import Start, starts
from trainer.run import Run

HUGGINGFACE = "huggingface"


class ModelDir:
    """Reads and writes the small files of a model directory."""

    def __init__(self, model_dir: Path):
        self.model_dir = model_dir
        self.config_file = model_dir / "config.gin"
        self.layout_file = model_dir / "layout.gin"

    def has_run(self) -> bool:
        return self.config_file.exists()

    def load(self, gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> Config:
        """Loads the saved settings under the given ones.  The layout is only ever a given one."""
        if not self.has_run():
            raise UserError(
                f"{self.model_dir}: no trained model there (config.gin is missing).  "
                "Name the --model_dir of a run that `meshloom train` made."
            )
        return load([str(self.config_file), *gin_files], gin_params)

    def save(self, config: Config, run: Run, vocabs: Vocabs) -> None:
        """Keeps vocabularies and settings; the last file is what makes a run of the folder."""
        self.model_dir.mkdir(parents=True, exist_ok=True)
        for name, model in vocabs.files().items():
            atomic_write(self.model_dir / name, model)
        atomic_write(self.config_file, config.dump([run]))

    def keep_imported(self, start_from: str) -> None:
        """Copies what an import kept, from the run that this one starts from."""
        source, target = path_of(start_from) / HUGGINGFACE, self.model_dir / HUGGINGFACE
        for file in source.iterdir() if source.exists() else ():
            target.mkdir(exist_ok=True)
            atomic_write(target / file.name, file.read_bytes())

    def vocabs(self, task: Task) -> Vocabs:
        return Vocabs.load(self.model_dir, task.source_vocab_file)

    def has_source_vocab(self) -> bool:
        """Returns whether the source has a vocabulary of its own."""
        return (self.model_dir / SOURCE_FILE).exists()

    def check_text(self, prepared: Prepared, task: Task) -> None:
        """Refuses to continue a run on other text, or on its rows in another order."""
        before, content_hash = self.content_hash, prepared.manifest["content_hash"]
        if before not in (None, content_hash):
            raise UserError(
                f"{self.model_dir} was trained on other text of task {task.name} (content hash "
                f"{before}, now {content_hash}).  Give the --data_dir of "
                "that text, or choose another --model_dir."
            )
        version = order.VERSION if self.last_start is None else self.last_start.order
        if not order.has_order_of(version, prepared.splits["train"]):
            raise UserError(
                f"{self.model_dir} was trained on the rows in the order of an earlier version "
                f"(order {version}, now {order.VERSION}), which is another one for more than "
                f"{TABLE_ROWS:,} rows.  Continue with that version of Meshloom, or give "
                "another --model_dir and the Run.start_from of this one."
            )

    @property
    def content_hash(self) -> str | None:
        """Returns the hash of the text that the run reads; None before it has begun."""
        return None if self.last_start is None else self.last_start.content_hash

    @property
    def last_start(self) -> Start | None:
        """Returns the newest line of the history."""
        return next(reversed(starts(self.model_dir)), None)

    @property
    def layout(self) -> Layout | None:
        """Returns the layout that was given last."""
        if not self.layout_file.exists():
            return None
        return load([str(self.layout_file)]).make(Layout)

    def save_layout(self, layout: Layout) -> None:
        """Keeps a layout, for those who want to give it again."""
        atomic_write(self.layout_file, dump([layout]))


def starting_vocabs(folder: str, task: Task) -> Vocabs:
    """Returns the vocabularies of another run, whose weights mean its ids, for this task."""
    directory = ModelDir(path_of(folder))
    if not directory.has_run():
        raise UserError(
            f"Run.start_from = {folder!r}: no trained model there (config.gin is missing).  "
            "Legal: the model directory of a run that has saved a checkpoint."
        )
    source_file = task.source_vocab_file
    if source_file is not None and (source_file == SOURCE_FILE) != directory.has_source_vocab():
        raise UserError(
            f"Run.start_from = {folder!r}: task {task.name} and that run differ in whether source "
            "and target share a vocabulary.  Set Translation.source_vocab as in that run."
        )
    for name, settings in task.vocab_settings.items():
        given = settings.given()
        if given is not None and given.hash != load_vocab(path_of(folder) / name).hash:
            raise UserError(
                f"Run.start_from = {folder!r}: its weights belong to the vocabulary {name} there, "
                f"and task {task.name} has @{type(settings).__name__}() with "
                f"{settings.given_path!r}.  Take Task.vocab = @SentencePiece() without a "
                "model_file: the run then takes that vocabulary."
            )
    return directory.vocabs(task)
