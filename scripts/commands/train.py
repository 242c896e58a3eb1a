"""Trains a model, or continues a run."""

from data.cache import prepare
from layouts.cost.hardware import peak_flops
from layouts.layout import Layout
from layouts.mesh import make_mesh
from scripts.commands.common import set_where, settings, warn_unused
from scripts.commands.flags.train import TrainFlags
from scripts.commands.progress import ProgressBar
from scripts.terminal import tell
from trainer.checks import check_layout, check_run, check_vocabs, step_flops
from trainer.loop import TrainJob
from trainer.loop import train as train_loop
from trainer.metrics.router_warnings import RouterWarnings
from trainer.metrics.writers import LossPlot, MetricsWriter
from trainer.model_dir import ModelDir
from trainer.observers import on_first_process
from trainer.planning.prediction import CostPrediction
from trainer.run import Run
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
    for warning in check_layout(run, layout, dict(mesh.shape), set_where(config)):
        tell(warning)
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
    ]
    outcome = train_loop(TrainJob(run, layout, mesh, prepared.splits, model_dir), observers)
    how = "Stopped" if outcome.stopped else "Finished"
    tell(f"{how} after step {outcome.steps} of {run.steps}; waited for data "
         f"{outcome.data_stalls:.1%} of the time.")  # fmt: skip
    if outcome.stopped:
        tell(f"Continue with: meshloom train --model_dir={model_dir}")
