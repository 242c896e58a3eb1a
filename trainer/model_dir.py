"""A model directory: what training leaves there for every later command.

config.gin         model, task and all settings of the run, self-contained; never a layout
vocab.model        the vocabulary
source_vocab.model that of the source, where it has its own
checkpoints/       weights, opt_state and step
metrics.jsonl, evaluations.jsonl, events/, loss.png, plan.json
"""

from pathlib import Path

from configs.errors import UserError
from configs.load import Config, load
from configs.write import diff
from data.storage import atomic_write
from data.task import Task
from data.vocabs import Vocabs
from trainer.run import Run

# What may differ between a saved run and the one that continues it.
FREE = ("Run.steps", "Run.checkpoint_every", "Run.keep_", "Run.evaluate_", "Run.log_every",
        "Run.stall_minutes", "Run.microbatches", "Transformer.scan",
        "Transformer.remat")  # fmt: skip


class ModelDir:
    """Reads and writes the small files of a model directory."""

    def __init__(self, model_dir: Path):
        self.model_dir = model_dir
        self.config_file = model_dir / "config.gin"

    def has_run(self) -> bool:
        return self.config_file.exists()

    def load(self, gin_files: tuple[str, ...], gin_params: tuple[str, ...]) -> Config:
        """Loads the saved settings under the given ones.  The layout is only ever a given one."""
        if not self.has_run():
            raise UserError(
                f"{self.model_dir}: no trained model there (config.gin is missing).  "
                "Name the --model_dir of a run that `meshloom train` made."
            )
        return load([str(self.config_file), *gin_files], gin_params)

    def save(self, config: Config, run: Run, vocabs: Vocabs) -> None:
        """Keeps settings and vocabularies; refuses to continue a run of another model or task."""
        if self.has_run():
            self._check_same(run)
        self.model_dir.mkdir(parents=True, exist_ok=True)
        atomic_write(self.config_file, config.dump([run]))
        for name, model in vocabs.files().items():
            atomic_write(self.model_dir / name, model)

    def vocabs(self, task: Task) -> Vocabs:
        return Vocabs.load(self.model_dir, task.source_vocab_file)

    def _check_same(self, run: Run) -> None:
        saved = load([str(self.config_file)]).make(Run)
        changed = [row for row in diff(saved, run) if not row[0].startswith(FREE)]
        if changed:
            rows = "\n".join(f"  {name}: {old!r} there, {new!r} now" for name, old, new in changed)
            raise UserError(
                f"{self.model_dir} holds a run with other settings:\n{rows}\n"
                "  Choose another --model_dir, or the same settings to continue that run."
            )
