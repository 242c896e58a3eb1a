"""Trains a model, or continues a run."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import Mesh

from configs.load import Config
from data.cache import prepare
from layouts.cost.hardware import peak_flops
from layouts.layout import Layout
from layouts.mesh import batch_shards, make_mesh
from models.decoding.sampling import Sampling
from scripts.commands.common import rows_of_group, setting_origins, settings, warn_unused
from scripts.commands.trained import decode_program
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.progress import ProgressBar
from scripts.terminal import tell
from trainer.checks import (
    Program,
    check_layout,
    check_run,
    check_vocabs,
    explained_errors,
    step_flops,
)
from trainer.loop import TrainJob
from trainer.loop import train as train_loop
from trainer.metrics.router_warnings import RouterWarnings
from trainer.metrics.writers import LossPlot, MetricsWriter
from trainer.model_dir import ModelDir
from trainer.observers import on_first_process
from trainer.planning.prediction import CostPrediction
from trainer.processes.join import leave
from trainer.processes.watchdog import Watchdog
from trainer.run import Run
from trainer.traces import trace_evaluate_step, trace_train_step
from trainer.translation.bleu import bleu_observers


def train(flags: TrainFlags) -> None:
    """Trains the run of these settings, under the observers that a person wants."""
    model_dir, gin_file = flags.model_dir, flags.settings.gin_file
    saved = None if gin_file else model_dir  # a run goes on without being told its files again
    config = settings(saved, gin_file, flags.settings.gin_param)
    run, layout = config.make(Run), config.make(Layout)
    warn_unused(config, Run, Layout)
    mesh = make_mesh(layout)
    check_run(run)
    for warning in check_layout(run, layout, dict(mesh.shape), setting_origins(config)):
        tell(warning)
    programs = training_programs(run, layout, dict(mesh.shape))
    with explained_errors(run, layout, dict(mesh.shape), setting_origins(config), *programs):
        # JAX keeps the traces for the calls that follow.
        for program in programs:
            program(run, layout, mesh)
        train_run(flags, config, run, layout, mesh)


def train_run(flags: TrainFlags, config: Config, run: Run, layout: Layout, mesh: Mesh) -> None:
    """Prepares the data and trains."""
    model_dir = flags.model_dir
    prepared = prepare(run.task, flags.data_dir)
    check_vocabs(run, prepared.vocabs)
    ModelDir(model_dir).save(config, run, prepared.vocabs)
    metrics = MetricsWriter(model_dir, step_flops(run), peak_flops(mesh.devices.flat))
    observers = [
        ProgressBar(),
        CostPrediction(model_dir),
        *bleu_observers(run, layout, mesh, prepared.vocabs),
        *on_first_process(metrics, LossPlot(model_dir)),
        RouterWarnings(),
        Watchdog(),
    ]
    outcome = train_loop(TrainJob(run, layout, mesh, prepared.splits, model_dir), observers)
    how = "Stopped" if outcome.stopped else "Finished"
    tell(f"{how} after step {outcome.steps} of {run.steps}; waited for data "
         f"{outcome.data_stall_fraction:.1%} of the time.")  # fmt: skip
    if outcome.stopped:
        tell(f"Continue with: meshloom train --model_dir={model_dir}")
    if outcome.by_ctrl_c:
        leave()  # where it came to one process alone, the others end well
        raise KeyboardInterrupt


def training_programs(run: Run, layout: Layout, mesh_sizes: Mapping[str, int]) -> list[Program]:
    """Returns what a run traces: the step, its evaluation, and translations for BLEU."""
    programs: list[Program] = [trace_train_step, trace_evaluate_step]
    if run.bleu_sentences:
        rows = batch_shards(layout, mesh_sizes) * rows_of_group(run)
        one_batch = dataclasses.replace(run, batch_sequences=rows, microbatches=1)
        programs.append(decode_program(one_batch, Sampling(temperature=0)))
    return programs
