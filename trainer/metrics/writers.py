"""Observes a run: writes its numbers and a plot of the loss, and warns about its routers.

Numbers go to metrics.jsonl, evaluations.jsonl and the trackers.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data.storage.files import WorkingFolder, atomic_write, sync, write_errors
from models.feed_forward.moe.routing import Router
from trainer.evaluate import Part
from trainer.metrics import jsonl
from trainer.metrics.expert_load import Layer, scalars, stats_by_layer
from trainer.metrics.jsonl import DAMAGED, EVALUATIONS, METRICS, REPLACED, WALL_TIME, split_lines
from trainer.metrics.plots import RunPlots
from trainer.metrics.trackers import TrackedRun
from trainer.observers import Line, Observer, Outcome, StepResult
from trainer.run import Run

logger = logging.getLogger(__name__)
WARN_EVERY = 100  # steps
DROPPED_BOUND = 0.25  # of the choices of a layer
LOAD_BOUND = 8.0  # times the even share of an expert


class MetricsFile:
    """Appends JSON objects to a file, one per line, each with its step."""

    def __init__(self, path: Path, first_step: int):
        """Opens the file.  Damaged lines, and lines after `first_step`, whose steps are repeated,
        move to other files of the folder."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, damaged = split_lines(path, "loss")
        replaced = [json.dumps(line) for line in lines if line["step"] > first_step]
        after = f"lines after step {first_step}"
        for kind, what, texts in ((DAMAGED, "damaged lines", damaged), (REPLACED, after, replaced)):
            aside = path.with_name(path.name + kind)
            if texts:
                with aside.open("a", encoding="utf-8") as file:
                    file.writelines(f"{text}\n" for text in texts)
                logger.warning("%s: %d %s are moved to %s.", path, len(texts), what, aside.name)
        kept = [line for line in lines if line["step"] <= first_step]
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line, with the time in seconds since 1970."""
        with write_errors(self._path, "train into another --model_dir"):
            self._file.write(json.dumps({**line, WALL_TIME: time.time()}) + "\n")

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        with write_errors(self._path, "train into another --model_dir"):
            self._file.flush()
            sync(self._path)

    def close(self) -> None:
        self._file.close()


@dataclasses.dataclass(eq=False)
class MetricsWriter(Observer):
    """Writes metrics.jsonl and evaluations.jsonl, and sends the same to the run's trackers."""

    model_dir: Path
    step_flops: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """FLOPs of a step in each stage, by the number of steps before the stage."""
    peak_flops: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._succeeded, self._open = False, contextlib.ExitStack()

    def on_start(self, run: Run, first_step: int) -> None:
        self._run = run
        self._folder = WorkingFolder(self.model_dir)
        self._open.callback(self._folder.close)
        ids = (tracker.ID_FILE for tracker in run.trackers)
        ends, files = ("", DAMAGED, REPLACED), (METRICS, EVALUATIONS)
        self._folder.fetch(*(file + end for file in files for end in ends), *filter(None, ids))
        self._train = MetricsFile(self._folder.path / METRICS, first_step)
        self._evaluations = MetricsFile(self._folder.path / EVALUATIONS, first_step)
        for file in (self._train, self._evaluations):
            self._open.callback(file.close)
        tracked = TrackedRun(self._folder.path, self.model_dir.name, first_step, self.settings)
        self._trackers = [tracker.open(tracked) for tracker in run.trackers]
        for tracker in self._trackers:
            self._open.callback(lambda close: close(succeeded=self._succeeded), tracker.close)

    def on_step(self, result: StepResult) -> None:
        """Writes a step's numbers, with those of MoE layers under "experts".

        Each skipped step also gets a line, with null in place of NaN or infinity.
        """
        is_due = self._run.at_interval(result.step, self._run.log_every)
        if not is_due and not result.line.get("skipped"):
            return
        # The rate of model FLOPs, and its share of the devices' peak.
        begins = (begin for begin in self.step_flops if begin < result.step)
        flops = self.step_flops.get(max(begins, default=0))
        step_s, peak = result.line.get("step_s"), self.peak_flops
        rate = None if flops is None or step_s is None else flops / step_s
        share = None if rate is None or peak is None else rate / peak
        line = jsonl.finite(result.line | {"model_flops_per_s": rate, "share_of_peak": share})
        layers = stats_by_layer(result.loads)
        self._train.write({**line, "experts": layers} if layers else line)
        self._track("train", line)
        self._track("experts", {"step": result.step, **scalars(layers)})

    def on_evaluation(self, line: Line, parts: Mapping[str, Part]) -> None:
        """Writes an evaluation's numbers, with those of a mixture's parts under "parts"."""
        line = jsonl.finite(line)
        self._evaluations.write({**line, "parts": parts} if parts else line)
        self._track("validation", line)
        losses: Line = {name: part["loss"] for name, part in parts.items()}
        self._track("validation_loss", {"step": line["step"], **losses})

    def before_save(self, step: int) -> None:
        """Writes all lines to disk, because a run that continues from the checkpoint needs them."""
        self._train.sync()
        self._evaluations.sync()
        for tracker in self._trackers:
            tracker.flush()
        self._folder.upload()

    def on_end(self, outcome: Outcome) -> None:
        self._succeeded = True

    def close(self) -> None:
        self._open.close()

    def _track(self, group: str, line: Line) -> None:
        known = ((name, x) for name, x in line.items() if name != "step" and x is not None)
        numbers = {f"{group}/{name}": number for name, number in known}
        for tracker in self._trackers if numbers else ():
            tracker.log(int(line["step"] or 0), numbers)


class LossPlot(Observer):
    """Draws loss.png when a run ends."""

    def __init__(self, model_dir: Path):
        self._model_dir = model_dir

    def close(self) -> None:
        try:
            RunPlots(self._model_dir).save(self._model_dir, "loss")
        except UserError as error:  # the extra that draws is not installed
            logger.warning("Warning: no plot of the loss: %s", error)


class RouterWarnings(Observer):
    """Logs warnings about the routers every `WARN_EVERY` steps."""

    def on_start(self, run: Run, first_step: int) -> None:
        self._run = run

    def on_step(self, result: StepResult) -> None:
        if self._run.at_interval(result.step, WARN_EVERY):
            for warning in warnings(stats_by_layer(result.loads), self._run.model.router):
                logger.warning("Step %d: warning: %s", result.step, warning)


def warnings(layers: dict[str, Layer], router: Router | None) -> list[str]:
    """Names the layers that drop too much or load experts too unevenly, with a remedy."""
    messages = []
    more_slots, more_even = remedy(router, "capacity_factor"), remedy(router, "aux_loss")
    for name, layer in layers.items():
        for i, share in enumerate(layer["dropped"], 1):
            if share > DROPPED_BOUND:
                messages.append(
                    f"{name}: {share:.0%} of the choices number {i} were dropped.  Raise "
                    f"{more_slots}, or {more_even}."
                )
        times = max(layer["load"]) * len(layer["load"])
        if times > LOAD_BOUND:
            messages.append(
                f"{name}: one expert has {times:.1f} times its even share of the tokens.  "
                f"Raise {more_even}."
            )
    return messages


def remedy(router: Router | None, setting: str) -> str:
    """Names a setting of the router with its value."""
    if router is None:
        return f"the router's {setting}"
    return f"{type(router).__name__}.{setting} (now {getattr(router, setting)})"
