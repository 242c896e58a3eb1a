"""Opens the checkpoints of a run, and sizes the batches of a trained model."""

import dataclasses

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import batch_shards, make_mesh
from scripts.commands.common import rounded, rows_of_group, set_where, settings
from scripts.commands.flags.shared import CheckpointFlags
from scripts.terminal import tell
from trainer.checkpoints.restore import Trained, TrainedModels
from trainer.checks import check_layout
from trainer.run import Run


def trained_models(flags: CheckpointFlags) -> TrainedModels:
    """Opens the checkpoints of a run, and checks that the layout given now fits its model."""
    config = settings(flags.model_dir, flags.gin_file, flags.gin_param)
    run, layout = config.make(Run), config.make(Layout)
    mesh_sizes = dict(make_mesh(layout).shape)
    rows = rounded(run.batch_sequences, batch_shards(layout, mesh_sizes) * rows_of_group(run))
    fitting = dataclasses.replace(run, batch_sequences=rows, microbatches=1)
    for warning in check_layout(fitting, layout, mesh_sizes, set_where(config)):
        tell(warning)
    return TrainedModels(flags.model_dir, run, layout)


def only(steps: list[int | None]) -> int | None:
    """Returns the one checkpoint of a command that takes one."""
    if len(steps) != 1:
        raise UserError("--checkpoint=all: this command takes one checkpoint: latest, best, STEP.")
    return steps[0]


def batch_of(trained: Trained, batch_sequences: int | None) -> int:
    """Returns the batch size, the run's by default, rounded up to the shards of the batch."""
    shards = batch_shards(trained.model.layout, trained.mesh.shape) * rows_of_group(trained.run)
    return rounded(batch_sequences or trained.run.batch_sequences, shards)
