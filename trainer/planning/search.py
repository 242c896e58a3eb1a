"""The layout under which a run is the fastest, of those that fit."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from configs.errors import UserError
from layouts.candidates import candidates, widened
from layouts.cost.calibration import HostRates
from layouts.cost.interconnect import Slice
from layouts.device_order import orders
from layouts.layout import Layout
from layouts.lint.report import table
from layouts.lint.warnings import executed_flops
from layouts.mesh import batch_shards, make_mesh, mesh_sizes, topology_mesh
from trainer.checks import record_loss
from trainer.planning.step_benchmark import Trial, median_s, slowness, take_turns
from trainer.planning.training import Plan, compiled, plan, planned, planned_here, reordered, traced
from trainer.run import Run

Report = Callable[[str], None]
Ground = Slice | HostRates  # what a run is to be fast on
MATTERS = 0.005  # of a step: a smaller gain is not worth an order in the file
ROUNDS = 5  # of steps of layouts that take turns


class Ranked(NamedTuple):
    """A layout and what it costs."""

    layout: Layout
    plan: Plan
    measured_s: float | None = None
    """Of a step that was run."""

    @property
    def how(self) -> str:
        """What the time of a step is known by."""
        if self.measured_s is not None:
            return "steps"
        return "trace" if self.plan.counted.compiled_for is None else "compiler"

    @property
    def step_s(self) -> float:
        if self.measured_s is not None:
            return self.measured_s
        assert self.plan.step_s is not None
        return self.plan.step_s


def ranked(run: Run, ground: Ground, report: Report) -> list[Ranked]:
    """Legal layouts, those that fit first, the fastest first, by their traces.

    Left out are those that cannot be the best: where products alone take longer than all of a step
    that fits.  On a third mesh axis only the best is tried.
    """
    seen, devices = record_loss(run), ground.devices
    layouts = legal(run, devices, candidates(seen, devices))
    if not layouts:
        raise UserError(
            f"no layout splits this model and batch over {devices} devices.  Choose other devices, "
            "or a Run.batch_sequences that divides more ways."
        )
    found = costs(run, roomy(run, layouts, ground), ground, report, [])
    wider = legal(run, devices, widened(seen, ordered(found)[0].layout))
    return ordered(costs(run, roomy(run, wider, ground), ground, report, found))


def costs(
    run: Run, layouts: list[Layout], ground: Ground, report: Report, before: list[Ranked]
) -> list[Ranked]:
    """What each layout costs by its trace, after those before it."""
    found = list(before)
    fitting = [own.step_s for own in found if own.plan.fits is not False]
    for number, (least_s, layout) in enumerate(by_products(run, layouts, ground), 1):
        if least_s > min(fitting, default=math.inf):
            report(f"the other {len(layouts) - number + 1} multiply for more than {least_s:.4g} s")
            break
        own = Ranked(layout, cost(run, layout, ground))
        own = best_order(own) if isinstance(ground, Slice) else own
        found.append(own)
        fitting += [own.step_s] * (own.plan.fits is not False)
        report(f"{number} of {len(layouts)}: {named(own.layout)}: {own.step_s:.4g} s")
    return found


def by_products(run: Run, layouts: list[Layout], ground: Ground) -> list[tuple[float, Layout]]:
    """Layouts by the seconds that a device multiplies at the least, the fewest first."""
    seen, times = record_loss(run), 3 * run.microbatches  # the backward pass costs twice as much

    def least_s(layout: Layout) -> float:
        sizes = mesh_sizes(layout.mesh, ground.devices)
        flops = times * executed_flops(layout, sizes, seen)
        if isinstance(ground, HostRates):
            return flops * ground.devices / ground.flops_per_s
        return flops / ground.chip.peak_flops

    return sorted(((least_s(own), own) for own in layouts), key=lambda pair: pair[0])


def cost(run: Run, layout: Layout, ground: Ground) -> Plan:
    if isinstance(ground, HostRates):
        return planned_here(run, layout, make_mesh(layout), ground)
    return planned(run, layout, mesh_sizes(layout.mesh, ground.devices), ground)


def legal(run: Run, devices: int, layouts: Iterable[Layout]) -> list[Layout]:
    """Layouts under which every microbatch divides as well, in an order that stays."""
    rows = run.batch_sequences // run.microbatches
    fitting = (
        layout
        for layout in layouts
        if rows % batch_shards(layout, mesh_sizes(layout.mesh, devices)) == 0
    )
    return sorted(fitting, key=named)


def roomy(run: Run, layouts: list[Layout], ground: Ground) -> list[Layout]:
    """Those whose weights and gradients alone are not too large; if none, the least of all."""
    if isinstance(ground, HostRates) or not layouts:
        return layouts
    weights = record_loss(run).weights

    def least_bytes(layout: Layout) -> int:
        rows = table(weights, layout, mesh_sizes(layout.mesh, ground.devices))
        return 2 * sum(row.bytes_per_device for row in rows)

    room = max(ground.chip.memory_bytes, min(map(least_bytes, layouts)))
    return [layout for layout in layouts if least_bytes(layout) <= room]


def best_order(found: Ranked) -> Ranked:
    """The same with the order of devices under which it is fast, the simplest of such orders."""
    layout, own = found.layout, found.plan
    assert own.slice is not None
    tried = [
        Ranked(dataclasses.replace(layout, order=order), reordered(own, order))
        for order in (None, *orders(own.mesh, own.slice.torus))
    ]
    least_s = min(other.step_s for other in tried)
    return next(other for other in tried if other.step_s <= (1 + MATTERS) * least_s)


def ordered(found: Iterable[Ranked]) -> list[Ranked]:
    """Those that fit, or may, first."""
    return sorted(found, key=lambda own: (own.plan.fits is False, own.step_s))


def rehearsed(run: Run, best: Iterable[Ranked], report: Report) -> list[Ranked]:
    """The same layouts in the order of their steps on the devices at hand."""
    found = list(best)
    trials = {}
    for own in found:
        report(f"{named(own.layout)}: compiling")
        trials[named(own.layout)] = Trial(run, own.layout)
    turns = take_turns(trials, ROUNDS)
    timed = [own._replace(measured_s=median_s(turns, named(own.layout))) for own in found]
    return sorted(timed, key=lambda own: slowness(turns, named(own.layout)))


def verified(
    run: Run, slice: Slice, best: Iterable[Ranked], count: int, report: Report
) -> list[Ranked]:
    """So many of the first, and more until one fits, in the order of their compiled steps."""
    found: list[Ranked] = []
    for layout in (own.layout for own in best):
        if len(found) >= count and any(own.plan.fits for own in found):
            break
        sizes = mesh_sizes(layout.mesh, slice.devices)
        step = traced(run, layout, topology_mesh(slice.name, sizes, layout.order))
        own = best_order(Ranked(layout, plan(step, slice, compiled(step))))
        found.append(own)
        report(f"{named(own.layout)}: {own.step_s:.4g} s compiled")
    return ordered(found)


def named(layout: Layout) -> str:
    """A layout in one line."""
    order = "" if layout.order is None else f"order {layout.order}"
    written = (layout.mesh, layout.rules, layout.param_rules, order)
    return " | ".join(part for part in written if part)
