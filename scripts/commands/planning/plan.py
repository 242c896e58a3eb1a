"""Runs `meshloom plan`: predicts what a run costs, as tables, JSON and one page."""

import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from configs.errors import UserError
from configs.load import Config
from layouts.cost.collectives import format_mesh
from layouts.cost.interconnect import Slice
from layouts.layout import Layout
from layouts.lint.warnings import size_text
from layouts.mesh import has_tpu_compiler, make_mesh, mesh_sizes, topology_mesh
from scripts.commands.common import Strings, set_where, settings, warn_unused, write_json
from scripts.commands.planning.page import write_page
from scripts.commands.planning.tables import (
    print_collectives,
    print_memory,
    print_times,
    print_unexpected,
    print_weights,
    summary_line,
)
from scripts.terminal import tell
from trainer.checks import Program, check_layout, check_run, explained_errors, layout_name
from trainer.planning.report import as_json
from trainer.planning.savings import memory_savings, smallest_slice
from trainer.planning.training import (
    StepPlan,
    compile_step,
    plan_from_trace,
    plan_step,
    trace_step,
)
from trainer.run import Run
from trainer.traces import trace_train_step

NO_COMPILER = (
    "The TPU compiler is not installed, so memory and time are estimated from the layout alone; "
    "cycles, memory and collectives of the compiled program are missing.  "
    "Install it: pip install 'meshloom[plan]', or pip install libtpu"
)


class PlanInputs(NamedTuple):
    """Holds what to plan: a run under a layout, on a slice or on this machine's devices."""

    config: Config
    run: Run
    layout: Layout
    slice: Slice | None
    sizes: dict[str, int]
    """Sizes of the mesh axes."""

    @classmethod
    def read(cls, config: Config, slice: Slice | None) -> "PlanInputs":
        run, layout = config.make(Run), config.make(Layout)
        check_run(run)
        return cls(config, run, layout, slice, sizes_on(layout, slice))

    def check(self, run: Run) -> None:
        """Raises every error of the layout with this run; prints the warnings."""
        torus = None if self.slice is None else self.slice.torus
        for warning in check_layout(run, self.layout, self.sizes, set_where(self.config), torus):
            tell(warning)

    def explained_errors(self, run: Run, program: Program) -> AbstractContextManager[None]:
        """Turns an error of JAX that the layout causes into one message."""
        return explained_errors(run, self.layout, self.sizes, set_where(self.config), program)

    @property
    def title(self) -> str:
        topology = "" if self.slice is None else f" on {self.slice.name}"
        return f"{layout_name(set_where(self.config))} {format_mesh(self.sizes)}{topology}"


def parse_topology(topology: str | None) -> Slice | None:
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
    inputs = PlanInputs.read(settings(None, gin_file, gin_param), parse_topology(topology))
    warn_unused(inputs.config, Run, Layout)
    inputs.check(inputs.run)
    plan = best_plan(inputs, analytic)
    figures = as_json(plan, inputs.layout)
    print_plan(plan, figures, inputs.title)
    if plan.fits is False:
        for saving in memory_savings(plan, inputs.layout):
            print(saving)
        print(smallest_slice(plan))
    write_json(json_file, figures)
    if html is not None:
        write_page(html, inputs.title, figures)


def sizes_on(layout: Layout, slice: Slice | None) -> dict[str, int]:
    """Computes the sizes of the mesh axes, all of the slice's devices used."""
    if slice is None:
        return mesh_sizes(layout.mesh, len(jax.devices()))
    sizes = mesh_sizes(layout.mesh, None)
    product = math.prod(size for size in sizes.values() if size != -1)
    if slice.devices % product if -1 in sizes.values() else product != slice.devices:
        raise UserError(
            f"Layout.mesh = {layout.mesh!r}: its sizes multiply to {product}, and "
            f"--topology={slice.name} has {slice.devices} devices ({slice.chips} chips of "
            f"{slice.chip.cores}).  Legal: sizes that multiply to {slice.devices}, or -1 for one."
        )
    return mesh_sizes(layout.mesh, slice.devices)


def best_plan(inputs: PlanInputs, analytic: bool) -> StepPlan:
    """Makes the best plan that this machine can, and says what is missing in it."""
    mesh = None if analytic else mesh_to_compile_for(inputs)
    with inputs.explained_errors(inputs.run, trace_train_step):
        if mesh is None:
            return plan_from_trace(inputs.run, inputs.layout, inputs.sizes, inputs.slice)
        step = trace_step(inputs.run, inputs.layout, mesh)
        return plan_step(step, inputs.slice, compile_step(step))


def mesh_to_compile_for(inputs: PlanInputs) -> Mesh | None:
    """Returns a mesh of absent TPUs, or of this machine's devices; None without a compiler."""
    slice = inputs.slice
    if slice is None:
        return make_mesh(inputs.layout)
    if has_tpu_compiler():
        tell(f"Compiling for {slice.devices} devices of {slice.name}, which takes minutes.")
        return topology_mesh(slice.name, inputs.sizes, inputs.layout.order)
    tell(NO_COMPILER)
    return None


def print_plan(plan: StepPlan, figures: dict[str, Any], title: str) -> None:
    print(f"Plan: {title}, {plan.devices:,} devices, {plan.parameters:,} parameters")
    print_memory(figures)
    print_weights(figures)
    print_collectives(figures["collectives"], "step")
    if plan.timing is not None:
        print_times("step", plan.timing)
    print_unexpected(figures)
    print(summary(figures))


def summary(figures: dict[str, Any]) -> str:
    """Writes a plan in one line."""
    received_bytes = sum(row["received_bytes"] for row in figures["collectives"])
    parts = [
        f"{figures['model_flops']:.3g} FLOPs a step ({figures['executed_flops']:.3g} executed)",
        f"{size_text(received_bytes)} of traffic a device",
    ]
    if figures["step_time_s"] is not None:
        parts += [
            f"step {figures['step_time_s']:.4g} s",
            f"{figures['tokens_per_s']:,.0f} tokens/s",
            f"utilisation {figures['utilisation']:.1%}",
            f"{figures['run_steps']:,} steps in {figures['run_hours']:,.1f} h, "
            f"{figures['chip_hours']:,.0f} chip-hours",
        ]
    return summary_line(figures, parts)
