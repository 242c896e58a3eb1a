"""Loss over a split and its parts, and the perplexities of counted words and bytes."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from data.order import in_order
from data.packing.rows import Rows
from models.api import Model, Params
from models.loss import Criterion
from trainer.feed import Placement, host_rows, place, placement
from trainer.metrics.expert_load import Layer, stats_by_layer
from trainer.step import evaluate_step


class Part(NamedTuple):
    """What a model makes of one part of a mixture; `experts` is as in metrics.jsonl."""

    loss: float
    tokens: int
    experts: dict[str, Layer]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model makes of a text.  `words` counts one end of sentence a line as a word."""

    loss: float
    perplexity_per_token: float
    perplexity_per_word: float
    bits_per_byte: float
    accuracy: float
    tokens: int
    words: int
    bytes: int
    lines: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3f}, perplexity {self.perplexity_per_token:,.1f} per token and "
            f"{self.perplexity_per_word:,.1f} per word, {self.bits_per_byte:.3f} bits per byte"
        )

    @classmethod
    def from_sums(cls, loss: float, correct: float, tokens: int, rows: Rows) -> "Evaluation":
        """Perplexities from the summed negative log-likelihood of all tokens."""
        words = rows.counts.words + rows.counts.lines
        return cls(
            loss=loss / tokens,
            perplexity_per_token=_exp(loss / tokens),
            perplexity_per_word=_exp(loss / words),
            bits_per_byte=loss / math.log(2) / rows.counts.bytes,
            accuracy=correct / tokens,
            tokens=tokens,
            words=words,
            bytes=rows.counts.bytes,
            lines=rows.counts.lines,
        )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def device_batches(
    rows: Rows, where: Placement, batch_sequences: int, chosen: range | None = None
) -> Iterator[dict[str, jax.Array]]:
    """All rows once, or the chosen ones, in order; the last batch is filled up with empty rows."""
    held = host_rows(where, batch_sequences, 1)
    for _, batch in in_order(rows, batch_sequences, held, chosen):
        yield place(where, batch, batch_sequences, 1)


def evaluate(
    model: Model,
    params: Params,
    rows: Rows,
    mesh: Mesh,
    *,
    batch_sequences: int,
    batches: int | None = None,
    logit_scale: float = 1.0,
    drop_tokens: bool = True,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Evaluation, dict[str, Part]]:
    """Evaluates the whole split, or the first batches of each of its parts.

    The parts of a mixture are named; other rows have none.  Sums are added on the host in double
    precision.  Where batches are left out, each part counts by all its tokens, and words and bytes
    are scaled alike.  Experts have their evaluation capacity, as validation during training has it,
    or drop no tokens, as decoding.
    """
    criterion = Criterion(logit_scale=logit_scale, drop_tokens=drop_tokens)
    where = placement(model.layout, mesh, 1)
    spans = _spans(rows)
    each = None if batches is None else max(1, batches // len(spans))
    wanted = {
        name: chosen[: None if each is None else each * batch_sequences]
        for name, (chosen, _) in spans.items()
    }
    total = sum(math.ceil(len(chosen) / batch_sequences) for chosen in wanted.values())
    done, loss, correct, parts = 0, 0.0, 0.0, {}
    with jax.set_mesh(mesh):
        for name, chosen in wanted.items():
            own = []
            for batch in device_batches(rows, where, batch_sequences, chosen):
                own.append(jax.device_get(evaluate_step(model, criterion, params, batch)))
                report(done := done + 1, total)
            tokens = math.fsum(float(sums.tokens) for sums in own)
            all_tokens = spans[name][1]
            of_all = all_tokens / tokens
            part_loss = math.fsum(float(sums.loss) for sums in own)
            loss += of_all * part_loss
            correct += of_all * math.fsum(float(sums.correct) for sums in own)
            loads = jax.tree.map(lambda *x: np.sum(x, axis=0), *(sums.loads for sums in own))
            parts[name] = Part(part_loss / tokens, all_tokens, stats_by_layer(loads or {}))
    found = Evaluation.from_sums(loss, correct, rows.counts.tokens, rows)
    return found, parts if len(parts) > 1 else {}


def _spans(rows: Rows) -> dict[str, tuple[range, int]]:
    """The rows and the tokens of each part of a split that has any."""
    if not rows.parts:
        return {"all": (range(len(rows)), rows.counts.tokens)}
    return {part.name: (part.rows, part.counts.tokens) for part in rows.parts if part.rows}
