"""Trains: the loop, top to bottom in the order in which things happen."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from data import order
from data.packing.rows import Rows
from layouts.hlo.compilation import compile_program
from layouts.layout import Layout
from models.api import Batch
from models.distillation import without_teacher
from trainer.checkpoints.interval import SaveInterval
from trainer.checkpoints.local import LocalCheckpoints
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import StatePadding
from trainer.checkpoints.warm_start import warm_started
from trainer.evaluate import evaluate
from trainer.feed import BatchSharding
from trainer.interrupts import Interrupts, StopRequested, check_finite
from trainer.metrics.step_timer import StepTimer
from trainer.multihost import connect, gather
from trainer.observers import CompiledStep, Line, Observer, Observers, Outcome, StepResult
from trainer.replay import Replay, rotated
from trainer.run import Run
from trainer.step import Metrics, State, abstract_like, init_state, train_step, train_step_spec

logger = logging.getLogger(__name__)

Dispatched = tuple[int, np.ndarray, Metrics]  # a step and its rows; devices may still work on it


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """Describes a run: its settings, devices, data and directory."""

    run: Run
    layout: Layout
    mesh: Mesh
    splits: Mapping[str, Rows]
    model_dir: Path
    local_dir: Path | None = None
    """Directory of local checkpoints on each host."""


def train(job: TrainJob, observers: Sequence[Observer] = ()) -> Outcome:
    """Trains to the last step, from the newest checkpoint of the model directory or from the start.

    Without observers it trains, validates and saves, and reports only to its loggers.
    """
    run, watch, last_step = job.run, Observers(observers), job.run.total_steps
    connect(job.mesh)
    timer = StepTimer()
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(job.mesh))
        kept = (run.keep_last, run.keep_best, run.best_by == "bleu")
        checkpoints = stack.enter_context(Checkpoints(job.model_dir, *kept))
        stack.callback(watch.close)
        interrupts = stack.enter_context(Interrupts())

        padding = StatePadding(train_step_spec(run, job.layout), job.mesh)
        local = None
        if job.local_dir is not None:
            saved = padding.step_spec.saved(padding.unpadded)
            local = LocalCheckpoints(job.local_dir, job.model_dir, saved, job.mesh)
            stack.enter_context(local)
        with timer.spending("restore"):
            state, step = restore_or_init(padding, checkpoints, run, local)
        watch.notify(Observer.on_start, run, step)
        stopped = False
        previous: Dispatched | None = None
        if step < last_step:
            compiled, replay, batches = begin_stage(job, step, state, watch, timer)
        # A signal may have ended the evaluation of the checkpoint that the run resumes.
        is_due = bool(step) and run.at_interval(step, run.evaluate_every)
        if is_due and any(gather(checkpoints.best_of([step]) is None)):
            with timer.spending("evaluation"):
                _, stopped = validate(job, step, state, watch, interrupts)
        saves = SaveInterval(run.checkpoint_every, step, job.mesh.size)
        local_saves = SaveInterval(run.local_checkpoint_every, step, job.mesh.size)
        timer.restart()

        def save(
            target: Checkpoints | LocalCheckpoints, interval: SaveInterval, *metric: float | None
        ) -> None:
            before_s = timer.spent_s["checkpoints"]
            with timer.spending("checkpoints"):
                watch.notify(Observer.before_save, step)
                target.save(step, padding.unpad(padding.step_spec.saved(state)), *metric)
            interval.saved(step, timer.spent_s["checkpoints"] - before_s, timer.step_s)
            timer.restart()

        def report() -> None:
            """Waits for the last step that was dispatched, and reports it once."""
            nonlocal previous
            if previous is not None:
                if any(watch.notify(Observer.starts_idle, previous[0] + 1)):
                    jax.block_until_ready(state)
                watch.notify(Observer.on_step, fetch_finite(run, previous, timer, checkpoints))
            previous = None

        while step < last_step and not stopped:
            if step in run.stage_begins and compiled.run != run.stage(step):
                report()
                compiled, replay, batches = begin_stage(job, step, state, watch, timer)
                timer.restart()
            if is_idle := any(watch.notify(Observer.starts_idle, step + 1)):
                report()
            watch.notify(Observer.before_step, step + 1)
            if is_idle:
                timer.restart()
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                with timer.spending("data"):
                    row_ids, batch = next(batches)
                replayed = None
                if replay is not None and run.at_interval(step + 1, run.replay_every):
                    report()
                    with timer.spending("replay"):
                        replayed = replay.compute(state, batch)
                    timer.restart()
                with timer.spending("device"):
                    state, metrics = compiled.executable(state, batch)
            report()  # while the devices work on this step
            step += 1
            previous = (step, row_ids, metrics)
            if replay is not None and replayed is not None:
                report()
                with timer.spending("replay"):
                    replay.check(step, replayed, state)
                timer.restart()

            stopped = interrupts.received(step)
            evaluates = run.at_interval(step, run.evaluate_every)
            if stopped or evaluates or saves.is_due(step):
                report()  # nothing is saved before its loss was seen to be finite
                metric = None
                if evaluates and not stopped:  # else the run that continues this one evaluates
                    with timer.spending("evaluation"):
                        metric, stopped = validate(job, step, state, watch, interrupts)
                save(checkpoints, saves, metric)
            elif local is not None and local_saves.is_due(step):
                report()
                save(local, local_saves)

        interrupts.last_save()
        checkpoints.wait()
        outcome = Outcome(step, interrupts.stops_run, timer.step_s, timer.data_stall_fraction)
        watch.notify(Observer.on_end, outcome)
    return outcome


def restore_or_init(
    padding: StatePadding, checkpoints: Checkpoints, run: Run, local: LocalCheckpoints | None = None
) -> tuple[State, int]:
    """Returns the newest readable checkpoint, sharded over this mesh, or a new state."""
    step_spec, step = padding.step_spec, 0
    newest = checkpoints.latest
    newer = local.restore(newest) if local is not None else None
    if newest is None:
        state = step_spec.saved(padding.unpad(init_state(step_spec, padding.mesh)))
        if run.start_from is not None and run.model.adapter is None:
            model = step_spec.without_padding().model
            state["params"], _ = warm_started(state["params"], run.start_from, model, padding.mesh)
    else:
        state, step = newer or checkpoints.restore(step_spec.saved(padding.unpadded))
        spikes = jax.device_get(step_spec.spike_state())
        state = jax.device_put(spikes, padding.padded["step"].sharding) | state
        where = f", a local checkpoint; the last checkpoint is {newest}" if newer else ""
        logger.info("Continuing from step %d%s.", step, where)
    if "base" in state:
        padding.add_base(state, run)
    return padding.pad(state), step


def begin_stage(
    job: TrainJob, step: int, state: State, watch: Observers, timer: StepTimer
) -> tuple[CompiledStep, Replay | None, Iterator[tuple[np.ndarray, Batch]]]:
    """Compiles the step for the batches after a step; returns that, its replay and the batches."""
    run, replay = job.run, None
    job = dataclasses.replace(job, run=run.stage(step))
    if any(run.stages.values()):
        shape = job.run.batch_sequences, job.run.task.length
        logger.info("Batches of %d rows of %d tokens after step %d.", *shape, step)
    with timer.spending("compile"):
        compiled = compile_train_step(job, state)
    watch.notify(Observer.on_compiled, compiled)
    if run.replay_every is not None:
        with timer.spending("compile"):
            there = dataclasses.replace(job, mesh=rotated(job.mesh))
            executable = compile_train_step(there, state).executable
        replay = Replay(job.mesh, executable, train_step_spec(job.run, job.layout).trained)
    rows = job.splits["train"].without(run.exclude)
    if run.length_stages:
        rows = dataclasses.replace(rows, batch_length=job.run.task.length)
    sharding = BatchSharding.of(job.run, job.layout, job.mesh)
    on_host = order.batches(rows, run.seed, run.batch_sizes, step, sharding.host_rows())
    return compiled, replay, ((ids, sharding.to_global_arrays(batch)) for ids, batch in on_host)


def compile_train_step(job: TrainJob, state: State) -> CompiledStep:
    """Traces and compiles the step for this state on the job's mesh; nothing runs."""
    run, state = job.run, abstract_like(state, job.mesh)
    batch = BatchSharding.of(run, job.layout, job.mesh).abstract(run.task.array_shapes)
    with jax.set_mesh(job.mesh):
        traced = train_step.trace(train_step_spec(run, job.layout), state, batch)
        start = time.perf_counter()
        executable = compile_program(traced, job.mesh, run.compiler_options)
    seconds = time.perf_counter() - start
    return CompiledStep(run, job.layout, job.mesh, state, batch, traced, executable, seconds)


def fetch_finite(
    run: Run, dispatched: Dispatched, timer: StepTimer, checkpoints: Checkpoints
) -> StepResult:
    """Waits for a step's metrics; raises where the run diverged, or where a save failed."""
    step, row_ids, metrics = dispatched
    with timer.spending("device"):
        metrics = jax.device_get(metrics)
    loads = metrics.pop("loads", {})
    numbers = {name: float(x) for name, x in metrics.items()}
    if not numbers["tokens"]:
        logger.warning("Step %d: its rows have no token to learn from (Run.exclude).", step)
    check_finite(numbers, step, row_ids, checkpoints.wait_for_latest, run.skip_spikes)
    rates = timer.rates(numbers["tokens"])
    checkpoints.check()
    return StepResult(step, {"step": step, **numbers, **rates}, loads)


def validate(
    job: TrainJob, step: int, state: State, watch: Observers, interrupts: Interrupts
) -> tuple[float | None, bool]:
    """Evaluates on the validation split, if there is one.

    Returns the metric of `Run.best_by`, if known, and whether the run is to stop, which ends the
    evaluation between two batches.
    """
    rows, run, params = job.splits.get("validation"), job.run, without_teacher(state["params"])
    if rows is None or not len(rows):
        return None, False

    def progress(done: int, total: int) -> None:
        watch.notify(Observer.on_batch_evaluated, done, total)
        if interrupts.received(step):
            raise StopRequested

    try:
        model, size = run.model.model(job.layout), run.batch_sequences
        batches = run.evaluate_batches if step < run.total_steps else None
        evaluation, parts = evaluate(
            model, params, rows, job.mesh, batch_sequences=size, batches=batches, progress=progress
        )
        logger.info("Step %d: validation %s.", step, evaluation)
        line: Line = {"step": step, **evaluation.numbers()}
        for measures in watch.notify(Observer.evaluate, step, params, progress):
            line |= measures
    except StopRequested:
        return None, True
    watch.notify(Observer.on_evaluation, line, parts)
    return line.get(run.best_by), False
