"""Runs `meshloom layouts`: ranks the layouts of one run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from configs.errors import UserError
from configs.load import Config
from layouts.candidates import as_gin
from layouts.cost.calibration import measure_host
from layouts.cost.collectives import format_mesh, size_text
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from scripts.commands.common import open_output, setting_origins, settings_of, write_json
from scripts.commands.planning.flags import LayoutsFlags
from scripts.commands.planning.inputs import parse_topology, sizes_on
from scripts.terminal import print_note, print_table
from scripts.texts import with_unit
from trainer.checks import check_layout, check_run
from trainer.planning.report import as_json
from trainer.planning.search import (
    RankedLayout,
    rank_layouts,
)
from trainer.planning.sweep import suggest_slice
from trainer.run import Run

RUNNERS_UP = 4  # in the file
COLUMNS = ["fits", "bytes per device", "traffic per device", "step s", "rate", "share of peak"]


def search(flags: LayoutsFlags) -> None:
    """Ranks all layouts of a run on a slice or on this machine; writes the best as a file."""
    config = settings_of(flags.settings)
    run, topology = config.make(Run), parse_topology(flags.topology)
    if topology is not None and topology.count > 1:
        raise UserError(
            f"--topology={topology.name}: layouts are ranked for one slice.  "
            "Plan one for several by `meshloom plan --analytic` with Layout.slices."
        )
    check_run(run)
    configured = configured_layouts(config, run, topology)
    ranking = rank_layouts(run, topology or measure_host(jax.devices()), configured)
    where = f"{len(jax.devices())} devices of one machine" if topology is None else topology.name
    basis = f"{len(ranking)} layouts on {where}, by their traces"
    if topology is not None and not any(ranked.plan.fits for ranked in ranking):
        least = min((ranked.plan for ranked in ranking), key=lambda plan: plan.memory.needed_bytes)
        raise UserError(
            f"--topology={topology.name}: none of {basis}, fits; the least needs "
            f"{size_text(least.memory.needed_bytes)} per device of "
            f"{size_text(topology.chip.memory_bytes)}.  {suggest_slice(least)}  "
            "Traces are not exact: `meshloom tune` compiles."
        )
    figures = {ranked.name: as_json(ranked.plan, ranked.layout) for ranked in ranking}
    print_table(["layout", *COLUMNS], [[name, *row(plan)] for name, plan in figures.items()])
    print(f"The fastest of {basis}: {ranking[0].name}")
    write_json(flags.json_file, [{"layout": name, **plan} for name, plan in figures.items()])
    if flags.output is not None:
        with open_output(flags.output) as file:
            file.write(as_gin(ranking[0].layout, [f"The fastest of {basis}:", *comments(ranking)]))
        print_note(f"Wrote {flags.output}.")


def configured_layouts(config: Config, run: Run, topology: Topology | None) -> list[Layout]:
    """Returns the layout of the gin files, if they have one that is legal on these devices."""
    if not any(name.startswith("Layout.") for name in config.bound):
        return []
    layout = config.make(Layout)
    torus = None if topology is None else topology.torus
    try:
        sizes = sizes_on(layout, topology)
        check_layout(run, layout, sizes, setting_origins(config), torus)
    except UserError as error:
        print_note(f"The layout of the gin files is left out: {error}")
        return []
    return [dataclasses.replace(layout, mesh=format_mesh(sizes))]


def warn_of_excess(figures: dict[str, Any]) -> None:
    """Warns of layouts whose compiled program does much that their trace does not."""
    for name, plan in figures.items():
        if plan["excess_flops"] is not None:
            print_note(f"warning: {name}: the compiled program {plan['excess_flops']}.")


def comments(ranking: Sequence[RankedLayout]) -> list[str]:
    """Describes in a layout file the layout and the runners-up."""

    def comment(ranked: RankedLayout) -> str:
        misfit = ", does not fit" * (ranked.plan.fits is False)
        return f"{ranked.step_s / best.step_s - 1:+.0%}{misfit}: {ranked.name}"

    best = ranking[0]
    memory = size_text(best.plan.memory.needed_bytes)
    fits = ", which fits" * (best.plan.fits is True)
    return [
        f"{best.step_s:.4g} s per step, {memory} per device{fits}.  Runners-up:",
        *map(comment, ranking[1 : 1 + RUNNERS_UP]),
    ]


def row(figures: dict[str, Any]) -> list[str]:
    """Writes a plan as a line of a table."""
    received_bytes = sum(collective["received_bytes"] for collective in figures["collectives"])
    line = [
        with_unit(figures["fits"], ""),
        size_text(figures["bytes_per_device"]),
        size_text(received_bytes),
    ]
    if figures["step_time_s"] is None:
        return [*line, "unknown", "unknown", "unknown"]
    rate = f"{figures['tokens_per_s']:,.0f} {figures['unit']}/s"
    times = (f"{figures['step_time_s']:.4g}", rate)
    share = "unknown" if figures["utilisation"] is None else f"{figures['utilisation']:.1%}"
    return [*line, *times, share]
