"""Opens the checkpoints of a run, and computes batch sizes for a trained model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.decoding.generate import Search
from scripts.commands import common
from scripts.commands.shared_flags import CheckpointFlags
from scripts.terminal import print_note
from trainer import checks
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import ModelRestorer, TrainedModel, chosen_steps
from trainer.checks import TraceFn, describe_layout
from trainer.decoding.decoder import SHORTEST
from trainer.feed import whole_batch
from trainer.memory import check_batch_memory
from trainer.run import Run
from trainer.traces import DecodeShape, trace_generate


@contextlib.contextmanager
def trained_models(
    flags: CheckpointFlags,
    trace_fns: Callable[[Run], Sequence[TraceFn]] = lambda run: (),
    *,
    drop_tokens: bool = False,
) -> Iterator[ModelRestorer]:
    """Opens the checkpoints of a run, and checks that the given layout fits its model.

    `trace_fns` returns functions to trace; a JAX error in one that the layout causes becomes one
    message.  If no tokens are dropped, a setting of Moe.dispatch is refused.
    """
    if not drop_tokens:
        common.refuse_dispatch(flags.gin_param)
    config = common.settings(flags.model_dir, flags.gin_file, flags.gin_param)
    common.check_same_settings(config)
    run, layout = config.make(Run), config.make(Layout)
    common.warn_unused(config, Run, Layout)
    checks.check_model_lengths(run)
    mesh, origins = make_mesh(layout), config.origins
    sizes = dict(mesh.shape)
    rows = whole_batch(run, layout, sizes, run.batch_sequences)
    fitting = dataclasses.replace(run, batch_sequences=rows, microbatches=1)
    print_note(*checks.check_layout(fitting, layout, sizes, origins), *checks.check_precision(run))
    note_layout(layout, mesh, origins)
    with (
        checks.explained_errors(fitting, layout, sizes, origins, *trace_fns(fitting)),
        ModelRestorer(flags.model_dir, run, layout, flags.weights) as models,
    ):
        yield models


def note_layout(layout: Layout, mesh: Mesh, origins: Mapping[str, str]) -> None:
    """Prints the layout of several devices before compilation, and warns of idle devices.

    XLA can abort the process while it partitions a program; this line then names the layout.
    """
    if idle := jax.device_count() - mesh.size:
        print_note(
            f"Warning: Layout.mesh = {layout.mesh!r} leaves {idle} of {jax.device_count()} devices "
            "idle.  A size of -1 uses all."
        )
    if mesh.size > 1:
        print_note(f"Compiles for {describe_layout(layout, origins)}.")


def decode_trace_fn(run: Run, search: Search, *, with_suffix: bool = False) -> TraceFn:
    """Returns a function that traces decoding of one batch, with the smallest size of each part."""
    source, suffix = SHORTEST * run.task.has_source, SHORTEST * with_suffix
    shape = DecodeShape(search, run.batch_sequences, source, SHORTEST, SHORTEST, suffix)
    return functools.partial(trace_generate, shape=shape)


def single_checkpoint(checkpoints: Checkpoints, which: str) -> int | None:
    """Returns the step for --checkpoint of a command that accepts only one; None is the latest."""
    steps = chosen_steps(checkpoints, which)
    if len(steps) != 1:
        raise UserError("--checkpoint=all: this command needs one checkpoint: latest, best, STEP.")
    return steps[0]


def batch_of(trained: TrainedModel, batch_sequences: int | None) -> int:
    """Returns the batch size, the run's by default, rounded up to a multiple of batch shards."""
    run, layout, mesh = trained.run, trained.model.layout, trained.mesh
    rows = whole_batch(run, layout, mesh.shape, batch_sequences or run.batch_sequences)
    check_batch_memory(run, layout, mesh, rows)
    return rows
