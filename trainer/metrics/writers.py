"""Writes a run's numbers: metrics.jsonl, evaluations.jsonl, events, a plot of the loss."""

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.storage import WorkingFolder, atomic_write, sync, write_errors
from trainer.evaluate import PartEvaluation
from trainer.metrics.expert_load import scalars, stats_by_layer
from trainer.metrics.jsonl import split_lines
from trainer.metrics.plots import RunPlots
from trainer.observers import Line, Observer, StepResult
from trainer.run import Run

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends JSON objects to a file, one per line, each with its step."""

    def __init__(self, path: Path, first_step: int):
        """Opens the file; lines after `first_step`, left by a killed run, are dropped.

        Damaged lines are moved to a file beside it.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, damaged = split_lines(path)
        if damaged:
            aside = path.with_name(path.name + ".damaged")
            with aside.open("a", encoding="utf-8") as file:
                file.writelines(f"{text}\n" for text in damaged)
            logger.warning("%s: %d damaged lines are moved to %s.", path, len(damaged), aside.name)
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


class MetricsWriter(Observer):
    """Writes metrics.jsonl, evaluations.jsonl and TensorBoard events."""

    def __init__(
        self, model_dir: Path, flops_per_step: float | None = None, peak_flops: float | None = None
    ):
        self._model_dir = model_dir
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self._open = contextlib.ExitStack()

    def on_start(self, run: Run, first_step: int) -> None:
        from tensorboardX import SummaryWriter  # imports PyTorch where there is one: seconds

        self._run = run
        self._folder = WorkingFolder(self._model_dir)
        self._open.callback(self._folder.close)
        self._folder.fetch(METRICS, EVALUATIONS)
        self._train = MetricsFile(self._folder.path / METRICS, first_step)
        self._evaluations = MetricsFile(self._folder.path / EVALUATIONS, first_step)
        self._events = SummaryWriter(
            str(self._folder.path / "events"), purge_step=first_step or None, flush_secs=10
        )
        for file in (self._train, self._evaluations, self._events):
            self._open.callback(file.close)

    def on_step(self, result: StepResult) -> None:
        """Writes a step's numbers; those of layers with experts go under "experts"."""
        if not self._run.at_interval(result.step, self._run.log_every):
            return
        line, layers = result.line | self._utilisation(result.line), stats_by_layer(result.loads)
        self._train.write({**line, "experts": layers} if layers else line)
        self._add_scalars("train", line)
        self._add_scalars("experts", {"step": result.step, **scalars(layers)})

    def on_evaluation(self, line: Line, parts: Mapping[str, PartEvaluation]) -> None:
        """Writes an evaluation's numbers; those of a mixture's parts go under "parts"."""
        part_lines = {name: part._asdict() for name, part in parts.items()}
        self._evaluations.write({**line, "parts": part_lines} if parts else line)
        self._add_scalars("validation", line)
        losses: Line = {name: part.loss for name, part in parts.items()}
        self._add_scalars("validation_loss", {"step": line["step"], **losses})

    def before_save(self, step: int) -> None:
        """Makes the lines last as long as the checkpoint, whose run takes them for granted."""
        self._train.sync()
        self._evaluations.sync()
        self._events.flush()
        self._folder.upload()

    def close(self) -> None:
        self._open.close()

    def _utilisation(self, line: Line) -> Line:
        """Returns the rate of the model's own FLOPs, and its share of what the devices can do."""
        flops, step_s = self._flops_per_step, line.get("step_s")
        rate = None if flops is None or step_s is None else flops / step_s
        share = None if rate is None or self._peak_flops is None else rate / self._peak_flops
        return {"model_flops_per_s": rate, "share_of_peak": share}

    def _add_scalars(self, group: str, line: Line) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                self._events.add_scalar(f"{group}/{name}", value, int(line["step"] or 0))


class LossPlot(Observer):
    """Draws loss.png when a run ends."""

    def __init__(self, model_dir: Path):
        self._model_dir = model_dir

    def close(self) -> None:
        RunPlots(self._model_dir).save(self._model_dir, "loss")
