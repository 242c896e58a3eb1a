"""`meshloom plan`: what a run will cost, as tables, JSON and one page."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from configs.errors import UserError
from layouts.inefficient import size_text
from layouts.layout import Layout
from layouts.mesh import absent_mesh, has_tpu_compiler, make_mesh, mesh_sizes
from layouts.timing import Timing
from layouts.torus import Slice
from layouts.traffic import mesh_of
from scripts.commands import Strings, set_where, settings, warn_unused, write_json
from scripts.page import write_page
from scripts.terminal import print_table, tell
from trainer.advice import advice, smallest_slice
from trainer.checks import check_layout, check_run, layout_name
from trainer.plan import Plan, compiled, plan, planned, traced
from trainer.plan_facts import as_json
from trainer.run import Run

SHOWN = 12  # collectives in a table
NO_COMPILER = (
    "The TPU compiler is not installed: what fits and how long it takes are estimates from the "
    "layout alone; cycles, memory and collectives of the compiled program are missing.  "
    "Install it: pip install 'meshloom[plan]', or pip install libtpu"
)


def plan_run(
    gin_file: Strings,
    gin_param: Strings,
    json_file: str | None,
    html: str | None,
    topology: str | None,
    analytic: bool,
) -> None:
    """Plans one run under one layout."""
    config = settings(None, gin_file, gin_param)
    slice = None if topology is None else Slice.named(topology)
    run, layout = config.make(Run), config.make(Layout)
    warn_unused(config, Run, Layout)
    check_run(run)
    sizes = sizes_on(layout, slice)
    torus = None if slice is None else slice.torus
    for warning in check_layout(run, layout, sizes, set_where(config), torus):
        tell(warning)
    found = plan_of(run, layout, sizes, slice, analytic)
    title = f"{layout_name(set_where(config))} {mesh_of(sizes)}" + f" on {topology}" * bool(
        topology
    )
    facts = as_json(found, layout)
    show(found, facts, title)
    if found.fits is False:
        for change in advice(found, layout):
            print(change)
        print(smallest_slice(found))
    write_json(json_file, facts)
    if html is not None:
        write_page(html, title, found, facts)


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


def plan_of(
    run: Run, layout: Layout, sizes: dict[str, int], slice: Slice | None, analytic: bool
) -> Plan:
    """The best plan that this machine can make; says what is missing in it."""
    mesh = None if analytic else mesh_for(layout, sizes, slice)
    if mesh is None:
        return planned(run, layout, sizes, slice)
    step = traced(run, layout, mesh)
    return plan(step, slice, compiled(step))


def mesh_for(layout: Layout, sizes: dict[str, int], slice: Slice | None) -> Mesh | None:
    """The devices to compile for: absent TPUs, or what this machine has, or none."""
    if slice is None:
        return make_mesh(layout)
    if has_tpu_compiler():
        tell(f"Compiling for {slice.devices} devices of {slice.name}, which takes minutes.")
        return absent_mesh(slice.name, sizes, layout.order)
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
    for surprise in found.surprises:
        print(f"Unlike what the layout asks for: {surprise}.")
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
