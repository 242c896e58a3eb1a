"""Trains a model, or continues a run."""

import dataclasses
import sys
from collections.abc import Sequence

from configs.errors import RunError
from configs.write import values
from data.vocabs import Vocabs
from layouts.cost.hardware import peak_flops
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.decoding.sampling import Sampling
from scripts.commands.common import check_same_settings, warn_unused
from scripts.commands.trained import decode_trace_fn, note_layout
from scripts.commands.training import start
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.progress import ProgressBar
from scripts.terminal import print_note
from trainer import checks
from trainer.checkpoints.manager import Checkpoints
from trainer.feed import whole_batch
from trainer.interrupts import Diverged
from trainer.loop import TrainJob
from trainer.loop import train as train_loop
from trainer.memory import check_memory
from trainer.metrics import writers
from trainer.metrics.goodput import describe, spent_seconds
from trainer.metrics.profile import Profile, parse_profile_steps
from trainer.observers import Observer
from trainer.planning.report import CostPrediction
from trainer.processes.join import leave
from trainer.processes.peers import is_first_process
from trainer.processes.training_lock import training_lock
from trainer.processes.watchdog import Watchdog
from trainer.resume.history import time_now
from trainer.run import Run
from trainer.step import UNKNOWN_STEPS
from trainer.traces import trace_evaluate_step, trace_train_step
from trainer.translation.evaluate import TranslationEval


def train(flags: TrainFlags) -> None:
    """Trains the run of these settings, and locks its directory before the first look at it."""
    with training_lock(flags.model_dir):
        train_locked(flags)


def train_locked(flags: TrainFlags) -> None:
    """Reads and checks the run, prepares its data, and trains it."""
    begin = time_now()
    with Checkpoints(flags.model_dir) as checkpoints:
        step = checkpoints.latest
    config = start.settings_to_train(flags, step)
    check_same_settings(config)
    run, layout = config.make(Run), config.make(Layout)
    warn_unused(config, Run, Layout)
    changes = start.changes_since(flags, run, step)
    mesh, origins = make_mesh(layout), config.origins
    sizes = dict(mesh.shape)
    stages = run.by_stage
    for each in dict.fromkeys((run, *stages)):
        checks.check_run(each)
    checks.check_vocab_settings(run)
    for tracker in run.trackers:
        tracker.check()
    profile = profile_observers(flags, run, step or 0)
    warnings = list[str]()  # those of the largest batch are printed
    for each in stages:
        warnings = checks.check_layout(each, layout, sizes, origins | stage_origins(run, each))
    print_note(*warnings, *checks.check_bubble(run, layout, sizes), *checks.check_precision(run))
    if step is None:
        start.note_no_export(run)
    for part, choice in checks.attention_choices(stages[-1], layout, mesh).items():
        print_note(f"Attention of the {part}: {choice}")
    note_layout(layout, mesh, origins)
    trace_fns: list[checks.TraceFn] = [trace_train_step, trace_evaluate_step]
    if run.bleu_sentences:
        rows = whole_batch(run, layout, sizes, 1)
        one_batch = dataclasses.replace(run, batch_sequences=rows, microbatches=1)
        trace_fns.append(decode_trace_fn(one_batch, Sampling(temperature=0)))
    with checks.explained_errors(run, layout, sizes, origins, *trace_fns):
        check_memory(stages[-1], layout, mesh)
        # JAX caches the traces for the calls below.
        for each in stages:
            with checks.explained_errors(each, layout, sizes, origins, trace_train_step):
                trace_train_step(each, layout, mesh)
        for trace_fn in trace_fns[1:]:
            trace_fn(run, layout, mesh)
        prepared = start.prepared_data(flags, run, is_continued=step is not None)
        start.save_start(flags, config, run, layout, prepared, step, changes, begin)
        notes = start.ChangeNotes(flags.model_dir, run)
        splits = prepared.splits
        run = run.with_steps(len(splits["train"]))
        job = TrainJob(run, layout, mesh, splits, flags.model_dir, flags.local_checkpoint_dir)
        train_run(flags, job, prepared.vocabs, [notes, *profile])


def stage_origins(run: Run, stage: Run) -> dict[str, str]:
    """Returns the settings that determine the batch and the row length of a stage."""
    if stage.task.length != run.task.length:
        return dict.fromkeys(("batch", "length"), "Run.length_stages")
    changes_batch = stage.batch_sequences != run.batch_sequences
    return {"batch": "Run.batch_stages"} if changes_batch else {}


def profile_observers(flags: TrainFlags, run: Run, first_step: int) -> list[Profile]:
    """Returns an observer for --profile_steps, unless a resumed run is past these steps."""
    if flags.profile_steps is None:
        return []
    steps = parse_profile_steps(flags.profile_steps, run.steps or UNKNOWN_STEPS)
    if steps[0] <= first_step:
        print_note(f"warning: no profile: the run resumes after step {first_step}.")
        return []
    return [Profile(flags.model_dir, steps)]


def train_run(flags: TrainFlags, job: TrainJob, vocabs: Vocabs, more: Sequence[Observer]) -> None:
    """Trains, and prints how the run ended and how to continue it.

    If a signal stopped the run, the exit code names the signal.
    """
    run, layout, mesh, model_dir = job.run, job.layout, job.mesh, job.model_dir
    flops = {step: checks.step_flops(run.stage(step)) for step in run.stage_begins}
    peak = peak_flops(mesh.devices.flat)
    metrics = writers.MetricsWriter(model_dir, flops, peak, values([run, layout]))
    observers = [
        ProgressBar(),
        CostPrediction(model_dir),
        *([TranslationEval(run, layout, mesh, vocabs)] if run.bleu_sentences else []),
        *([metrics, writers.LossPlot(model_dir)] if is_first_process() else []),
        writers.RouterWarnings(),
        *more,
        Watchdog(),
    ]
    try:
        outcome = train_loop(job, observers)
    except Diverged as error:
        raise RunError(f"{error}\n{start.remedy(flags, run, layout, error.step)}") from error
    how = "Finished" if outcome.stop_signal is None else "Stopped"
    print_note(
        f"{how} after step {outcome.steps} of {run.steps}.  Data stalls: "
        f"{outcome.data_stall_fraction:.1%} of the time.",
        in_each_process=True,
    )
    if is_first_process() and (seconds := spent_seconds(model_dir)):
        print_note(describe(seconds))
    if outcome.stop_signal is not None:
        print_note(f"Resume with: {start.continue_command(flags, layout)}")
        leave()
        sys.exit(128 + outcome.stop_signal)  # as a shell reports it
