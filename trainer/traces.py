"""Traces the programs of a run on a mesh; allocates and compiles nothing."""

from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from layouts.layout import Layout
from layouts.mesh import use_mesh
from models.loss import CROSS_ENTROPY, Criterion
from trainer.decoding.score import token_losses
from trainer.feed import abstract_batch, placement
from trainer.run import Run
from trainer.step import (
    State,
    abstract_params,
    abstract_state,
    evaluate_step,
    train_step,
    train_step_spec,
)

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


class TrainStepTrace(NamedTuple):
    """Holds the traced training step and its abstract arguments."""

    traced: Any  # as jax.stages has it; its type is not public
    state: State
    batch: AbstractBatch


def trace_train_step(run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> TrainStepTrace:
    """Traces the training step."""
    program = train_step_spec(run, layout)
    state = abstract_state(program, mesh)
    batch = batch_of_run(run, layout, mesh, run.microbatches)
    with use_mesh(mesh):
        return TrainStepTrace(train_step.trace(program, state, batch), state, batch)


def trace_evaluate_step(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, criterion: Criterion = CROSS_ENTROPY
) -> Any:
    """Traces the evaluation of one batch."""
    model = run.model.model(layout)
    params, batch = abstract_params(model, mesh), batch_of_run(run, layout, mesh, 1)
    with use_mesh(mesh):
        return evaluate_step.trace(model, criterion, params, batch)


def trace_score_step(run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> Any:
    """Traces the scoring of one batch."""
    model = run.model.model(layout)
    params, batch = abstract_params(model, mesh), batch_of_run(run, layout, mesh, 1)
    with use_mesh(mesh):
        return token_losses.trace(model, params, batch)


def batch_of_run(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, microbatches: int
) -> AbstractBatch:
    """Returns shapes, types and placements of a batch of the run."""
    shardings = placement(layout, mesh, microbatches)
    return abstract_batch(run.task.array_shapes, shardings, run.batch_sequences, microbatches)
