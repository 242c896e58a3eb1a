"""Computes the loss of a split and its parts, and perplexities per counted word and byte."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from configs.errors import UserError
from data.order import in_order
from data.packing.rows import Rows
from models.api import Model, Params
from models.loss import CROSS_ENTROPY, Criterion, LossSums
from trainer.feed import BatchSharding, dispatch_ahead
from trainer.metrics.expert_load import stats_by_layer
from trainer.step import evaluate_step

Progress = Callable[[int, int], None]
"""Called with the number of finished parts of the work, and with their total number."""
Part = dict[str, Any]
"""Loss, tokens and experts of one part of a mixture, under their names in evaluations.jsonl."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Holds the results on a text, or on images, whose only token is the label.

    Words are counted as in `Counts`, without the ends of lines.  Perplexity per word divides by the
    words and lines, as published numbers do, because the model also predicts each end of a line.
    """

    loss: float
    perplexity_per_token: float
    perplexity_per_word: float
    bits_per_byte: float
    accuracy: float
    tokens: int
    words: int
    lines: int
    bytes: int

    def numbers(self) -> dict[str, float]:
        """Returns the results by name; images only have the loss and accuracy of their labels."""
        if self.bytes:
            return dataclasses.asdict(self)
        return {"loss": self.loss, "accuracy": self.accuracy, "examples": self.lines}

    def __str__(self) -> str:
        if not self.bytes:
            return f"loss {self.loss:.3f}, accuracy {self.accuracy:.2%}"
        return (
            f"loss {self.loss:.3f}, perplexity {self.perplexity_per_token:,.1f} per token and "
            f"{self.perplexity_per_word:,.1f} per word, {self.bits_per_byte:.3f} bits per byte"
        )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def device_batches(
    rows: Rows, sharding: BatchSharding, chosen: range | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yields all rows once, or the chosen ones, in order; empty rows fill up the last batch."""
    for _, batch in in_order(rows, sharding.batch_sequences, sharding.host_rows(), chosen):
        yield sharding.to_global_arrays(batch)


def evaluate(
    model: Model,
    params: Params,
    rows: Rows,
    mesh: Mesh,
    *,
    batch_sequences: int,
    batches: int | None = None,
    criterion: Criterion = CROSS_ENTROPY,
    progress: Progress = no_progress,
) -> tuple[Evaluation, dict[str, Part]]:
    """Evaluates the entire split, or the first batches of each of its parts.

    Also returns the results of a mixture's parts, by name.  Sums are added on the host in double
    precision.  If batches are left out, each part is weighted by all its tokens, and words and
    bytes are scaled equally.  The criterion decides whether experts drop tokens beyond their
    evaluation capacity, as in validation during training, or none, as in decoding.
    """
    if not len(rows):
        raise UserError("There is no row to evaluate: no text is left, or fits a row.")
    spans = {"all": (range(len(rows)), rows.counts.tokens)}  # of each part that has rows
    if rows.parts:
        spans = {part.name: (part.rows, part.counts.tokens) for part in rows.parts if part.rows}
    first = None if batches is None else max(1, batches // len(spans)) * batch_sequences
    chosen = {name: (part_rows[:first], tokens) for name, (part_rows, tokens) in spans.items()}
    total = sum(math.ceil(len(part_rows) / batch_sequences) for part_rows, _ in chosen.values())
    done, loss, correct, parts = 0, 0.0, 0.0, dict[str, Part]()
    with jax.set_mesh(mesh):
        sharding = BatchSharding(model.layout, mesh, batch_sequences)
        for name, (part_rows, tokens) in chosen.items():
            batches_of_part = device_batches(rows, sharding, part_rows)
            dispatched = (evaluate_step(model, criterion, params, b) for b in batches_of_part)
            sums = []
            for output in dispatch_ahead(dispatched):
                sums.append(jax.device_get(output))
                progress(done := done + 1, total)
            counted, loss_of_part = max(_total(sums, "tokens"), 1), _total(sums, "loss")
            loss += tokens / counted * loss_of_part
            correct += tokens / counted * _total(sums, "correct")
            loads = jax.tree.map(lambda *x: np.sum(x, axis=0), *(batch.loads for batch in sums))
            experts = stats_by_layer(loads or {})
            parts[name] = {"loss": loss_of_part / counted, "tokens": tokens, "experts": experts}
    counts = rows.counts
    evaluation = Evaluation(
        loss=loss / counts.tokens,
        perplexity_per_token=_exp(loss / counts.tokens),
        perplexity_per_word=_exp(loss / (counts.words + counts.lines)),
        bits_per_byte=loss / math.log(2) / counts.bytes if counts.bytes else math.nan,
        accuracy=correct / counts.tokens,
        tokens=counts.tokens,
        words=counts.words,
        lines=counts.lines,
        bytes=counts.bytes,
    )
    return evaluation, parts if len(parts) > 1 else {}


def _total(sums: Sequence[LossSums], field: str) -> float:
    return math.fsum(float(getattr(batch, field)) for batch in sums)
