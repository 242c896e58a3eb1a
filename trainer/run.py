"""Configures one run: its model, task, length and intervals."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction as Exact
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.errors import UserError
from configs.spec import Count, CountOrZero, Fraction, NotNegative, Positive, Seed, spec
from data.batch_sizes import BatchSizes, value_at
from data.task import Length, Task
from data.tasks import chats as chats  # task files name what these define
from data.tasks import prompts as prompts
from data.tasks import span_corruption as span_corruption
from data.tasks import translation as translation
from data.vocab import Tokenizer
from data.vocabs import SOURCE_FILE, TARGET_FILE
from layouts.hlo.compilation import parse_option
from models.api import Frozen, ModelSpec
from models.distillation import Teacher as Teacher
from models.loss import Criterion
from models.preferences import Dpo as Dpo
from models.transformer import Transformer
from trainer.metrics.trackers import TensorBoard, TrackerSpec
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW as AdamW  # gin files name these
from trainer.optimizers.muon import Muon as Muon
from trainer.optimizers.optimizer import OptimizerSpec
from trainer.optimizers.spikes import SkipSpikes

ROWS_MULTIPLE = 128
"""Embeddings have a multiple of this number of rows, so that they split over many devices."""
MAX_STEPS = 2**31 - 1
"""Step counters have 32 bits."""
Step = Annotated[int, Field(ge=1, le=MAX_STEPS)]
StepsBefore = Annotated[int, Field(ge=0, le=MAX_STEPS)]


@spec
class Run:
    """Configures one training run.  The layout is not part of it."""

    model: ModelSpec
    """Architecture and its sizes."""
    task: Task
    """Data, vocabulary and row lengths."""
    optimizer: OptimizerSpec = Adafactor()
    """Update rule and its learning rate schedule."""
    steps: Step | None = None
    """Updates in the whole run. None: Run.epochs decides."""
    epochs: Positive | None = None
    """Number of passes over the training rows, instead of Run.steps. Rows of the next epoch fill up
    the last batch. Not for mixtures, whose parts end at different steps."""
    batch_sequences: Count
    """Rows in the global batch of one update, over all devices and microbatches."""
    batch_stages: tuple[tuple[Step, Count], ...] = ()
    """Changes the batch size during the run: pairs (steps, rows), in order; after that many steps,
    batches have that many rows. No row is lost or read twice. The learning rate schedule counts
    steps. --override adds stages to a run that has not reached them."""
    length_stages: tuple[tuple[StepsBefore, Length], ...] = ()
    """Changes the row length of a language model during the run: pairs (steps, length), in order;
    steps may be 0. Rows of Task.length are cut into rows of this length. A batch keeps its tokens,
    in more rows; a cut splits a document into two segments. Validation uses uncut rows. --override
    adds stages to a run that has not reached them."""
    microbatches: Count = 1
    """Number of slices of the batch (gradient accumulation); more slices save memory."""
    seed: Seed = 0
    """Seed of the initial weights, dropout and the order of rows."""
    exclude: tuple[str, ...] = ()
    """Training documents to replace with padding: FILE, FILE:LINE or FILE:LINE-LINE, as `meshloom
    inspect data` names them. All other documents keep their places."""
    start_from: str | None = None
    """Model directory of another run. This run starts with the latest weights and the vocabularies
    of that run. Adapters need the directory as long as they are used. If this model has experts and
    the other one is dense, each expert starts as a copy of the dense layer."""
    teacher: Frozen | None = None
    """Another model for the objective: @Teacher() for distillation, or @Dpo() as the reference
    model of preferences. None: only the text."""
    skip_spikes: SkipSpikes | None = None
    """Which updates to skip. None: no update; a NaN or infinite loss or gradient ends the run."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, such as 0.999. Checkpoints store the
    average in float32; commands load it with --average=ema. None: no average."""
    label_smoothing: Fraction = 0.0
    """Share of each target's probability to spread evenly over the vocabulary."""
    z_loss: NotNegative = 0.0
    """Weight of the z-loss: the squared log of the softmax denominator."""
    r_drop: NotNegative = 0.0
    """Weight of R-drop (alpha in Liang et al. 2021): each step runs its batch twice with different
    dropout, and also minimizes the divergence between the two predictions.  A step takes a little
    more than twice as long."""
    log_every: Count = 1
    """Number of steps per line of metrics.jsonl."""
    trackers: tuple[TrackerSpec, ...] = (TensorBoard(),)
    """Where the metrics are also sent: TensorBoard, Weights & Biases, or your own tracker."""
    checkpoint_every: Count | Literal["auto"] = 1000
    """Steps between checkpoints.  "auto" saves ten steps after each start, and then at the cheapest
    interval for the measured times of a step and a save (Young 1974), at most an hour."""
    local_checkpoint_every: Count | Literal["auto"] = "auto"
    """Steps between local checkpoints (`train --local_checkpoint_dir`); "auto" as above."""
    keep_last: Count = 3
    """Number of latest checkpoints to keep."""
    keep_best: bool = True
    """Also keeps the best checkpoint, chosen by Run.best_by."""
    best_by: Literal["loss", "bleu"] = "loss"
    """Metric on the validation split that decides which checkpoint is best."""
    evaluate_every: Count | None = None
    """Steps between evaluations on the validation split. None: only at the end."""
    evaluate_batches: Count | None = None
    """Batches per evaluation during training. The parts of a mixture share them, at least one each.
    None: the whole split."""
    stall_minutes: Positive | None = 30.0
    """After this many minutes without a finished step or evaluation batch, the run exits with code
    75, so that it can be restarted. None: never."""
    replay_every: Count | None = None
    """Every this many steps, recomputes a step with the devices in another order. If the weights
    differ, the run stops and names the device that computes wrong results. The state and a copy of
    it must fit in memory. None: never."""

    bleu_sentences: CountOrZero = 0
    """Number of validation sentences that each evaluation translates for BLEU."""
    compiler_options: tuple[str, ...] = ()
    """XLA options for the training step, such as "tpu:xla_enable_async_all_gather=true". Options
    for other platforms are ignored. configs/compilers/ contains sets for TPU v5e, v5p and tpu7x,
    and for GPUs."""

    def __post_init__(self) -> None:
        model = with_vocab_rows(self.model, self.task.vocab_settings)
        object.__setattr__(self, "model", model)  # the spec is frozen
        for option in self.compiler_options:
            parse_option(option)
        if (self.steps is None) == (self.epochs is None):
            raise UserError(
                f"Run.steps = {self.steps}, Run.epochs = {self.epochs}: one of them sets the "
                "length of a run.  Set one, and leave the other None."
            )
        if self.epochs is not None and len(self.task.source.parts_of("train")) > 1:
            raise UserError(
                f"Run.epochs = {self.epochs:g}: task {self.task.name} is a mixture, whose parts "
                "are read at rates and end their epochs at different steps.  Set Run.steps; "
                "`meshloom prepare` then reports how often each part is read."
            )
        if self.model.adapter is not None and self.start_from is None:
            raise UserError(
                f"{type(self.model).__name__}.adapter: adapters are added to the weights of "
                "another run.  Set Run.start_from to its model directory."
            )
        if self.teacher is not None and not (
            isinstance(self.model, Transformer) and self.model.adapter is None
        ):
            raise UserError(
                f"Run.teacher = @{type(self.teacher).__name__}(): it trains all weights of a "
                f"@Transformer(), not @{type(self.model).__name__}() with adapter = "
                f"{self.model.adapter}.  Unset the adapter, or Run.teacher."
            )
        if self.best_by == "bleu" and not self.bleu_sentences:
            raise UserError('Run.best_by = "bleu": set Run.bleu_sentences, such as to 200.')
        if self.bleu_sentences and not self.task.translates:
            raise UserError(
                f"Run.bleu_sentences = {self.bleu_sentences}: the task is not a translation task.  "
                "Unset it, or use @Translation()."
            )
        if self.r_drop and not self.model.has_dropout:
            raise UserError(
                f"Run.r_drop = {self.r_drop}: without dropout, both passes of the model are "
                "equal.  Unset it, or set Transformer.dropout, such as to 0.1."
            )
        for name, stages in self.stages.items():
            begins = [step for step, _ in stages]
            if begins != sorted(set(begins)):
                raise UserError(f"{name}: begin after steps {begins}.  The steps must increase.")
        sizes = {f"Run.batch_stages[{i}][1]": rows for i, (_, rows) in enumerate(self.batch_stages)}
        for name, rows in ({"Run.batch_sequences": self.batch_sequences} | sizes).items():
            if rows % self.microbatches:
                raise UserError(
                    f"{name} = {rows} does not divide into Run.microbatches = "
                    f"{self.microbatches}.  Legal: a multiple of it."
                )
        for i, (_, length) in enumerate(self.length_stages):
            try:
                self.task.with_rows_of(length)
            except UserError as error:
                raise UserError(f"Run.length_stages[{i}][1] = {length}: {error}") from None

    @property
    def merged(self) -> "Run":
        """Returns the run with adapters merged into the weights, and without a teacher."""
        model: Any = self.model
        model = model if model.adapter is None else dataclasses.replace(model, adapter=None)
        return dataclasses.replace(self, model=model, teacher=None)

    @property
    def vocabs_from(self) -> dict[str, str]:
        """Returns the model directories whose vocabularies the run uses, by setting."""
        folders = {"Run.start_from": self.start_from}
        if self.teacher is not None and self.base is not None:
            folders |= dict([self.base])
        return {setting: folder for setting, folder in folders.items() if folder is not None}

    @property
    def base(self) -> tuple[str, str] | None:
        """Returns the setting that names the frozen weights, and their folder."""
        if self.teacher is not None:
            return f"{type(self.teacher).__name__}.model_dir", self.teacher.model_dir
        if self.model.adapter is None or self.start_from is None:
            return None
        return "Run.start_from", self.start_from

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.batch_sequences, self.batch_stages)

    @property
    def microbatch_rows(self) -> int:
        return self.batch_sequences // self.microbatches

    @property
    def stages(self) -> dict[str, Sequence[tuple[int, int]]]:
        """Returns the stages of batch sizes and of row lengths, by setting."""
        return {"Run.batch_stages": self.batch_stages, "Run.length_stages": self.length_stages}

    def stage(self, step: int) -> "Run":
        """Returns the run in which all steps have the batch and row length of a step, from 0."""
        run = dataclasses.replace(self, batch_sequences=self.batch_sizes.at(step),
                                  batch_stages=(), length_stages=())  # fmt: skip
        length = value_at(step, None, self.length_stages)
        if length is None:
            return run
        rows = run.batch_sequences * (self.task.length // length)
        task = self.task.with_rows_of(length)
        return dataclasses.replace(run, task=task, batch_sequences=rows)

    @functools.cached_property
    def stage_begins(self) -> frozenset[int]:
        """Returns the steps, from 0, at which the batch or the length of rows may change."""
        return frozenset({0, *(step for stages in self.stages.values() for step, _ in stages)})

    @property
    def by_stage(self) -> list["Run"]:
        """Returns the run of each stage; the last one has the most tokens, in the longest rows."""
        runs = dict.fromkeys(self.stage(step) for step in sorted(self.stage_begins))
        return sorted(runs, key=lambda r: (r.batch_sequences * r.task.length, r.task.length))

    def with_steps(self, rows: int | None) -> "Run":
        """Returns the run with its length in steps, if the number of training rows is known."""
        if self.epochs is None or rows is None:
            return self
        steps = self.batch_sizes.step_of(math.ceil(Exact(str(self.epochs)) * rows) - 1) + 1
        if steps > MAX_STEPS:
            raise UserError(
                f"Run.epochs = {self.epochs:g}: with {rows:,} training rows, these are more than "
                f"{MAX_STEPS:,} steps.  Set fewer epochs."
            )
        return dataclasses.replace(self, steps=steps, epochs=None)

    @property
    def total_steps(self) -> int:
        """Returns the number of updates; raises if that depends on unknown training rows."""
        if self.steps is None:
            raise UserError(
                f"Run.epochs = {self.epochs:g}: the number of steps depends on the rows of task "
                f"{self.task.name}, which are not prepared here.  Run `meshloom prepare` first, or "
                "set Run.steps."
            )
        return self.steps

    def at_interval(self, step: int, interval: int | None) -> bool:
        """Returns True at multiples of `interval` and at the last step."""
        return step == self.steps or (interval is not None and step % interval == 0)

    @property
    def rows_together(self) -> int:
        """Returns how many neighbouring rows stay in one microbatch, to keep groups of tokens.

        So groups do not depend on the number of microbatches.
        """
        lengths, groups = self.task.array_lengths, self.model.groups
        return math.lcm(
            *(math.lcm(size, lengths[name]) // lengths[name] for name, size in groups.items())
        )

    @property
    def criterion(self) -> Criterion:
        of_teacher = {} if self.teacher is None else self.teacher.criterion_fields()
        return Criterion(
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            r_drop=self.r_drop,
            **of_teacher,
        )


def with_vocab_rows(model: ModelSpec, tokenizers: Mapping[str, Tokenizer]) -> ModelSpec:
    """Returns the model with rows for the vocabularies of a task, if its vocab is None."""
    if model.vocab is not None:
        return model
    sides = {"vocab": TARGET_FILE, "source_vocab": SOURCE_FILE if model.has_encoder else ""}
    rows = dict[str, int]()
    for name, file in sides.items():
        tokenizer = tokenizers.get(file)
        if tokenizer is None or getattr(model, name, 0) is not None:
            continue
        given = tokenizer.given()
        size = tokenizer.trained_size if given is None else given.size
        if size is not None:
            rows[name] = -(-size // ROWS_MULTIPLE) * ROWS_MULTIPLE
    return dataclasses.replace(model, **rows) if rows else model
