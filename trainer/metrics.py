"""Where a run's numbers go: metrics.jsonl, TensorBoard events, a picture of the loss."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from data.storage import atomic_write
from trainer.evaluate import Part
from trainer.expert_load import Layer, scalars
from trainer.jsonl import read_lines
from trainer.plots import Pictures

Line = dict[str, float | None]


class MetricsFile:
    """A file of one JSON object a line, each with its step."""

    def __init__(self, path: Path, first_step: int):
        """Opens the file; lines after `first_step`, left by a killed run, are dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if line["step"] <= first_step]
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


class Writers:
    """All places at once.  Only the first process of a run writes."""

    def __init__(self, model_dir: Path, first_step: int, *, writes: bool = True):
        self._model_dir = model_dir
        self._writes = writes
        if writes:
            from tensorboardX import SummaryWriter  # imports PyTorch where there is one: seconds

            self._train = MetricsFile(model_dir / "metrics.jsonl", first_step)
            self._evaluations = MetricsFile(model_dir / "evaluations.jsonl", first_step)
            self._events = SummaryWriter(
                str(model_dir / "events"), purge_step=first_step or None, flush_secs=10
            )

    def plan(self, facts: Mapping[str, Any]) -> None:
        """Keeps what is known of a step before the first of them runs."""
        if self._writes:
            atomic_write(self._model_dir / "plan.json", json.dumps(facts, indent=2) + "\n")

    def train(self, line: Line, layers: dict[str, Layer] | None = None) -> None:
        """Writes a step's numbers; those of layers with experts go under "experts"."""
        if self._writes:
            self._train.write({**line, "experts": layers} if layers else line)
            self._add_scalars("train", line)
            self._add_scalars("experts", {"step": line["step"], **scalars(layers or {})})

    def evaluation(self, line: Line, parts: dict[str, Part] | None = None) -> None:
        """Writes an evaluation's numbers; those of a mixture's parts go under "parts"."""
        if self._writes:
            own = {name: part._asdict() for name, part in (parts or {}).items()}
            self._evaluations.write({**line, "parts": own} if own else line)
            self._add_scalars("validation", line)
            losses: Line = {name: part.loss for name, part in (parts or {}).items()}
            self._add_scalars("validation_loss", {"step": line["step"], **losses})

    def _add_scalars(self, group: str, line: Line) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                self._events.add_scalar(f"{group}/{name}", value, int(line["step"] or 0))

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writes:
            self._train.close()
            self._evaluations.close()
            self._events.close()
            Pictures(self._model_dir).save(self._model_dir, "loss")
