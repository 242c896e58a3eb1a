"""Finds settings with which a run needs less memory, and what each costs in time."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from layouts.candidates import candidates
from layouts.cost.interconnect import offered_slices
from layouts.layout import Layout
from layouts.mesh import batch_shards
from models.precision import Precision
from models.transformer import Transformer
from trainer.checks import record_loss
from trainer.planning.search import legal_layouts
from trainer.planning.training import StepPlan, plan_from_trace
from trainer.run import Run

GB = 1e9


class MemorySaving(NamedTuple):
    """Holds how much memory a setting saves, by estimates from a trace."""

    setting: str
    saved_bytes: int
    slower: float  # of the step's time; 0 where it costs nothing

    def __str__(self) -> str:
        cost = f"{self.slower:+.0%} step time" if abs(self.slower) > 0.005 else "no time"
        return f"{self.setting} saves about {self.saved_bytes / GB:,.2f} GB per device, for {cost}."


def memory_savings(plan: StepPlan, layout: Layout) -> list[MemorySaving]:
    """Lists settings that save memory, the largest saving first."""
    base = plan_from_trace(plan.run, layout, dict(plan.mesh), plan.topology)
    savings = []
    shards = batch_shards(layout, plan.mesh)
    for setting, run in variants(plan.run):
        if run.batch_sequences // run.microbatches % shards:
            continue
        other = plan_from_trace(run, layout, dict(plan.mesh), plan.topology)
        saved_bytes = base.memory.needed_bytes - other.memory.needed_bytes
        if saved_bytes > 0:
            slower = other.step_s / base.step_s - 1 if other.step_s and base.step_s else 0.0
            savings.append(MemorySaving(setting, saved_bytes, slower))
    return sorted(savings, key=lambda saving: -saving.saved_bytes)


def suggest_slice(plan: StepPlan) -> str:
    """Names the smallest slice of these chips that holds the run, if all of it splits evenly.

    Some layout splits batch and model over its devices.
    """
    assert plan.topology is not None
    run, topology, all_bytes = plan.run, plan.topology, plan.memory.needed_bytes * plan.devices
    devices = math.ceil(all_bytes / topology.chip.memory_bytes)
    needed = f"Split evenly, it needs at least {devices:,} devices"
    *_, largest = offered = offered_slices(topology.kind)
    if devices > largest.devices:
        return f"{needed}; the largest slice, {largest.name}, has {largest.devices:,}."
    record = record_loss(run)
    for other in offered:
        if other.devices >= devices and legal_layouts(
            run, other.devices, candidates(record, other.devices)
        ):
            return f"{needed}: try --topology={other.name}."
    return f"{needed}; no slice of that size divides batch and model."


def variants(run: Run) -> Iterator[tuple[str, Run]]:
    """Yields settings that may save memory, and the run with each."""
    model = run.model
    for count in (2 * run.microbatches, 4 * run.microbatches):
        if run.batch_sequences % count == 0:
            yield f"Run.microbatches = {count}", dataclasses.replace(run, microbatches=count)
    if not isinstance(model, Transformer):
        return

    def with_model(**settings: Any) -> Run:
        return dataclasses.replace(run, model=dataclasses.replace(model, **settings))

    if model.remat != "full":
        yield 'Transformer.remat = "full"', with_model(remat="full")
    if model.loss_chunks == 1:
        yield "Transformer.loss_chunks = 8", with_model(loss_chunks=8)
    if model.precision.compute == "float32":
        precision = dataclasses.replace(model.precision, compute="bfloat16")
        yield 'Precision.compute = "bfloat16"', with_model(precision=precision)
    if model.precision.store == "float32":
        precision = Precision(store="bfloat16", compute=model.precision.compute)
        yield 'Precision.store = "bfloat16"', with_model(precision=precision)
