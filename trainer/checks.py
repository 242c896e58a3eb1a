"""What is checked before anything is compiled: layout against model, vocabulary against model."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from configs.errors import UserError
from data.vocab import Vocab
from layouts.layout import Layout
from layouts.lint import check
from layouts.record import Record, record
from trainer.run import Run


def record_loss(run: Run) -> Record:
    """Every weight, tensor and product of one microbatch's loss, allocating nothing."""

    def trace(layout: Layout) -> object:
        model = run.model.model(layout)
        params = model.init(jax.random.key(0))
        rows = run.batch_sequences // run.microbatches
        row_BL = jnp.zeros((rows, run.task.length), jnp.int32)
        names = ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
        model.loss(params, dict.fromkeys(names, row_BL), run.criterion, jax.random.key(0))
        return params

    return record(trace)


def check_layout(
    run: Run, layout: Layout, mesh_sizes: Mapping[str, int], where: Mapping[str, str]
) -> list[str]:
    """Raises every error of the layout with this model and batch; returns the warnings."""
    found = check(layout_name(where), layout, mesh_sizes, record_loss(run), sources(where))
    return [str(problem) for problem in found]


def layout_name(where: Mapping[str, str]) -> str:
    """The stem of the file that sets the rules, of all names and where they were set."""
    return Path(where.get("Layout.rules", "default").partition(":")[0]).stem


def sources(where: Mapping[str, str]) -> dict[str, str]:
    """Where layouts were set, and which settings decide the sizes of batch and length."""
    return {"batch": "Run.batch_sequences", "length": "Task.length", **where}


def check_vocab(run: Run, vocab: Vocab) -> None:
    """Refuses a vocabulary with more tokens than the model has rows, and rows too long for it."""
    if vocab.size > run.model.vocab:
        raise UserError(
            f"Transformer.vocab = {run.model.vocab}: the vocabulary of task {run.task.name} has "
            f"{vocab.size} tokens.  Set Transformer.vocab to at least that (a multiple of 128 "
            "splits well), or SentencePiece.size lower."
        )


def check_length(run: Run) -> None:
    """Refuses rows that are longer than the model can read."""
    most = run.model.most_places
    if most is not None and run.task.length > most:
        raise UserError(
            f"Task.length = {run.task.length}: the model has learned positions for {most} tokens.  "
            "Set Transformer.length to at least Task.length, or choose other positions."
        )


def step_flops(run: Run) -> float:
    """FLOPs of one update that the model asks for: the products of forward and backward pass.

    The backward pass costs twice the forward pass; what rematerialisation repeats is not counted.
    """
    return 3.0 * record_loss(run).flops * run.microbatches
