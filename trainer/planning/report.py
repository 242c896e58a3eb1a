"""Lists a plan's figures under stable names, and predicts the cost of a compiled step."""

import json
import linecache
import logging
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from configs.imports import CHECKOUT
from data.storage.files import atomic_write
from layouts.cost.collectives import Collective, heaviest, size_text
from layouts.cost.interconnect import Topology
from layouts.cost.step_time import seconds
from layouts.hlo.compilation import text_of
from layouts.layout import Layout
from layouts.lint.report import table
from models.decoding.sampling import Sampling
from trainer.checkpoints.interval import HOUR_S
from trainer.observers import CompiledStep, Observer, Outcome
from trainer.planning import training
from trainer.planning.breakdown import longest_other, part_of, time_by_part
from trainer.planning.counts import Compilation, excess_flops
from trainer.planning.decoding import DecodePlan
from trainer.planning.run_cost import ASSUMED, Assumptions, run_cost
from trainer.planning.training import StepPlan

logger = logging.getLogger(__name__)
MAX_WEIGHTS = 12  # in a list of the largest
SCHEMA_VERSION = 2
"""Increases when a key, a unit or a meaning changes, but not for new keys."""


class Figure(NamedTuple):
    """Describes a figure of a plan."""

    label: str
    meaning: str
    unit: str = ""
    """One of bytes, s, hours, chip-hours, FLOPs, tokens/s, share; empty for counts and names."""
    null: str = ""
    """The meaning of null."""


FIGURES = {
    key: Figure(**figure)
    for key, figure in tomllib.loads(Path(__file__).with_name("figures.toml").read_text()).items()
}


def as_json(
    plan: StepPlan, assumed: Assumptions = ASSUMED, price: float | None = None
) -> dict[str, Any]:
    """Lists every figure of a training plan; None if it is not known."""
    step_s, topology, timing = plan.step_s, plan.topology, plan.timing
    steps = plan.run.steps
    hours = None if step_s is None or steps is None else step_s * steps / HOUR_S
    traffic = collectives(plan, plan.work.collectives)
    listed = ("path", "axes", "bytes", "bytes_per_device")
    weights = sorted(table(plan.weights, plan.layout, plan.mesh), key=lambda w: -w.bytes_per_device)
    return {
        **common_figures(plan),
        "attention": dict(plan.attention),
        "gradient_sums": None if plan.gradient_sums is None else dict(plan.gradient_sums),
        "host_bytes": plan.work.host_bytes,
        "microbatches": plan.run.microbatches,
        "stages": plan.schedule.stages,
        "pipeline_repeats": plan.schedule.repeats,
        "bubble": plan.schedule.bubble,
        "idle_s": plan.idle_s,
        "collectives": traffic,
        "step_time_s": step_s,
        "step_time_range_s": timing.range_s if timing and topology and topology.is_gpu else None,
        "step_time_parts_s": None if timing is None else timing.parts,
        "step_time_by_part": time_by_part(plan, traffic),
        "longest_other": longest_other(plan),
        "unit": plan.run.task.unit,
        "tokens_per_step": plan.tokens_per_step,
        "tokens_per_s": None if step_s is None else plan.tokens_per_step / step_s,
        "utilisation": plan.utilisation,
        "utilisation_full_attention": plan.utilisation_full_attention,
        "run_steps": steps,
        "run_hours": hours,
        "chip_hours": None if hours is None or topology is None else hours * topology.chips,
        "run_cost": run_cost(plan, assumed, price),
        "weights": [{name: getattr(w, name) for name in listed} for w in weights[:MAX_WEIGHTS]],
    }


def decode_as_json(plan: DecodePlan) -> dict[str, Any]:
    """Lists every figure of a decoding plan; None if it is not known."""
    shape, timings = plan.step.shape, plan.timings
    search, work = shape.search, plan.work
    latencies = dict[str, Any]()
    for name, timing in zip(("start", "token", "suffix"), timings or (None,) * 3, strict=True):
        latencies[f"{name}_latency_s"] = timing and timing.step_s
        latencies[f"{name}_parts_s"] = timing and timing.parts
    parts = {"token": work.token, "start": work.prefill, "suffix": work.suffix}
    return {
        **common_figures(plan),
        "batch_sequences": shape.rows,
        "source_tokens": shape.source_tokens,
        "prompt_tokens": shape.prompt_tokens,
        "new_tokens": shape.new_tokens,
        "suffix_tokens": shape.suffix_tokens,
        "hypotheses": search.width,
        "flat": search.flat,
        "draws": isinstance(search, Sampling) and search.temperature > 0,
        "cache_bytes": plan.cache_bytes,
        "collectives": [
            {"part": name, **row}
            for name, part in parts.items()
            if part is not None
            for row in collectives(plan, part.collectives)
        ],
        "read_bytes_per_token": work.token.read_bytes,
        **latencies,
        "output_latency_s": plan.output_s,
        "tokens_per_s": plan.tokens_per_s,
    }


def common_figures(plan: StepPlan | DecodePlan) -> dict[str, Any]:
    """Lists the figures that training and decoding have in common."""
    topology, memory = plan.topology, plan.memory
    return {
        "schema_version": SCHEMA_VERSION,
        "topology": None if topology is None else topology.name,
        "devices": plan.devices,
        "mesh": dict(plan.mesh),
        "compiled_for": memory.compiled_for,
        "compile_s": memory.compile_s,
        "fits": plan.fits,
        "bytes_per_device": memory.needed_bytes,
        "memory_bytes": None if topology is None else topology.chip.memory_bytes,
        "bytes_by_cause": dict(memory.bytes_by_cause),
        "parameters": plan.parameters,
        "model_flops": plan.model_flops,
        "executed_flops": plan.executed_flops,
        "excess_flops": excess_flops(plan.executed_flops, plan.traced_flops),
        "unexpected_collectives": [*plan.unexpected_collectives],
    }


def collectives(plan: StepPlan | DecodePlan, counted: Iterable[Collective]) -> list[dict[str, Any]]:
    """Lists all collectives, starting with the most received bytes per device."""
    if isinstance(plan, StepPlan):
        paths = [weight.path for weight in plan.weights]
    else:
        paths = [*plan.step.run.model.model(Layout(rules="")).weights()]
    rows, names = [], {path.rpartition("/")[2] for path in paths}
    for collective in heaviest(counted):
        row = {
            "kind": collective.kind,
            "mesh_axes": list(collective.mesh_axes),
            "count": collective.times,
            "bytes": collective.bytes,
            "received_bytes": round(collective.received_bytes),
            "overlaps": collective.overlaps,
            "source": collective.source,
            "model_part": part_of(collective.scopes),
            "weight": weight_on(collective.source, names),
        }
        if plan.device_coords is not None and plan.topology is not None:
            time_s = seconds(plan.topology, plan.device_coords, plan.mesh, collective)
            row["seconds"] = collective.times * time_s
        rows.append(row)
    return rows


def weight_on(source: str, names: Collection[str]) -> str:
    """Returns the first weight that a line, such as "models/parts.py:95", names; else ''."""
    match = re.match(r"(.+):(\d+)", source)
    line = linecache.getline(str(CHECKOUT / match[1]), int(match[2])) if match else ""
    return next(filter(names.__contains__, re.findall(r"\w+", line)), "")


def by_line(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums the collectives of the same kind and mesh axes for the same line of the model.

    The slowest come first or, if no times are known, those that receive the most bytes.
    """
    sums: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        names = ("kind", "mesh_axes", "source", "weight", "overlaps", "model_part", "part")
        key = tuple(str(row.get(name)) for name in names)
        total = sums.setdefault(key, {**row, "count": 0, "received_bytes": 0, "seconds": 0.0})
        for name in ("count", "received_bytes", "seconds"):
            total[name] += row.get(name, 0)
    return sorted(sums.values(), key=lambda row: (-row["seconds"], -row["received_bytes"]))


class CostPrediction(Observer):
    """Predicts the cost of a step before the first one runs, and compares the time at the end.

    Writes the prediction to plan.json in the model directory.
    """

    def __init__(self, model_dir: Path):
        self._file = model_dir / "plan.json"
        self._step_s: float | None = None

    def on_compiled(self, compiled: CompiledStep) -> None:
        plan, text = predict(compiled)
        self._step_s = plan.step_s
        logger.info(text)
        if jax.process_index() == 0:
            atomic_write(self._file, json.dumps(as_json(plan), indent=2) + "\n")

    def on_end(self, outcome: Outcome) -> None:
        if outcome.step_s is not None:
            logger.info(compare(outcome.step_s, self._step_s))


def predict(compiled: CompiledStep) -> tuple[StepPlan, str]:
    """Reads memory, FLOPs and traffic from the compiled program; on TPUs, predicts its time.

    Returns the predicted cost of a step in numbers, and in one or two lines.
    """
    c, mesh = compiled, compiled.mesh
    step = training.TracedStep(c.run, c.layout, mesh, c.traced, c.state, c.batch)
    try:
        text, how_counted = text_of(c.executable), ""
        compilation = Compilation(c.executable, text, step.platform, c.compile_s)
        counted = training.count_step(step, compilation)
    except Exception as error:  # a newer compiler's text may not parse: training continues
        counted = training.estimate_step(step)
        how_counted = f"  Counted from its trace, because its text cannot be read: {error!r}."
    topology = Topology.of(mesh.devices) if step.platform == "TPU" else None
    plan = training.plan_step(step, topology, counted)
    return plan, summary(plan, how_counted)


def summary(plan: training.StepPlan, how_counted: str = "") -> str:
    """Describes memory, FLOPs and traffic of a step in a line, and any known time in another."""
    causes = sorted(plan.memory.bytes_by_cause.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in causes if size)
    received = sum(collective.received_bytes for collective in plan.work.collectives)
    text = (
        f"Step: {size_text(plan.memory.needed_bytes)} per device ({parts}), "
        f"{size_text(plan.executed_flops, 'FLOPs')} "
        f"(of the model: {size_text(plan.model_flops, 'FLOPs')}), "
        f"{size_text(received)} of traffic per device.{how_counted}"
    )
    if plan.step_s is None or plan.topology is None:
        return text
    return (
        f"{text}\nPredicted step time: {plan.step_s:.3g} s, from the compiler's cycles and links "
        f"of {plan.topology.name}, at published rates."
    )


def compare(step_s: float, predicted_s: float | None) -> str:
    """Compares the measured time of steps with the prediction."""
    if predicted_s is None:
        return f"Step time: {step_s:.3g} s."
    error = step_s / predicted_s - 1
    return f"Step time: {step_s:.3g} s measured, {predicted_s:.3g} s predicted ({error:+.0%})."
