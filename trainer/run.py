"""What one run is: a model, a task and how long and how often."""

from configs.errors import UserError
from configs.spec import Count, Fraction, NotNegative, spec
from data.task import Task
from models.api import ModelSpec
from models.loss import Criterion
from trainer.optimizer import Adafactor, AdamW


@spec
class Run:
    """One training run.  The layout is no part of it."""

    model: ModelSpec
    task: Task
    optimizer: Adafactor | AdamW = Adafactor()
    steps: Count
    """Updates in the whole run."""
    batch_sequences: Count
    """Rows in the global batch of one update, over all devices and microbatches."""
    microbatches: Count = 1
    """Slices of the batch whose gradients are added before the update; they save memory."""
    seed: int = 0
    label_smoothing: Fraction = 0.0
    z_loss: NotNegative = 0.0
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""
    checkpoint_every: Count = 1000
    keep_last: Count = 3
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep the checkpoint of the lowest validation loss as well."""
    evaluate_every: Count | None = None
    """Steps between evaluations on the validation split; only at the end where it is None."""
    evaluate_batches: Count | None = None
    """Batches in an evaluation during training; the whole split where it is None."""

    def __post_init__(self) -> None:
        if self.batch_sequences % self.microbatches:
            raise UserError(
                f"Run.batch_sequences = {self.batch_sequences} does not divide into "
                f"Run.microbatches = {self.microbatches}.  Legal: a multiple of it."
            )

    @property
    def criterion(self) -> Criterion:
        return Criterion(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
