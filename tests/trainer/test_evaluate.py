"""Evaluation: the sums of numpy, whatever the batch size and the layout."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from configs.errors import UserError
from data.packing.rows import Counts, PairRows, Rows, RowsOfPart
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.loss import Criterion
from tests.trainer.bigram import Bigram, log_probabilities, text_rows, weights
from trainer.evaluate import Evaluation, evaluate

ROWS = text_rows(11)
# A float32 sum of some hundred terms.
ROUND_OFF = 2e-6
WHOLE = Layout(mesh="data:1")
SPLIT = Layout(mesh="data:4,model:2", rules="batch:data;vocab:model")


def some_rows(rows: slice | range) -> dict[str, np.ndarray]:
    return {"targets": ROWS.targets_BL[rows], "segments": ROWS.segments_BL[rows]}


def evaluated(layout: Layout, batch_sequences: int, rows: Rows = ROWS, **options: Any) -> Any:
    model, mesh = Bigram(layout), make_mesh(layout)
    place = jax.NamedSharding(mesh, layout.place("VD", stored=True))
    params = {name: jax.device_put(array, place) for name, array in weights().items()}
    return evaluate(model, params, rows, mesh, batch_sequences=batch_sequences, **options)[0]


def by_numpy(rows: Rows, scale: float = 1.0) -> tuple[float, int]:
    """The loss summed over all targets, and how many of them are the likeliest token."""
    batch = rows.batch(np.arange(len(rows)))
    log_BLV = log_probabilities(weights(), batch, scale)
    gold_BL1 = np.take_along_axis(log_BLV, batch["targets_BL"][..., None], -1)
    counted_BL = batch["segments_BL"] > 0
    best_BL = log_BLV.argmax(-1) == batch["targets_BL"]
    return -gold_BL1[..., 0][counted_BL].sum(), int(best_BL[counted_BL].sum())


@pytest.mark.parametrize(
    ("layout", "batch_sequences"),
    [(WHOLE, 4), (WHOLE, 11), (WHOLE, 16), (SPLIT, 4), (SPLIT, 8)],
    ids=str,
)
def test_every_token_counts_once_whatever_the_batch_and_the_layout(
    layout: Layout, batch_sequences: int
) -> None:
    """Eleven rows: the last batch is cut short, but for one case."""
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    computed = evaluated(layout, batch_sequences, progress=progress)
    loss, correct = by_numpy(ROWS)
    counts = ROWS.counts
    assert (computed.tokens, computed.bytes, computed.lines) == (
        counts.tokens,
        counts.bytes,
        counts.lines,
    )
    assert (computed.words, computed.lines) == (counts.words, counts.lines)
    assert round(computed.accuracy * computed.tokens) == correct and correct > 0
    np.testing.assert_allclose(computed.loss, loss / counts.tokens, rtol=ROUND_OFF)
    np.testing.assert_allclose(math.log(computed.perplexity_per_token), loss / counts.tokens,
                               rtol=ROUND_OFF)  # fmt: skip
    np.testing.assert_allclose(math.log(computed.perplexity_per_word),
                               loss / (counts.words + counts.lines), rtol=ROUND_OFF)  # fmt: skip
    np.testing.assert_allclose(computed.bits_per_byte, loss / math.log(2) / counts.bytes,
                               rtol=ROUND_OFF)  # fmt: skip
    batches = -(-11 // batch_sequences)
    assert calls == [(done, batches) for done in range(1, batches + 1)]


def test_a_logit_multiplier_scales_the_logits() -> None:
    computed = evaluated(WHOLE, 4, criterion=Criterion(logit_scale=0.9))
    loss, _ = by_numpy(ROWS, 0.9)
    np.testing.assert_allclose(computed.loss * computed.tokens, loss, rtol=ROUND_OFF)
    assert abs(computed.loss / evaluated(WHOLE, 4).loss - 1) > 1e-3


def test_a_shortened_evaluation_is_the_mean_of_what_it_saw() -> None:
    computed = evaluated(WHOLE, 4, batches=2)
    first = Rows(some_rows(slice(8)), text_rows(8).counts)
    loss, _ = by_numpy(first)
    tokens = (first.segments_BL > 0).sum()
    np.testing.assert_allclose(computed.loss, loss / tokens, rtol=ROUND_OFF)
    ratio = ROWS.counts.tokens / (computed.words + computed.lines)
    np.testing.assert_allclose(
        math.log(computed.perplexity_per_word), computed.loss * ratio, rtol=1e-12
    )


def test_parts_are_evaluated_apart_and_count_by_their_tokens() -> None:
    """Of unequal parts, also where only the first batches of each are read."""
    parts = {"first": range(0, 7), "none": range(7, 7), "second": range(7, 11)}
    rows = in_parts(parts)
    whole, computed = of_parts(rows, batches=None)
    for value, other in zip(*map(dataclasses.astuple, (whole, evaluated(WHOLE, 4))), strict=True):
        assert value == pytest.approx(other, rel=ROUND_OFF)
    assert list(computed) == ["first", "second"]
    for name, part in computed.items():
        part_rows = Rows(some_rows(parts[name]), ROWS.counts)
        assert part["tokens"] == (part_rows.segments_BL > 0).sum()
        loss = part["loss"] * part["tokens"]
        np.testing.assert_allclose(loss, by_numpy(part_rows)[0], rtol=ROUND_OFF)
    some, cut = of_parts(rows, batches=2)
    assert cut["second"] == computed["second"] and cut["first"]["loss"] != computed["first"]["loss"]
    expected = sum(part["loss"] * part["tokens"] for part in cut.values())
    np.testing.assert_allclose(some.loss * some.tokens, expected, rtol=1e-12)


def in_parts(parts: dict[str, range]) -> PairRows:
    """The same rows as those of a mixture."""

    def counts(rows: range) -> Counts:
        return Counts(tokens=int((ROWS.segments_BL[rows] > 0).sum()), rows=len(rows))

    arrays = {**ROWS.arrays, "sources": ROWS.targets_BL, "source_segments": ROWS.segments_BL}
    named = [RowsOfPart(name, rows, counts(rows), {}) for name, rows in parts.items()]
    return PairRows(arrays, ROWS.counts, parts=named)


def of_parts(rows: PairRows, batches: int | None) -> tuple[Evaluation, dict[str, Any]]:
    params = {name: jax.numpy.asarray(array) for name, array in weights().items()}
    mesh = make_mesh(WHOLE)
    options = {"batch_sequences": 4, "batches": batches}
    return evaluate(Bigram(WHOLE), params, rows, mesh, **options)


def test_no_row_is_refused() -> None:
    empty = dataclasses.replace(ROWS, arrays={name: x[:0] for name, x in ROWS.arrays.items()})
    with pytest.raises(UserError, match="no row to evaluate"):
        evaluate(Bigram(WHOLE), weights(), empty, make_mesh(WHOLE), batch_sequences=4)


def test_a_hopeless_model_has_an_infinite_perplexity_and_no_error() -> None:
    params = {name: jax.numpy.asarray(1e5 * array) for name, array in weights().items()}
    computed, _ = evaluate(Bigram(WHOLE), params, ROWS, make_mesh(WHOLE), batch_sequences=4)
    assert computed.perplexity_per_word == math.inf and math.isfinite(computed.bits_per_byte)
