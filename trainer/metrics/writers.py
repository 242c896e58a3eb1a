"""Writes a run's numbers: metrics.jsonl, evaluations.jsonl, its trackers, a plot of the loss."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.storage.files import WorkingFolder, atomic_write, sync, write_errors
from trainer.evaluate import PartEvaluation
from trainer.metrics.expert_load import scalars, stats_by_layer
from trainer.metrics.jsonl import EVALUATIONS, METRICS, split_lines
from trainer.metrics.plots import RunPlots
from trainer.metrics.trackers import ID_FILES, TrackedRun
from trainer.observers import Line, Observer, Outcome, StepResult
from trainer.resume.history import last_saved
from trainer.run import Run

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends JSON objects to a file, one per line, each with its step."""

    def __init__(self, path: Path, first_step: int, last_saved: int = 0):
        """Opens the file; lines after `first_step`, left by a killed run, are dropped.

        Damaged lines, and those that checkpoints up to `last_saved` had, move to other files of the
        folder.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, damaged = split_lines(path, "loss")
        undone = [x for x in lines if first_step < x["step"] <= last_saved]
        replaced = [json.dumps(line) for line in undone]
        for kind, texts in (("damaged", damaged), ("replaced", replaced)):
            aside = path.with_name(f"{path.name}.{kind}")
            if texts:
                with aside.open("a", encoding="utf-8") as file:
                    file.writelines(f"{text}\n" for text in texts)
                logger.warning(
                    "%s: %d %s lines are moved to %s.", path, len(texts), kind, aside.name
                )
        kept = [line for line in lines if line["step"] <= first_step]
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: Mapping[str, Any]) -> None:
        with write_errors(self._path, "train into another --model_dir"):
            self._file.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        self._file.flush()
        sync(self._path)

    def close(self) -> None:
        self._file.close()


@dataclasses.dataclass(eq=False)
class MetricsWriter(Observer):
    """Writes metrics.jsonl and evaluations.jsonl, and sends the same to the run's trackers."""

    model_dir: Path
    flops_per_step: float | None = None
    peak_flops: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._succeeded, self._open = False, contextlib.ExitStack()

    def on_start(self, run: Run, first_step: int) -> None:
        self._run = run
        self._folder = WorkingFolder(self.model_dir)
        self._open.callback(self._folder.close)
        self._folder.fetch(METRICS, EVALUATIONS, *ID_FILES)
        saved = last_saved(self.model_dir)
        self._train, self._evaluations = (
            MetricsFile(self._folder.path / name, first_step, saved)
            for name in (METRICS, EVALUATIONS)
        )
        for file in (self._train, self._evaluations):
            self._open.callback(file.close)
        tracked = TrackedRun(self._folder.path, self.model_dir.name, first_step, self.settings)
        self._trackers = [tracker.open(tracked) for tracker in run.trackers]
        for tracker in self._trackers:
            self._open.callback(lambda close: close(succeeded=self._succeeded), tracker.close)

    def on_step(self, result: StepResult) -> None:
        """Writes a step's numbers; those of layers with experts go under "experts"."""
        if not self._run.at_interval(result.step, self._run.log_every):
            return
        # The rate of the model's own FLOPs, and its share of what the devices can do.
        flops, step_s, peak = self.flops_per_step, result.line.get("step_s"), self.peak_flops
        rate = None if flops is None or step_s is None else flops / step_s
        share = None if rate is None or peak is None else rate / peak
        line = result.line | {"model_flops_per_s": rate, "share_of_peak": share}
        layers = stats_by_layer(result.loads)
        self._train.write({**line, "experts": layers} if layers else line)
        self._track("train", line)
        self._track("experts", {"step": result.step, **scalars(layers)})

    def on_evaluation(self, line: Line, parts: Mapping[str, PartEvaluation]) -> None:
        """Writes an evaluation's numbers; those of a mixture's parts go under "parts"."""
        part_lines = {name: part._asdict() for name, part in parts.items()}
        self._evaluations.write({**line, "parts": part_lines} if parts else line)
        self._track("validation", line)
        losses: Line = {name: part.loss for name, part in parts.items()}
        self._track("validation_loss", {"step": line["step"], **losses})

    def before_save(self, step: int) -> None:
        """Makes the lines last as long as the checkpoint, whose run takes them for granted."""
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
        numbers = {
            f"{group}/{name}": number
            for name, number in line.items()
            if name != "step" and number is not None
        }
        for tracker in self._trackers if numbers else ():
            tracker.log(int(line["step"] or 0), numbers)


class LossPlot(Observer):
    """Draws loss.png when a run ends."""

    def __init__(self, model_dir: Path):
        self._model_dir = model_dir

    def close(self) -> None:
        RunPlots(self._model_dir).save(self._model_dir, "loss")
