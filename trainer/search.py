"""The layout under which a run is the fastest, of those that fit."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import absent_mesh, batch_pieces, mesh_sizes
from layouts.search import candidates
from layouts.torus import Slice
from trainer.checks import record_loss
from trainer.plan import Plan, compiled, plan, planned, traced
from trainer.run import Run

Report = Callable[[str], None]


class Ranked(NamedTuple):
    """A layout and what it costs."""

    layout: Layout
    plan: Plan

    @property
    def step_s(self) -> float:
        assert self.plan.step_s is not None
        return self.plan.step_s


def ranked(run: Run, slice: Slice, report: Report) -> list[Ranked]:
    """Every legal layout, those that fit first, the fastest first, by their traces."""
    found = []
    for layout in legal(run, slice.devices):
        own = Ranked(layout, planned(run, layout, mesh_sizes(layout.mesh, slice.devices), slice))
        found.append(own)
        report(f"{named(layout)}: {own.step_s:.4g} s")
    if not found:
        raise UserError(
            f"--topology={slice.name}: no layout splits this model and batch over {slice.devices} "
            "devices.  Choose a slice or a Run.batch_sequences that divides more ways."
        )
    return ordered(found)


def legal(run: Run, devices: int) -> Iterator[Layout]:
    """Layouts under which every microbatch divides as well."""
    rows = run.batch_sequences // run.microbatches
    for layout in candidates(record_loss(run), devices):
        if rows % batch_pieces(layout, mesh_sizes(layout.mesh, devices)) == 0:
            yield layout


def ordered(found: Iterable[Ranked]) -> list[Ranked]:
    return sorted(found, key=lambda own: (not own.plan.fits, own.step_s))


def verified(run: Run, slice: Slice, best: Iterable[Ranked], report: Report) -> list[Ranked]:
    """The same layouts in the order of their compiled steps."""
    found = []
    for layout, _ in best:
        step = traced(run, layout, absent_mesh(slice.name, mesh_sizes(layout.mesh, slice.devices)))
        own = Ranked(layout, plan(step, slice, compiled(step)))
        found.append(own)
        report(f"{named(layout)}: {own.step_s:.4g} s compiled")
    return ordered(found)


def named(layout: Layout) -> str:
    """A layout in one line."""
    return " | ".join(part for part in (layout.mesh, layout.rules, layout.param_rules) if part)
