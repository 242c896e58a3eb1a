"""Runs `meshloom plan --sweep`: compares settings of one run by what they cost."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click

from configs.errors import UserError
from layouts.cost.collectives import format_mesh, size_text
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import mesh_sizes
from scripts.commands.common import open_output, setting_origins, write_json
from scripts.commands.planning.flags import PlanFlags
from scripts.commands.planning.inputs import PlanInputs, named_layouts, read_inputs
from scripts.templates import render
from scripts.terminal import print_note, print_table
from scripts.texts import with_unit
from trainer.checks import layout_name
from trainer.metrics.plots import png_of
from trainer.planning.figures import SCHEMA_VERSION
from trainer.planning.search import rank_layouts
from trainer.planning.sweep import SweepPoint, sweep

RANKED = 3  # layouts of a ranking that are swept with the run's own
SHOWN = 20  # combinations in the terminal
NEAR = 0.04  # of the picture: two labels would overlap there
MARGIN = 1.1  # of the picture, for circles and labels at its edge


def sweep_run(flags: PlanFlags) -> None:
    """Sweeps the settings of a run; prints those that fit, the cheapest first."""
    inputs = read_inputs(flags)
    topology = inputs.topology
    if topology is None:
        raise UserError("--sweep needs to know the devices.  Add --topology, as in v5e:4x4.")
    points = sweep(inputs.run, layouts_of(inputs, topology, flags), topology)
    if not points:
        raise UserError(
            f"--topology={topology.name}: no combination of settings fits.  Plan one by "
            "`meshloom plan`, which names the smallest topology that would hold the run."
        )
    rows = [figures_of(point, flags) for point in points]
    shown = [readable(number, row) for number, row in enumerate(rows, 1)]
    print_table([*shown[0]], [[*row.values()] for row in shown[:SHOWN]])
    if len(shown) > SHOWN:
        print_note(f"{len(shown) - SHOWN} more combinations fit: --html or --json lists them.")
    write_json(flags.json_file, {"schema_version": SCHEMA_VERSION, "combinations": rows})
    if flags.html is not None:
        text = render(
            "commands/planning/sweep.html",
            title=f"{inputs.title}: settings by their cost",
            tokens=f"{points[0].tokens:,} {inputs.run.task.unit}",
            price=flags.price_per_chip_hour,
            currency=flags.currency,
            picture=png_of(functools.partial(scatter, points)),
            rows=shown,
        )
        with open_output(flags.html) as output:
            output.write(text)
        click.echo(f"Wrote {flags.html}.")


def layouts_of(inputs: PlanInputs, topology: Topology, flags: PlanFlags) -> dict[str, Layout]:
    """Returns the given layouts, or that of the run and those that a ranking prefers."""
    inputs.check(inputs.run)
    of_run = layout_name(setting_origins(inputs.config))
    layouts = {of_run: inputs.layout}
    for name, file in named_layouts(flags.layouts, of_run).items():
        other = read_inputs(flags, file)
        other.check(other.run)
        layouts[name] = other.layout
    if not flags.layouts and topology.count == 1:
        ranking = rank_layouts(inputs.run, topology, [inputs.layout])
        layouts |= {ranked.name: ranked.layout for ranked in ranking[:RANKED]}
    equal: dict[Layout, str] = {}  # the first name of those that are equal on the slice
    for name, layout in layouts.items():
        sizes = format_mesh(mesh_sizes(layout.mesh, topology.devices))
        equal.setdefault(dataclasses.replace(layout, mesh=sizes, order=None), name)
    return {name: layouts[name] for name in equal.values()}


def figures_of(point: SweepPoint, flags: PlanFlags) -> dict[str, Any]:
    """Lists what a combination is and costs; money only where a price is known."""
    price = flags.price_per_chip_hour
    figures = point.settings | {
        "bytes_per_device": point.plan.memory.needed_bytes,
        "step_time_s": point.step_s,
        "unit": point.plan.run.task.unit,
        "tokens_per_s": point.plan.tokens_per_step / point.step_s,
        "run_steps": math.ceil(point.tokens / point.plan.tokens_per_step),
        "run_hours": point.hours,
        "chip_hours": point.chip_hours,
    }
    if price is not None:
        figures |= {"price": price * point.chip_hours, "currency": flags.currency}
    return figures


def readable(number: int, row: dict[str, Any]) -> dict[str, str]:
    """Writes the figures of a combination as people read them."""
    texts = {
        "#": f"{number}",
        "batch": f"{row['Run.batch_sequences']:,}",
        "microbatches": f"{row['Run.microbatches']}",
        "remat": remat_text(row),
        "compute": row.get("Precision.compute", ""),
        "memory": size_text(row["bytes_per_device"]),
        "step": with_unit(row["step_time_s"], "s"),
        "rate": f"{row['tokens_per_s']:,.0f} {row['unit']}/s",
        "steps": f"{row['run_steps']:,}",
        "run": with_unit(row["run_hours"], "hours"),
        "chip-hours": with_unit(row["chip_hours"], ""),
    }
    if "price" in row:
        texts[f"price in {row['currency']}"] = with_unit(row["price"], "")
    return texts | {"layout": row["layout"]}


def remat_text(row: dict[str, Any]) -> str:
    """Writes what a combination recomputes, and what it saves nevertheless."""
    kept = {"saves": "Transformer.remat_saves", "on the host": "Transformer.remat_offloads"}
    texts = [f"{what} {row[name]}" for what, name in kept.items() if row.get(name)]
    return ", ".join([row.get("Transformer.remat", ""), *texts])


def scatter(points: Sequence[SweepPoint], pyplot: Any) -> Any:
    """Draws chip-hours over step time: a colour for each layout, larger with more memory."""
    layouts = list(dict.fromkeys(point.layout for point in points))
    figure, axes = pyplot.subplots(figsize=(9, 5 + 0.2 * len(layouts)), layout="constrained")
    for number, name in enumerate(layouts):
        of_layout = [point for point in points if point.layout == name]
        shares = [
            point.plan.memory.needed_bytes / point.plan.topology.chip.memory_bytes
            for point in of_layout
            if point.plan.topology is not None
        ]
        axes.scatter(
            [point.step_s for point in of_layout],
            [point.chip_hours for point in of_layout],
            s=[20 + 100 * share for share in shares],
            color=f"C{number}", alpha=0.6, label=name,
        )  # fmt: skip
    axes.set(xlabel="step time in s", ylabel="chip-hours of the whole run")
    ends = [(point.step_s, point.chip_hours) for point in points]
    widths = [MARGIN * max(sizes) for sizes in zip(*ends, strict=True)]
    axes.set_xlim(0, widths[0])
    axes.set_ylim(0, widths[1])
    cells = defaultdict[tuple[int, ...], list[int]](list)  # numbers of neighbours share a label
    for number, end in enumerate(ends, 1):
        cells[tuple(round(x / w / NEAR) for x, w in zip(end, widths, strict=True))].append(number)
    for numbers in cells.values():
        axes.annotate(
            ", ".join(map(str, numbers)), ends[numbers[0] - 1], (0, -16),
            textcoords="offset points", fontsize="small", ha="center",
        )  # fmt: skip
    axes.grid(alpha=0.3)
    figure.legend(title="layout", fontsize="x-small", loc="outside lower left")  # below all points
    return figure
