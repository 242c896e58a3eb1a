"""Predicts the cost of a training step from its compiled program."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import jax

from data.storage.files import atomic_write
from layouts.cost.collectives import size_text
from layouts.cost.interconnect import Topology
from trainer.observers import CompiledStep, Observer, Outcome
from trainer.planning import training
from trainer.planning.counts import Compilation
from trainer.planning.report import as_json, scaled

logger = logging.getLogger(__name__)


class CostPrediction(Observer):
    """Predicts the cost of a step before the first one runs, and compares its time at the end.

    Keeps the prediction as plan.json in the model directory.
    """

    def __init__(self, model_dir: Path):
        self._file = model_dir / "plan.json"
        self._step_s: float | None = None

    def on_compiled(self, compiled: CompiledStep) -> None:
        prediction = predict(compiled)
        self._step_s = prediction.plan.step_s
        logger.info(prediction.summary)
        if jax.process_index() == 0:
            text = json.dumps(as_json(prediction.plan, compiled.layout), indent=2)
            atomic_write(self._file, text + "\n")

    def on_end(self, outcome: Outcome) -> None:
        if outcome.step_s is not None:
            logger.info(compare(outcome.step_s, self._step_s))


class Prediction(NamedTuple):
    """Holds the predicted cost of a step, in numbers and in one or two lines."""

    plan: training.StepPlan
    summary: str


def predict(compiled: CompiledStep) -> Prediction:
    """Reads the compiled program for its memory, FLOPs and traffic; on TPUs, predicts its time."""
    c, mesh = compiled, compiled.mesh
    step = training.TracedStep(c.run, c.layout, mesh, c.traced, c.state, c.batch)
    counted, how_counted = count(step, c.executable, c.compile_s)
    topology = Topology.of(mesh.devices) if step.platform == "TPU" else None
    plan = training.plan_step(step, topology, counted)
    return Prediction(plan, summary(plan, how_counted))


def count(
    step: training.TracedStep, executable: object, compile_s: float
) -> tuple[training.StepCounts, str]:
    """Counts what is in an executable; from its trace if the text is of a newer compiler."""
    try:
        return training.count_step(step, Compilation.read(executable, step.platform, compile_s)), ""
    except Exception as error:  # training goes on without a prediction
        reason = f"  Counted from its trace, because its text cannot be read: {error!r}."
        return training.estimate_step(step), reason


def summary(plan: training.StepPlan, how_counted: str = "") -> str:
    """Returns memory, FLOPs and traffic of a step in a line, and its time, if known, in another."""
    causes = sorted(plan.memory.bytes_by_cause.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in causes if size)
    received = sum(collective.received_bytes for collective in plan.work.collectives)
    text = (
        f"Step: {size_text(plan.memory.needed_bytes)} per device ({parts}), "
        f"{scaled(plan.executed_flops, 'FLOPs')} "
        f"(of the model: {scaled(plan.model_flops, 'FLOPs')}), "
        f"{size_text(received)} of traffic per device.{how_counted}"
    )
    if plan.step_s is None or plan.topology is None:
        return text
    return (
        f"{text}\nPredicted step time: {plan.step_s:.3g} s, from the compiler's cycles and links "
        f"of {plan.topology.name}, at published rates."
    )


def compare(step_s: float, predicted_s: float | None) -> str:
    """Returns how long steps took and what was predicted."""
    if predicted_s is None:
        return f"Step time: {step_s:.3g} s."
    error = step_s / predicted_s - 1
    return f"Step time: {step_s:.3g} s measured, {predicted_s:.3g} s predicted ({error:+.0%})."
