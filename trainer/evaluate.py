"""Loss over a whole split, and the perplexities that follow from counted words and bytes."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from data.order import in_order
from data.rows import Rows
from models.api import Model, Params
from models.loss import Criterion
from trainer.feed import Placement, host_rows, place, placement
from trainer.step import evaluate_step


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
    rows: Rows, where: Placement, batch_sequences: int
) -> Iterator[dict[str, jax.Array]]:
    """All rows once, in order; the last batch is filled up with empty rows."""
    held = host_rows(where, batch_sequences, 1)
    for _, batch in in_order(rows, batch_sequences, held):
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
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluates the whole split, or its first batches.

    Sums are added on the host in double precision; words and bytes count only where the whole
    split is evaluated, so a shortened evaluation scales them by the share of tokens seen.
    """
    criterion = Criterion(logit_scale=logit_scale)
    where = placement(model.layout, mesh, 1)
    total = math.ceil(len(rows) / batch_sequences)
    total = total if batches is None else min(total, batches)
    loss = correct = tokens = 0.0
    with jax.set_mesh(mesh):
        for done, batch in zip(
            range(total), device_batches(rows, where, batch_sequences), strict=False
        ):
            sums = jax.device_get(evaluate_step(model, criterion, params, batch))
            loss += float(sums.loss)
            correct += float(sums.correct)
            tokens += float(sums.tokens)
            report(done + 1, total)
    share = tokens / rows.counts.tokens
    return Evaluation.from_sums(loss / share, correct / share, rows.counts.tokens, rows)
