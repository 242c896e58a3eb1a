"""A plan's figures by stable names, for files and tables."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from layouts.cost.collectives import Collective, heaviest
from layouts.cost.interconnect import Slice
from layouts.cost.step_time import seconds
from layouts.layout import Layout
from layouts.lint.report import table
from trainer.planning.training import Plan

SHOWN = 12  # weights
HOUR_S = 3600


def as_json(found: Plan, layout: Layout) -> dict[str, Any]:
    """Every figure of a plan by a stable name; None where it is not known."""
    step_s, slice = found.step_s, found.slice
    hours = None if step_s is None else step_s * found.run.steps / HOUR_S
    weights = table(found.weights, layout, found.mesh)
    weights.sort(key=lambda row: -row.bytes_per_device)
    return {
        "topology": None if slice is None else slice.name,
        "devices": found.devices,
        "mesh": dict(found.mesh),
        "compiled_for": found.counted.compiled_for,
        "fits": found.fits,
        "bytes_per_device": found.counted.needed_bytes,
        "memory_bytes": None if slice is None else slice.chip.memory_bytes,
        "bytes_by_cause": dict(found.counted.bytes_by_cause),
        "parameters": found.parameters,
        "model_flops": found.model_flops,
        "executed_flops": found.executed_flops,
        "collectives": collectives(found.counted.collectives, slice, found.places, found.mesh),
        "unexpected_collectives": [str(unexpected) for unexpected in found.unexpected_collectives],
        "step_time_s": step_s,
        "step_time_parts_s": None if found.timing is None else found.timing.parts,
        "tokens_per_step": found.tokens_per_step,
        "tokens_per_s": None if step_s is None else found.tokens_per_step / step_s,
        "utilisation": found.utilisation,
        "run_steps": found.run.steps,
        "run_hours": hours,
        "chip_hours": None if hours is None or slice is None else hours * slice.chips,
        "compile_s": found.counted.compile_s,
        "weights": [
            {"path": row.path, "axes": row.axes, "bytes": row.bytes,
             "bytes_per_device": row.bytes_per_device}
            for row in weights[:SHOWN]
        ],
    }  # fmt: skip


def collectives(
    counted: Iterable[Collective],
    slice: Slice | None,
    places: np.ndarray | None,
    mesh: Mapping[str, int],
) -> list[dict[str, Any]]:
    """All collectives, what a device receives the most of first."""
    rows = []
    for own in heaviest(counted):
        row = {
            "kind": own.kind,
            "mesh_axes": list(own.mesh_axes),
            "count": own.times,
            "bytes": own.bytes,
            "received_bytes": round(own.received_bytes),
            "overlaps": own.overlaps,
            "source": own.source,
        }
        if places is not None and slice is not None:
            row["seconds"] = own.times * seconds(slice, places, mesh, own)
        rows.append(row)
    return rows
