"""`meshloom plan`: what a run will cost, as tables, JSON and one page."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from configs.errors import UserError
from layouts.inefficient import size_text
from layouts.layout import Layout
from layouts.lint import table
from layouts.mesh import absent_mesh, has_tpu_compiler, make_mesh, mesh_sizes
from layouts.timing import seconds
from layouts.torus import Slice
from layouts.traffic import heaviest, mesh_of
from scripts.commands import Strings, set_where, settings, warn_unused, write_json
from scripts.page import write_page
from scripts.terminal import print_table, tell
from trainer.advice import advice, smallest_slice
from trainer.checks import check_layout, check_run, layout_name
from trainer.plan import Plan, compiled, plan, planned, traced
from trainer.run import Run

SHOWN = 12  # collectives and weights in a table
HOUR_S = 3600
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
        "collectives": collectives(found),
        "surprises": [str(surprise) for surprise in found.surprises],
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


def collectives(found: Plan) -> list[dict[str, Any]]:
    """All collectives, what a device receives the most of first."""
    rows = []
    for own in heaviest(found.counted.collectives):
        row = {
            "kind": own.kind,
            "mesh_axes": list(own.mesh_axes),
            "count": own.times,
            "bytes": own.bytes,
            "received_bytes": round(own.received_bytes),
            "overlaps": own.overlaps,
            "source": own.source,
        }
        if found.places is not None and found.slice is not None:
            row["seconds"] = own.times * seconds(found.slice, found.places, found.mesh, own)
        rows.append(row)
    return rows


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
    print_table(
        ["collective", "over", "times", "MB each", "MB received a step", "for"],
        [
            (c["kind"], ",".join(c["mesh_axes"]), c["count"], f"{c['bytes'] / 1e6:,.2f}",
             f"{c['received_bytes'] / 1e6:,.1f}", c["source"])
            for c in facts["collectives"][:SHOWN]
        ],
    )  # fmt: skip
    if found.timing is not None and found.step_s is not None:
        print_table(
            ["time of a step", "s", "share"],
            [
                (name, f"{s:.4g}", f"{s / found.step_s:.1%}")
                for name, s in found.timing.parts.items()
            ],
        )
    for surprise in found.surprises:
        print(f"Unlike what the layout asks for: {surprise}.")
    print(summary(facts))


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
