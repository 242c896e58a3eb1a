"""Searches for settings that change a step's cost but not its result, with compiled plans."""

import dataclasses
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, get_args

import jax

from configs.errors import RunError, UserError
from configs.json_reader import whole_lines
from data.storage.files import atomic_write
from layouts.cost.calibration import HostRates
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import batch_shards, mesh_sizes
from models.api import ModelSpec
from models.spec import Remat, SavedProduct
from models.transformer import Transformer
from trainer.checks import check_run
from trainer.planning.child import CompilerAborted
from trainer.planning.search import OVERESTIMATE, Hardware, plan_if_traceable
from trainer.planning.training import StepPlan
from trainer.run import Run

logger = logging.getLogger(__name__)
T = TypeVar("T")
OptionSets = Sequence[tuple[str, ...]]
MICROBATCHES = (1, 2, 4, 8, 16, 32)
REMAT: tuple[Remat, ...] = get_args(Remat)
PROJECTIONS: tuple[SavedProduct, ...] = ("query_proj", "key_proj", "value_proj", "out_proj")
CONTEXT: tuple[SavedProduct, ...] = ("context",)
OPTIMISM = 0.9  # times the prediction, so that candidates that may be faster are tried


class Candidate(NamedTuple):
    """Holds a run and a layout that compute the same step at another cost."""

    run: Run
    layout: Layout

    @property
    def settings(self) -> dict[str, Any]:
        """Lists the settings that a search varies, under the names of gin files."""
        run, layout = self.run, self.layout
        fields = dataclasses.asdict(layout).items()
        settings: dict[str, Any] = {f"Layout.{name}": value for name, value in fields}
        settings["Run.microbatches"] = run.microbatches
        if isinstance(run.model, Transformer):
            for name in ("remat", "remat_saves", "remat_offloads"):
                settings[f"Transformer.{name}"] = getattr(run.model, name)
        return settings | {"Run.compiler_options": run.compiler_options}

    @property
    def kind(self) -> tuple[Layout, tuple[str, ...]]:
        """Returns what determines how far a trace is from the compiled program."""
        return self.layout, self.run.compiler_options


class Trial(NamedTuple):
    """Holds the cost of a candidate."""

    step_s: float | None = None
    """Seconds of a step; None if the compiler fails or memory does not suffice."""
    needed_bytes: int | None = None
    """Bytes on a device; None if they are unknown."""
    fits: bool | None = None
    problem: str | None = None
    """Why it was not compiled."""

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        step_s = None if plan.memory.out_of_memory else plan.step_s
        return cls(step_s, plan.memory.needed_bytes, plan.fits)


class TrialLog:
    """Keeps the results of a search in a file of JSON lines, so that the search can resume."""

    def __init__(self, path: Path, subject: Mapping[str, Any]):
        """Opens the log of a subject; raises if it is the log of another one."""
        lines, first = whole_lines(path), json.loads(json.dumps({"subject": subject}))
        if path.exists() and lines[:1] != [first]:
            raise UserError(
                f"{path}: is the log of another search: its run, devices or versions differ.  "
                "Remove it, or give another --output."
            )
        self._path = path
        self._values = {json.dumps(line["name"]): line["value"] for line in lines[1:]}
        # Drops a last line that is half-written because a process was killed.
        atomic_write(path, "".join(f"{json.dumps(line)}\n" for line in lines or [first]))

    def once(self, name: Any, compute: Callable[[], T]) -> T:
        """Returns the logged value, or computes and logs it; JSON must be able to hold both."""
        if not self.holds(name):
            value = self._values[json.dumps(name)] = compute()
            with self._path.open("a") as file:
                file.write(json.dumps({"name": name, "value": value}) + "\n")
        return self._values[json.dumps(name)]

    def holds(self, name: Any) -> bool:
        return json.dumps(name) in self._values


@dataclasses.dataclass
class Tuner:
    """Compiles the candidate that traces and earlier trials predict to be the fastest."""

    hardware: Hardware
    measure: Callable[[Candidate], Trial]
    log: TrialLog
    deadline_s: float = math.inf
    """Time of `time.monotonic` at which the search ends, even if a candidate may be faster."""
    trials: dict[Candidate, Trial] = dataclasses.field(default_factory=dict)
    left: list[Candidate] = dataclasses.field(default_factory=list)
    """Candidates that the deadline left out, the most promising first."""

    def search(self, ladders: Sequence[Sequence[Candidate]]) -> None:
        """Measures candidates; each ladder has one of them with more and more microbatches."""
        remaining = [list(ladder) for ladder in ladders]
        while promising := self._promising(remaining):
            candidate = promising[0]
            out_of_time = time.monotonic() > self.deadline_s
            if out_of_time and not self.log.holds(["trial", candidate.settings]):
                self.left = promising
                return
            self.trials[candidate] = self._once("trial", candidate, self._try)
            logger.info("%s", describe(candidate, self.trials[candidate]))

    @property
    def ranking(self) -> list[tuple[Candidate, Trial]]:
        """Lists the candidates that fit, the fastest first."""
        fitting = [
            (candidate, trial)
            for candidate, trial in self.trials.items()
            if trial.step_s is not None and trial.fits is not False
        ]
        return sorted(fitting, key=lambda pair: pair[1].step_s or math.inf)

    def _try(self, candidate: Candidate) -> Trial:
        try:
            return self.measure(candidate)
        except (CompilerAborted, RunError, jax.errors.JaxRuntimeError) as error:
            return Trial(problem=str(error))

    def _promising(self, ladders: list[list[Candidate]]) -> list[Candidate]:
        """Returns candidates that may be faster than the best so far, the fastest prediction first.

        Drops candidates that do not fit from the ladders.
        """
        best_s = min((trial.step_s or math.inf for _, trial in self.ranking), default=math.inf)
        predicted = []
        for ladder in ladders:
            while ladder and not self._may_fit(ladder[0]):
                ladder.pop(0)
            if ladder and ladder[0] not in self.trials:
                trace_s = self._trace(ladder[0]).step_s or 0.0
                predicted.append((self._ratio(ladder[0], "step_s", 1.0) * trace_s, ladder[0]))
        predicted.sort(key=lambda pair: pair[0])
        return [candidate for step_s, candidate in predicted if OPTIMISM * step_s < best_s]

    def _trace(self, candidate: Candidate) -> Trial:
        run = dataclasses.replace(candidate.run, compiler_options=())  # a trace depends on none
        return self._once("trace", candidate._replace(run=run), self._plan)

    def _once(self, by: str, candidate: Candidate, measure: Callable[[Candidate], Trial]) -> Trial:
        """Returns the trial of an earlier search, or measures the candidate."""
        name = [by, candidate.settings]
        return Trial(**self.log.once(name, lambda: measure(candidate)._asdict()))

    def _plan(self, candidate: Candidate) -> Trial:
        plan = plan_if_traceable(candidate.run, candidate.layout, self.hardware)
        return Trial(fits=False) if plan is None else Trial.of(plan)

    def _may_fit(self, candidate: Candidate) -> bool:
        if candidate in self.trials:
            return self.trials[candidate].fits is not False
        trace = self._trace(candidate)
        if trace.step_s is None or trace.needed_bytes is None:
            return False
        needed_bytes = self._ratio(candidate, "needed_bytes", 1 / OVERESTIMATE) * trace.needed_bytes
        if isinstance(self.hardware, HostRates):
            return True
        return needed_bytes <= self.hardware.chip.memory_bytes

    def _ratio(self, candidate: Candidate, figure: str, least: float) -> float:
        """Returns the ratio of a figure in trials to the same figure in their traces.

        Uses the last trial of the same kind, or else the smallest ratio of all.
        """
        ratios = {
            tried.kind: getattr(trial, figure) / getattr(self._trace(tried), figure)
            for tried, trial in self.trials.items()
            if getattr(trial, figure)
        }
        return ratios.get(candidate.kind, min(ratios.values(), default=least))


def ladders_of(
    stages: Sequence[Run], layouts: Sequence[Layout], options: OptionSets, hardware: Hardware
) -> Iterator[list[Candidate]]:
    """Yields ladders of candidates for each layout, recomputation and set of compiler options.

    The candidates are of the last stage of a run, and legal in all stages.
    """
    *_, run = stages
    models: Sequence[ModelSpec] = [run.model]
    if isinstance(run.model, Transformer):
        models = recomputations(run.model, offload=isinstance(hardware, Topology))
    for layout in layouts:
        shards = batch_shards(layout, mesh_sizes(layout.mesh, hardware.devices))
        counts = [
            n for n in sorted({run.microbatches, *MICROBATCHES}) if divides(stages, n, shards)
        ]
        for recomputed, chosen in itertools.product(models, options):
            changed = dataclasses.replace(run, model=recomputed, compiler_options=chosen)
            runs = (dataclasses.replace(changed, microbatches=count) for count in counts)
            yield [Candidate(each, layout) for each in runs]


def describe(candidate: Candidate, trial: Trial) -> str:
    """Describes a trial in a line."""
    time = f"{trial.step_s:.4g} s" if trial.step_s and trial.fits is not False else "does not fit"
    settings = (f"{name} = {value!r}" for name, value in candidate.settings.items() if value)
    return f"{trial.problem or time}: {', '.join(settings)}"


def recomputations(model: Transformer, *, offload: bool) -> list[Transformer]:
    """Returns the model with each kind of recomputation, and "full" also with saved values.

    With `offload`, also with layer inputs and projections in host memory.
    """
    plain = dataclasses.replace(model, remat="full", remat_saves=(), remat_offloads=())
    kinds = [dataclasses.replace(plain, remat=remat) for remat in REMAT]
    saved = (CONTEXT, PROJECTIONS, (*PROJECTIONS, *CONTEXT))
    kinds += [dataclasses.replace(plain, remat_saves=names) for names in saved]
    if offload:
        inputs = dataclasses.replace(plain, remat_offloads=("layer_input",))
        kinds += [dataclasses.replace(inputs, remat_saves=names) for names in ((), *saved)]
        kinds.append(dataclasses.replace(plain, remat_offloads=("layer_input", *PROJECTIONS)))
    return list(dict.fromkeys([model, *kinds]))


def divides(stages: Sequence[Run], microbatches: int, shards: int) -> bool:
    """Returns whether microbatches of all stages divide over shards and into groups of tokens."""
    if any(run.batch_sequences % (microbatches * shards) for run in stages):
        return False
    try:
        for run in stages:
            check_run(dataclasses.replace(run, microbatches=microbatches))
    except UserError:
        return False
    return True
