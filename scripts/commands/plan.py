"""`meshloom plan`: what a run will cost, as tables, JSON and one page."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from configs.errors import UserError
from configs.load import Config
from layouts.cost.collectives import format_mesh
from layouts.cost.interconnect import Slice
from layouts.cost.step_time import Timing
from layouts.layout import Layout
from layouts.lint.warnings import size_text
from layouts.mesh import has_tpu_compiler, make_mesh, mesh_sizes, topology_mesh
from scripts.commands.common import Strings, set_where, settings, warn_unused, write_json
from scripts.commands.plan_page import write_page
from scripts.terminal import print_table, tell
from trainer.checks import check_layout, check_run, layout_name
from trainer.planning.report import as_json
from trainer.planning.savings import advice, smallest_slice
from trainer.planning.training import Plan, compiled, plan, planned, traced
from trainer.run import Run

SHOWN = 12  # collectives in a table
NO_COMPILER = (
    "The TPU compiler is not installed: what fits and how long it takes are estimates from the "
    "layout alone; cycles, memory and collectives of the compiled program are missing.  "
    "Install it: pip install 'meshloom[plan]', or pip install libtpu"
)


class Asked(NamedTuple):
    """What is to be planned: a run under a layout, on a slice or on the devices at hand."""

    config: Config
    run: Run
    layout: Layout
    slice: Slice | None
    sizes: dict[str, int]
    """Of the mesh."""

    @classmethod
    def read(cls, config: Config, slice: Slice | None) -> "Asked":
        run, layout = config.make(Run), config.make(Layout)
        check_run(run)
        return cls(config, run, layout, slice, sizes_on(layout, slice))

    def check(self, run: Run) -> None:
        """Raises every error of the layout with this run; tells the warnings."""
        torus = None if self.slice is None else self.slice.torus
        for warning in check_layout(run, self.layout, self.sizes, set_where(self.config), torus):
            tell(warning)

    @property
    def title(self) -> str:
        where = "" if self.slice is None else f" on {self.slice.name}"
        return f"{layout_name(set_where(self.config))} {format_mesh(self.sizes)}{where}"


def slice_named(topology: str | None) -> Slice | None:
    return None if topology is None else Slice.named(topology)


def plan_run(
    gin_file: Strings,
    gin_param: Strings,
    json_file: str | None,
    html: str | None,
    topology: str | None,
    analytic: bool,
) -> None:
    """Plans one run under one layout."""
    asked = Asked.read(settings(None, gin_file, gin_param), slice_named(topology))
    warn_unused(asked.config, Run, Layout)
    asked.check(asked.run)
    found, title = plan_of(asked, analytic), asked.title
    facts = as_json(found, asked.layout)
    show(found, facts, title)
    if found.fits is False:
        for change in advice(found, asked.layout):
            print(change)
        print(smallest_slice(found))
    write_json(json_file, facts)
    if html is not None:
        write_page(html, title, facts)


def sizes_on(layout: Layout, slice: Slice | None) -> dict[str, int]:
    """Sizes of the mesh, all of the slice's devices used."""
    if slice is None:
        return mesh_sizes(layout.mesh, len(jax.devices()))
    asked = mesh_sizes(layout.mesh, None)
    given = math.prod(size for size in asked.values() if size != -1)
    if slice.devices % given if -1 in asked.values() else given != slice.devices:
        raise UserError(
            f"Layout.mesh = {layout.mesh!r}: its sizes multiply to {given}, and "
            f"--topology={slice.name} has {slice.devices} devices ({slice.chips} chips of "
            f"{slice.chip.cores}).  Legal: sizes that multiply to {slice.devices}, or -1 for one."
        )
    return mesh_sizes(layout.mesh, slice.devices)


def plan_of(asked: Asked, analytic: bool) -> Plan:
    """The best plan that this machine can make; says what is missing in it."""
    mesh = None if analytic else mesh_for(asked)
    if mesh is None:
        return planned(asked.run, asked.layout, asked.sizes, asked.slice)
    step = traced(asked.run, asked.layout, mesh)
    return plan(step, asked.slice, compiled(step))


def mesh_for(asked: Asked) -> Mesh | None:
    """The devices to compile for: absent TPUs, or what this machine has, or none."""
    slice = asked.slice
    if slice is None:
        return make_mesh(asked.layout)
    if has_tpu_compiler():
        tell(f"Compiling for {slice.devices} devices of {slice.name}, which takes minutes.")
        return topology_mesh(slice.name, asked.sizes, asked.layout.order)
    tell(NO_COMPILER)
    return None


def show(found: Plan, facts: dict[str, Any], title: str) -> None:
    """Prints a plan."""
    print(f"Plan: {title}, {found.devices:,} devices, {found.parameters:,} parameters")
    print_table(["memory of a device", "bytes"], [(c, size_text(n)) for c, n in causes(facts)])
    print_table(
        ["largest weights", "axes", "bytes", "of a device"],
        [
            (w["path"], w["axes"], size_text(w["bytes"]), size_text(w["bytes_per_device"]))
            for w in facts["weights"]
        ],
    )
    print_collectives(facts["collectives"], "a step")
    if found.timing is not None:
        print_times("step", found.timing)
    for unexpected in found.unexpected_collectives:
        print(f"Unlike what the layout asks for: {unexpected}.")
    print(summary(facts))


def print_collectives(rows: list[dict[str, Any]], each: str) -> None:
    print_table(
        ["collective", "over", "times", "MB each", f"MB received {each}", "for"],
        [
            (c["kind"], ",".join(c["mesh_axes"]), c["count"], f"{c['bytes'] / 1e6:,.2f}",
             f"{c['received_bytes'] / 1e6:,.1f}", c["source"])
            for c in rows[:SHOWN]
        ],
    )  # fmt: skip


def print_times(what: str, timing: Timing) -> None:
    rows = [(name, f"{s:.4g}", f"{s / timing.step_s:.1%}") for name, s in timing.parts.items()]
    print_table([f"time of a {what}", "s", "share"], rows)


def causes(facts: dict[str, Any]) -> list[tuple[str, int]]:
    rows = [*facts["bytes_by_cause"].items(), ("all", facts["bytes_per_device"])]
    if facts["memory_bytes"] is not None:
        rows.append(("there is", facts["memory_bytes"]))
    return rows


def summary(facts: dict[str, Any]) -> str:
    """A plan in one line."""
    known = {True: "fits", False: "does not fit", None: "memory"}[facts["fits"]]
    parts = [
        f"{known}: {size_text(facts['bytes_per_device'])} a device",
        f"{facts['model_flops']:.3g} FLOPs a step ({facts['executed_flops']:.3g} executed)",
    ]
    received = sum(c["received_bytes"] for c in facts["collectives"])
    parts.append(f"{size_text(received)} of traffic a device")
    if facts["step_time_s"] is not None:
        parts += [
            f"step {facts['step_time_s']:.4g} s",
            f"{facts['tokens_per_s']:,.0f} tokens/s",
            f"utilisation {facts['utilisation']:.1%}",
            f"{facts['run_steps']:,} steps in {facts['run_hours']:,.1f} h, "
            f"{facts['chip_hours']:,.0f} chip-hours",
        ]
    if facts["compile_s"] is not None:
        parts.append(f"compiled in {facts['compile_s']:.0f} s")
    return "; ".join(parts) + "."
