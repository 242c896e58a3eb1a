"""Traces the jitted functions of a run on a mesh; allocates and compiles nothing."""

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from layouts.layout import Layout
from layouts.mesh import use_mesh
from models.decoding.generate import Search, generate
from models.loss import CROSS_ENTROPY, Criterion
from models.precision import StoredWeights, quantize_weights
from trainer import step
from trainer.decoding.decoder import abstract_inputs, padded
from trainer.feed import BatchSharding
from trainer.run import Run

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


class DecodeShape(NamedTuple):
    """Describes the shape of a batch to decode."""

    search: Search
    rows: int
    source_tokens: int
    """Tokens of each source; 0 without sources."""
    prompt_tokens: int
    """Tokens of each prompt."""
    new_tokens: int
    """Decoding steps, if no text ends sooner.  The cache is padded like that of `decode`."""
    suffix_tokens: int = 0
    """Tokens of the suffix that ranks samples; 0 without one."""
    weights: StoredWeights = "stored"


def trace_train_step(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh
) -> tuple[Any, step.State, AbstractBatch]:
    """Traces the training step; returns the trace and its abstract arguments."""
    step_spec = step.train_step_spec(run, layout)
    state = step.abstract_state(step_spec, mesh)
    batch = BatchSharding.of(run, layout, mesh).abstract(run.task.array_shapes)
    with use_mesh(mesh):
        return step.train_step.trace(step_spec, state, batch), state, batch


def trace_evaluate_step(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, criterion: Criterion = CROSS_ENTROPY
) -> Any:
    """Traces the evaluation of one batch."""
    return trace_batch(run, layout, mesh, step.evaluate_step, criterion)


def trace_score_step(run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> Any:
    """Traces the scoring of one batch."""
    return trace_batch(run, layout, mesh, step.token_losses)


def trace_generate(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, shape: DecodeShape
) -> tuple[Any, tuple[Any, ...]]:
    """Traces the decoding of one batch; returns the trace and the arguments of `generate`."""
    model = run.merged.model.model(layout)
    tokens = (shape.source_tokens, shape.prompt_tokens, shape.suffix_tokens)
    inputs = abstract_inputs(layout, mesh, shape.rows, *tokens)
    search, new_tokens = shape.search, padded(shape.new_tokens)
    params = step.abstract_params(model, mesh)
    if shape.weights == "int8":
        params = step.abstract(functools.partial(quantize_weights, model), mesh, params)
    arguments = (model, search, new_tokens, params, inputs)
    with use_mesh(mesh):
        return generate.trace(*arguments), arguments


def trace_batch(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, function: Any, *settings: object
) -> Any:
    """Traces a jitted function of a model, settings, weights and a batch."""
    model, sharding = run.model.model(layout), BatchSharding(layout, mesh, run.batch_sequences)
    params, batch = step.abstract_params(model, mesh), sharding.abstract(run.task.array_shapes)
    with use_mesh(mesh):
        return function.trace(model, *settings, params, batch)
