"""The command that trains."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from data.cache import prepare
from data.vocabs import Vocabs
from layouts.cost.hardware import peak_flops
from layouts.layout import Layout
from layouts.mesh import batch_shards, make_mesh
from models.api import Params
from models.decoding.sampling import Sampling
from scripts.commands.common import Strings, rounded, set_where, settings, warn_unused
from scripts.terminal import Terminal, tell
from trainer.checks import check_layout, check_run, check_vocabs, step_flops
from trainer.decoding.decoder import Decoder
from trainer.decoding.requests import Options
from trainer.loop import Clock
from trainer.loop import train as train_loop
from trainer.model_dir import Workspace
from trainer.planning.prediction import held_against
from trainer.run import Run
from trainer.translation.evaluate import held_out, subset, translate
from trainer.translation.metrics import Quality

BLEU_BATCH = 64  # sentences at a time, in the evaluations during training


def train(model_dir: Path, data_dir: Path, gin_file: Strings, gin_param: Strings) -> None:
    saved = None if gin_file else model_dir  # a run goes on without being told its files again
    config = settings(saved, gin_file, gin_param)
    run, layout = config.make(Run), config.make(Layout)
    warn_unused(config, Run, Layout)
    mesh = make_mesh(layout)
    check_run(run)
    for warning in check_layout(run, layout, dict(mesh.shape), set_where(config)):
        tell(warning)
    prepared = prepare(run.task, data_dir, report=tell)
    check_vocabs(run, prepared.vocabs)
    Workspace(model_dir).save(config, run, prepared.vocabs)
    clock = Clock(step_flops(run), peak_flops(mesh.devices.flat))
    translated = translator(run, layout, mesh, prepared.vocabs)
    with Terminal() as terminal:
        outcome = train_loop(
            run, layout, mesh, prepared.splits, model_dir, terminal, clock, translated
        )
    if outcome.step_s is not None:
        tell(held_against(outcome.step_s, outcome.foreseen_s))
    how = "Stopped" if outcome.stopped else "Finished"
    tell(f"{how} after step {outcome.steps} of {run.steps}; waited for data {outcome.data_wait:.1%}"
         " of the time.")  # fmt: skip
    if outcome.stopped:
        tell(f"Continue with: meshloom train --model_dir={model_dir}")


def translator(
    run: Run, layout: Layout, mesh: Mesh, vocabs: Vocabs
) -> Callable[[Params], Quality] | None:
    """Measures, during training, some translations of the validation split."""
    task = run.task
    if not run.bleu_sentences or not task.has_source:
        return None
    parts = subset(held_out(task, "validation"), run.bleu_sentences)
    model, places = run.model.model(layout), run.model.max_length
    rows = rounded(BLEU_BATCH, batch_shards(layout, mesh.shape))

    def translated(params: Params) -> Quality:
        decoder = Decoder(model, params, mesh, Sampling(temperature=0), rows)
        found = translate(
            decoder, parts, task, vocabs, Options(), places, say=tell, resamples=0, ter=False
        )
        return found[0].quality

    return translated
