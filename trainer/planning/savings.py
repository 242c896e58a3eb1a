"""What would make a run fit, by tracing each change: the bytes it saves and the time it costs."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from layouts.layout import Layout
from layouts.mesh import batch_shards
from models.initializers import Precision
from models.transformer import Transformer
from trainer.planning.training import Plan, planned
from trainer.run import Run

GB = 1e9


class Change(NamedTuple):
    """A setting that saves memory, by estimates from a trace."""

    setting: str
    saved_bytes: int
    slower: float  # of the step's time; 0 where it costs nothing

    def __str__(self) -> str:
        cost = f"{self.slower:+.0%} step time" if abs(self.slower) > 0.005 else "no time"
        return f"{self.setting} saves about {self.saved_bytes / GB:,.2f} GB a device, for {cost}."


def advice(found: Plan, layout: Layout) -> list[Change]:
    """Changes that save memory, the most first."""
    base = planned(found.run, layout, dict(found.mesh), found.slice)
    listed = []
    pieces = batch_shards(layout, found.mesh)
    for setting, run in changes(found.run):
        if run.batch_sequences // run.microbatches % pieces:
            continue
        other = planned(run, layout, dict(found.mesh), found.slice)
        saved = base.counted.needed_bytes - other.counted.needed_bytes
        if saved > 0:
            slower = other.step_s / base.step_s - 1 if other.step_s and base.step_s else 0.0
            listed.append(Change(setting, saved, slower))
    return sorted(listed, key=lambda change: -change.saved_bytes)


def smallest_slice(found: Plan) -> str:
    """How many devices of this kind would hold it at the least, if all could be split evenly."""
    assert found.slice is not None
    slice, need = found.slice, found.counted.needed_bytes * found.devices
    side = math.ceil((need / slice.chip.memory_bytes / slice.chip.cores) ** (1 / slice.chip.axes))
    extent = 2 ** max(0, (side - 1).bit_length())
    name = f"{slice.kind}:" + "x".join([str(extent)] * slice.chip.axes)
    devices = math.ceil(need / slice.chip.memory_bytes)
    return f"Split evenly it would need at least {devices:,} devices: try --topology={name}."


def changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Settings that may save memory, and the run with each."""
    model = run.model
    for count in (2 * run.microbatches, 4 * run.microbatches):
        if run.batch_sequences % count == 0:
            yield f"Run.microbatches = {count}", dataclasses.replace(run, microbatches=count)
    if not isinstance(model, Transformer):
        return

    def having(**settings: Any) -> Run:
        return dataclasses.replace(run, model=dataclasses.replace(model, **settings))

    if model.remat != "full":
        yield 'Transformer.remat = "full"', having(remat="full")
    if model.loss_chunks == 1:
        yield "Transformer.loss_chunks = 8", having(loss_chunks=8)
    if model.precision.compute == "float32":
        own = dataclasses.replace(model.precision, compute="bfloat16")
        yield 'Precision.compute = "bfloat16"', having(precision=own)
    if model.precision.store == "float32":
        own = Precision(store="bfloat16", compute=model.precision.compute)
        yield 'Precision.store = "bfloat16"', having(precision=own)
