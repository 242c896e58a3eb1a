"""Computes the log-likelihood of each line of a text."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from data.packing.rows import Rows
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.requests import check_tag
from trainer.evaluate import Progress, device_batches, no_progress
from trainer.feed import BatchSharding, dispatch_ahead, whole_batch
from trainer.multihost import fetched
from trainer.step import token_losses


@dataclasses.dataclass(frozen=True)
class Score:
    """Holds the log-likelihood (natural) of a line with its end, which is a token but no word."""

    log_likelihood: float
    words: int
    tokens: int
    pieces: int
    """Number of parts that are scored independently; 0 for a pair that has no score."""


def row_losses(
    trained: TrainedModel, rows: Rows, batch_sequences: int, progress: Progress = no_progress
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the loss of each target of each row, and whether greedy decoding chooses it."""
    model, params = trained.model, trained.params
    needed = whole_batch(trained.run, model.layout, trained.mesh.shape, max(len(rows), 1))
    batch_sequences = min(batch_sequences, needed)  # a short text has few rows
    sharding = BatchSharding(model.layout, trained.mesh, batch_sequences)
    outputs = list[list[np.ndarray]]()
    with jax.set_mesh(trained.mesh):
        batches = device_batches(rows, sharding)
        for output in dispatch_ahead(token_losses(model, params, batch) for batch in batches):
            outputs.append(fetched(output))
            progress(min(len(outputs) * batch_sequences, len(rows)), len(rows))
    if not outputs:  # each pair is longer than a row
        return np.zeros((0, 0)), np.zeros((0, 0), bool)
    losses_BL, is_likeliest_BL = map(np.concatenate, zip(*outputs, strict=True))
    return losses_BL[: len(rows)].astype(np.float64), is_likeliest_BL[: len(rows)]


def score_lines(
    trained: TrainedModel,
    lines: Sequence[str],
    batch_sequences: int,
    progress: Progress = no_progress,
    tag: str | None = None,
) -> list[Score]:
    """Scores each line independently of how lines are packed into rows.

    A line longer than a row is scored in pieces, each without the previous ones.  For a pair, only
    the target is scored; a pair that is longer than a row scores NaN.
    """
    check_tag(tag, trained.run.task)
    if not lines:
        return []
    rows, counted = trained.run.task.pack_lines(lines, trained.vocabs, tag)
    assert rows.pieces is not None
    per_row, _ = row_losses(trained, rows, batch_sequences, progress)
    counted_BL = rows.counted_BL
    line_ids, row_ids, segments = rows.pieces.T
    totals, tokens = np.zeros(len(lines)), np.zeros(len(lines), int)
    pieces = np.bincount(line_ids, minlength=len(lines))
    for line, row, segment in zip(line_ids, row_ids, segments, strict=True):
        inside = rows.segments_BL[row] == segment
        totals[line] -= per_row[row, inside].sum()
        tokens[line] += (inside & counted_BL[row]).sum()
    totals[tokens == 0] = math.nan
    words = [len(line.split()) for line in counted]
    columns = (totals.tolist(), words, tokens.tolist(), pieces.tolist())
    return [Score(*line) for line in zip(*columns, strict=True)]
