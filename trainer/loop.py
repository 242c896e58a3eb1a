"""The training loop, top to bottom in the order things happen."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from data.packing.rows import Rows
from layouts.layout import Layout
from models.api import Params
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.unpadded import Disk
from trainer.checkpoints.warm_start import inherited
from trainer.evaluate import evaluate
from trainer.expert_load import by_layer, warnings
from trainer.feed import feed, placement
from trainer.interrupts import StopSignal, check_finite
from trainer.metrics import Line, Writers
from trainer.multihost import connect
from trainer.planning.prediction import foresee
from trainer.planning.report import as_json
from trainer.planning.training import trace_step
from trainer.run import Run, program_of
from trainer.step import Metrics, State, init_state
from trainer.translation.metrics import Quality

Say = Callable[[str], None]
WARN_EVERY = 100  # steps between warnings about experts


class Watcher(Protocol):
    """What a run tells its user while it goes on."""

    def say(self, text: str) -> None: ...

    def start(self, first_step: int, steps: int) -> None: ...

    def step(self, line: Line) -> None: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    steps: int
    stopped: bool
    step_s: float | None
    """Seconds a step, the first one (which compiles) not counted."""
    data_wait: float
    """The share of that time in which the loop waited for data."""
    foreseen_s: float | None = None
    """Seconds a step, as they were predicted before the first."""


@dataclasses.dataclass(frozen=True)
class Pending:
    """A step that was dispatched and whose metrics are not read yet."""

    step: int
    row_ids: np.ndarray
    metrics: Metrics


@dataclasses.dataclass
class Clock:
    """Seconds between steps, and seconds spent waiting for data."""

    flops_per_step: float | None = None
    peak_flops: float | None = None
    steps: int = 0
    total_s: float = 0.0
    waited_s: float = 0.0
    last: float = dataclasses.field(default_factory=time.perf_counter)

    def rates(self, tokens: float) -> Line:
        """Rates of the step that ended now; the first one is not added to the totals."""
        now = time.perf_counter()
        step_s, self.last = now - self.last, now
        if self.steps:
            self.total_s += step_s
        else:
            self.waited_s = 0.0
        self.steps += 1
        flops = None if self.flops_per_step is None else self.flops_per_step / step_s
        share = None if flops is None or self.peak_flops is None else flops / self.peak_flops
        return {
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "model_flops_per_s": flops,
            "share_of_peak": share,
            "data_wait": self.waited_s / self.total_s if self.total_s else 0.0,
        }


def train(
    run: Run,
    layout: Layout,
    mesh: Mesh,
    splits: dict[str, Rows],
    model_dir: Path,
    watcher: Watcher,
    clock: Clock,
    translated: Callable[[Params], Quality] | None = None,
) -> Outcome:
    """Trains from the newest checkpoint of the model directory, or from the start, to the end.

    `translated` says how good the model's translations are, of the sentences that the run measures
    BLEU on.
    """
    program = program_of(run, layout)
    connect(mesh)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = stack.enter_context(
            Checkpoints(
                model_dir,
                keep_last=run.keep_last,
                keep_best=run.keep_best,
                higher_is_better=run.best_by == "bleu",
                report=watcher.say,
            )
        )
        disk = Disk(program, mesh)
        state, first_step = restore_or_init(disk, checkpoints, watcher.say, run.start_from)
        writes = jax.process_index() == 0
        writers = stack.enter_context(Writers(model_dir, first_step, writes=writes))
        stop = stack.enter_context(StopSignal())
        batches = feed(
            splits["train"],
            placement(layout, mesh, run.microbatches),
            seed=run.seed,
            batch_sequences=run.batch_sequences,
            microbatches=run.microbatches,
            first_step=first_step,
        )
        watcher.start(first_step, run.steps)
        foreseen = None
        if first_step < run.steps:
            foreseen = foresee(trace_step(run, layout, mesh, state))
            watcher.say(foreseen.told)
            writers.plan(as_json(foreseen.plan, layout))

        def last_good() -> int | None:
            """The newest checkpoint, once the one that is being saved is there as well."""
            checkpoints.wait()
            return checkpoints.latest

        def read(pending: Pending) -> None:
            """Waits for a step's metrics, checks and writes them."""
            metrics = jax.device_get(pending.metrics)
            loads = metrics.pop("loads", {})
            numbers = {name: float(x) for name, x in metrics.items()}
            check_finite(numbers, pending.step + 1, pending.row_ids, last_good)
            rates = clock.rates(numbers["tokens"])
            checkpoints.check()
            line: Line = {"step": pending.step + 1, **numbers, **rates}
            watcher.step(line)
            if due(pending.step + 1, run.log_every, run.steps):
                writers.train(line, by_layer(loads))
            if due(pending.step + 1, WARN_EVERY, run.steps):
                for warning in warnings(by_layer(loads)):
                    watcher.say(f"Step {pending.step + 1}: warning: {warning}")

        def check(done: int, state: State) -> float | None:
            """Evaluates on the validation split, where there is one; the measure of the best."""
            if not len(splits.get("validation", ())):
                return None
            found, parts = evaluate(
                program.model,
                state["params"],
                splits["validation"],
                mesh,
                batch_sequences=run.batch_sequences,
                batches=run.evaluate_batches if done < run.steps else None,
            )
            line: Line = {"step": done, **dataclasses.asdict(found)}
            watcher.say(f"Step {done}: validation {found}.")
            if translated is not None:
                good = translated(state["params"])
                line |= {"bleu": good.bleu.score, "chrf": good.chrf.score,
                         "bleu_sentences": good.sentences}  # fmt: skip
                watcher.say(f"Step {done}: of {good.sentences} validation sentences, {good.bleu}.")
            writers.evaluation(line, parts)
            return line["bleu" if run.best_by == "bleu" else "loss"]

        pending, stopped, done = None, False, first_step
        while foreseen is not None and done < run.steps and not stopped:
            before = time.perf_counter()
            row_ids, batch = next(batches)
            clock.waited_s += time.perf_counter() - before
            state, metrics = foreseen.step(state, batch)
            if pending is not None:
                read(pending)  # of the step before, while the device works on this one
            pending, done = Pending(done, row_ids, metrics), done + 1

            stopped = stop.received(done)
            evaluates = due(done, run.evaluate_every, run.steps)
            if stopped or evaluates or due(done, run.checkpoint_every, run.steps):
                read(pending)  # nothing is saved before its loss was seen to be a number
                pending = None
                metric = check(done, state) if evaluates else None
                checkpoints.save(done, disk.to_save(state), metric)
                clock.last = time.perf_counter()
        checkpoints.wait()
    step_s = clock.total_s / (clock.steps - 1) if clock.steps > 1 else None
    waited = clock.waited_s / clock.total_s if clock.total_s else 0.0
    return Outcome(done, stopped, step_s, waited, foreseen.plan.step_s if foreseen else None)


def due(done: int, every: int | None, steps: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return done == steps or (every is not None and done % every == 0)


def restore_or_init(
    disk: Disk, checkpoints: Checkpoints, say: Say, start_from: str | None
) -> tuple[State, int]:
    """The newest readable checkpoint, placed on this mesh, or a new state."""
    if checkpoints.latest is None:
        state = init_state(disk.program, disk.mesh)
        if start_from is not None:
            layout, fresh = disk.program.even().model.layout, disk.to_save(state)["params"]
            params = inherited(fresh, start_from, layout, disk.mesh, say)
            state |= disk.to_hold({"params": params})
        return state, 0
    state, step = checkpoints.restore(disk.saved)
    say(f"Continuing from step {step}.")
    return disk.to_hold(state), step
