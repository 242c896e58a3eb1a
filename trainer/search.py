"""The layout under which a run is the fastest, of those that fit."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import absent_mesh, batch_pieces, mesh_sizes
from layouts.order import orders
from layouts.search import candidates
from layouts.torus import Slice
from trainer.checks import record_loss
from trainer.plan import Plan, compiled, plan, planned, reordered, traced
from trainer.run import Run

Report = Callable[[str], None]
MATTERS = 0.005  # of a step: a smaller gain is not worth an order in the file


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
        own = planned(run, layout, mesh_sizes(layout.mesh, slice.devices), slice)
        found.append(best_order(Ranked(layout, own)))
        report(f"{named(found[-1].layout)}: {found[-1].step_s:.4g} s")
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


def best_order(found: Ranked) -> Ranked:
    """The same with the order of devices under which it is the fastest, if that matters."""
    layout, own = found
    assert own.slice is not None
    default = Ranked(dataclasses.replace(layout, order=None), reordered(own, None))
    others = [
        Ranked(dataclasses.replace(layout, order=order), reordered(own, order))
        for order in orders(own.mesh, own.slice.torus)
    ]
    best = min(others, key=lambda other: other.step_s, default=default)
    return best if best.step_s < (1 - MATTERS) * default.step_s else default


def ordered(found: Iterable[Ranked]) -> list[Ranked]:
    return sorted(found, key=lambda own: (not own.plan.fits, own.step_s))


def verified(run: Run, slice: Slice, best: Iterable[Ranked], report: Report) -> list[Ranked]:
    """The same layouts in the order of their compiled steps."""
    found = []
    for layout, _ in best:
        sizes = mesh_sizes(layout.mesh, slice.devices)
        step = traced(run, layout, absent_mesh(slice.name, sizes, layout.order))
        own = best_order(Ranked(layout, plan(step, slice, compiled(step))))
        found.append(own)
        report(f"{named(own.layout)}: {own.step_s:.4g} s compiled")
    return ordered(found)


def named(layout: Layout) -> str:
    """A layout in one line."""
    order = "" if layout.order is None else f"order {layout.order}"
    written = (layout.mesh, layout.rules, layout.param_rules, order)
    return " | ".join(part for part in written if part)
