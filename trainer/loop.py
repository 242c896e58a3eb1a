"""Contains the training loop, in the order in which things happen."""

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from configs.paths import path_of
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
from trainer.interrupts import Interrupts, StopRequested, check_finite, check_weights
from trainer.metrics.step_timer import StepTimer
from trainer.multihost import connect, gather, is_first_process
from trainer.observers import CompiledStep, Line, Observer, Observers, Outcome, StepResult
from trainer.replay import Replay, rotated
from trainer.resume.history import amend_record
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
    run, watch = job.run, Observers(observers)
    connect(job.mesh)
    with ExitStack() as stack:
        timer = StepTimer()
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
        loop = TrainLoop(job, watch, timer, interrupts, padding, checkpoints, local, state, step)
        del state  # the loop has it, and donates it to each step
        loop.begin()
        while loop.step < run.total_steps and not loop.is_stopped:
            loop.next_step()
            loop.evaluate_and_save()
        interrupts.last_save()
        checkpoints.wait()
        stop_signal, step_s = interrupts.stops_run, timer.step_s
        outcome = Outcome(loop.step, stop_signal, step_s, timer.data_stall_fraction)
        watch.notify(Observer.on_end, outcome)
    return outcome


@dataclasses.dataclass
class TrainLoop:
    """Holds the state of the loop.  While devices work on one step, it reports the previous one."""

    job: TrainJob
    watch: Observers
    timer: StepTimer
    interrupts: Interrupts
    padding: StatePadding
    checkpoints: Checkpoints
    local: LocalCheckpoints | None
    state: State
    step: int
    """Number of updates of this state."""
    is_stopped: bool = False
    previous: Dispatched | None = None
    compiled: CompiledStep = dataclasses.field(init=False)
    replay: Replay | None = dataclasses.field(init=False)
    batches: Iterator[tuple[np.ndarray, Batch]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.run, devices = self.job.run, self.job.mesh.size
        self.saves = SaveInterval(self.run.checkpoint_every, self.step, devices)
        self.local_saves = SaveInterval(self.run.local_checkpoint_every, self.step, devices)

    def begin(self) -> None:
        """Compiles the step; evaluates a restored checkpoint if a signal ended its evaluation."""
        if self.step < self.run.total_steps:
            self.begin_stage()
        is_due = bool(self.step) and self.run.at_interval(self.step, self.run.evaluate_every)
        if is_due and any(gather(self.checkpoints.best_of([self.step]) is None)):
            self.validate()
        self.timer.restart()

    def begin_stage(self) -> None:
        """Compiles the step, and its replay, for the batches after the current step."""
        run, job = self.run, dataclasses.replace(self.job, run=self.run.stage(self.step))
        if any(run.stages.values()):
            shape = job.run.batch_sequences, job.run.task.length
            logger.info("Batches of %d rows of %d tokens after step %d.", *shape, self.step)
        with self.timer.spending("compile"):
            self.compiled = compile_train_step(job, self.state)
        self.watch.notify(Observer.on_compiled, self.compiled)
        self.replay = None
        if run.replay_every is not None:
            with self.timer.spending("compile"):
                rotated_job = dataclasses.replace(job, mesh=rotated(job.mesh))
                executable = compile_train_step(rotated_job, self.state).executable
            self.replay = Replay(job.mesh, executable, train_step_spec(job.run, job.layout).trained)
        rows = job.splits["train"].without(run.exclude)
        if run.length_stages:
            rows = dataclasses.replace(rows, batch_length=job.run.task.length)
        sharding = BatchSharding.of(job.run, job.layout, job.mesh)
        on_host = order.batches(rows, run.seed, run.batch_sizes, self.step, sharding.host_rows())
        self.batches = ((ids, sharding.to_global_arrays(batch)) for ids, batch in on_host)

    def next_step(self) -> None:
        """Dispatches the next step, and reports the previous one."""
        run, timer, step = self.run, self.timer, self.step + 1
        if self.step in run.stage_begins and self.compiled.run != run.stage(self.step):
            self.report()
            self.begin_stage()
            timer.restart()
        if is_idle := any(self.watch.notify(Observer.starts_idle, step)):
            self.report()
        self.watch.notify(Observer.before_step, step)
        if is_idle:
            timer.restart()
        replayed = None
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with timer.spending("data"):
                row_ids, batch = next(self.batches)
            if self.replay is not None and run.at_interval(step, run.replay_every):
                self.report()
                with timer.spending("replay"):
                    replayed = self.replay.compute(self.state, batch)
                timer.restart()
            with timer.spending("device"):
                self.state, metrics = self.compiled.executable(self.state, batch)
        self.report()  # while the devices work on this step
        self.step, self.previous = step, (step, row_ids, metrics)
        if self.replay is not None and replayed is not None:
            self.report()
            with timer.spending("replay"):
                self.replay.check(step, replayed, self.state)
            timer.restart()

    def report(self) -> None:
        """Waits for the last dispatched step, and reports it once."""
        if self.previous is None:
            return
        step, row_ids, metrics = self.previous
        if any(self.watch.notify(Observer.starts_idle, step + 1)):
            jax.block_until_ready(self.state)
        with self.timer.spending("device"):
            metrics = jax.device_get(metrics)
        loads = metrics.pop("loads", {})
        numbers = {name: float(x) for name, x in metrics.items()}
        if not numbers["tokens"]:
            logger.warning("Step %d: its rows have no token to learn from (Run.exclude).", step)
        last_good = self.checkpoints.wait_for_latest
        check_finite(numbers, step, row_ids, last_good, self.run.skip_spikes)
        line = {"step": step, **numbers, **self.timer.rates(numbers["tokens"])}
        self.checkpoints.check()  # raises if a save has failed
        self.watch.notify(Observer.on_step, StepResult(step, line, loads))
        self.previous = None

    def evaluate_and_save(self) -> None:
        """Evaluates and saves if the step is due for it, or if the run must stop."""
        self.is_stopped = self.interrupts.received(self.step)
        evaluates = self.run.at_interval(self.step, self.run.evaluate_every)
        if self.is_stopped or evaluates or self.saves.is_due(self.step):
            self.report_finite()
            metric = None
            if evaluates and not self.is_stopped:  # else the run that continues this one evaluates
                metric = self.validate()
            self.save(self.checkpoints, self.saves, metric)
        elif self.local is not None and self.local_saves.is_due(self.step):
            self.report_finite()
            self.save(self.local, self.local_saves)

    def report_finite(self) -> None:
        """Reports the last step; raises if its loss or the weights after it are not finite."""
        self.report()
        trained = self.padding.step_spec.trained(self.state["params"])
        check_weights(trained, self.step, self.checkpoints.wait_for_latest)

    def save(
        self, target: Checkpoints | LocalCheckpoints, interval: SaveInterval, *metric: float | None
    ) -> None:
        before_s = self.timer.spent_s["checkpoints"]
        with self.timer.spending("checkpoints"):
            self.watch.notify(Observer.before_save, self.step)
            state = self.padding.step_spec.saved(self.state)
            target.save(self.step, self.padding.unpad(state), *metric)
            # On a CPU, the next step would need another state in memory; Orbax's own wait warns.
            while jax.default_backend() == "cpu" and not self.checkpoints.check():
                time.sleep(0.01)
        save_s = self.timer.spent_s["checkpoints"] - before_s
        interval.saved(self.step, save_s, self.timer.step_s)
        self.timer.restart()

    def validate(self) -> float | None:
        """Evaluates on the validation split, if there is one; returns the metric of `Run.best_by`.

        A signal ends it between two batches.  Then the run must stop, and there is no metric.
        """
        job, run, rows = self.job, self.run, self.job.splits.get("validation")
        if rows is None or not len(rows):
            return None

        def progress(done: int, total: int) -> None:
            self.watch.notify(Observer.on_batch_evaluated, done, total)
            if self.interrupts.received(self.step):
                raise StopRequested

        with self.timer.spending("evaluation"):
            try:
                model, params = run.model.model(job.layout), without_teacher(self.state["params"])
                size, is_last = run.batch_sequences, self.step >= run.total_steps
                batches = None if is_last else run.evaluate_batches
                evaluation, parts = evaluate(
                    model, params, rows, job.mesh,
                    batch_sequences=size, batches=batches, progress=progress,
                )  # fmt: skip
                logger.info("Step %d: validation %s.", self.step, evaluation)
                line: Line = {"step": self.step, **evaluation.numbers()}
                for measures in self.watch.notify(Observer.evaluate, self.step, params, progress):
                    line |= measures
            except StopRequested:
                self.is_stopped = True
                return None
            self.watch.notify(Observer.on_evaluation, line, parts)
        return line.get(run.best_by)


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
        if step != newest and is_first_process():
            amend_record(path_of(checkpoints.model_dir), step=step)
        spikes = jax.device_get(step_spec.spike_state())
        state = jax.device_put(spikes, padding.padded["step"].sharding) | state
        where = f", a local checkpoint; the last checkpoint is {newest}" if newer else ""
        logger.info("Resuming from step %d%s.", step, where)
    if "base" in state:
        padding.add_base(state, run)
    return padding.pad(state), step


def compile_train_step(job: TrainJob, state: State) -> CompiledStep:
    """Traces and compiles the step for this state on the job's mesh, without running it."""
    run, state = job.run, abstract_like(state, job.mesh)
    batch = BatchSharding.of(run, job.layout, job.mesh).abstract(run.task.array_shapes)
    with jax.set_mesh(job.mesh):
        traced = train_step.trace(train_step_spec(run, job.layout), state, batch)
        start = time.perf_counter()
        executable = compile_program(traced, job.mesh, run.compiler_options)
    seconds = time.perf_counter() - start
    return CompiledStep(run, job.layout, job.mesh, state, batch, traced, executable, seconds)
