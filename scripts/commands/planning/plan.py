"""Runs `meshloom plan`: predicts what a run costs, as tables, JSON and one page."""

import dataclasses
import math
from typing import Any

from configs.errors import UserError
from layouts.cost.collectives import size_text
from layouts.layout import Layout
from scripts.commands.common import warn_unused, write_json
from scripts.commands.planning import page, plan_decode
from scripts.commands.planning.flags import PlanFlags
from scripts.commands.planning.inputs import best_plan, named_layouts, read_inputs
from scripts.commands.planning.page import write_page
from scripts.commands.planning.sweep import sweep_run
from scripts.flag import given_flags
from scripts.terminal import print_note, print_table
from scripts.texts import with_unit
from trainer.checks import attention_lines, check_bubble
from trainer.planning.report import as_json, decode_as_json
from trainer.planning.run_cost import Assumptions
from trainer.planning.sweep import suggest_slice
from trainer.planning.training import StepPlan
from trainer.run import Run


def plan(flags: PlanFlags) -> None:
    """Plans training or decoding of a run, its training under several layouts, or a sweep."""
    check_flags(flags)
    if flags.sweep:
        sweep_run(flags)
    elif flags.compare:
        compare(flags)
    else:
        plan_run(flags)


def check_flags(flags: PlanFlags) -> None:
    """Refuses flags that do not belong together."""
    for other in ("decode", "compare"):
        if flags.sweep and getattr(flags, other):
            raise UserError(f"--sweep and --{other} are different plans.  Choose one.")
    if not flags.decode and (given := given_flags(flags.decoding)):
        raise UserError(f"{', '.join(given)} needs --decode.  Add it.")
    if flags.tokens is not None and flags.decode:
        raise UserError("--tokens is the length of a training.  Remove it, or --decode.")
    if flags.price_per_chip_hour is not None and (flags.decode or flags.topology is None):
        raise UserError(
            "--price_per_chip_hour is for the training of a run on --topology.  Remove it, or "
            "--decode, or add --topology."
        )
    is_priced = flags.topology is not None and not (flags.decode or flags.sweep)
    if not is_priced and (given := given_flags(flags.run_cost)):
        raise UserError(
            f"{', '.join(given)} is for one plan of training on --topology.  Remove it, or add "
            "--topology, without --decode and --sweep."
        )
    if flags.layouts and not (flags.compare or flags.sweep):
        raise UserError(
            f"{flags.layouts[0]}: layout files need --compare or --sweep.  Give the layout of one "
            "plan by --gin_file."
        )
    if flags.compare and not flags.layouts:
        raise UserError("--compare needs layout files, as in --compare a.gin b.gin.")
    if flags.compare and flags.html is not None:
        raise UserError("--html writes the page of one plan.  Remove --compare, or use --json.")


def plan_run(flags: PlanFlags) -> None:
    """Plans training, or the decoding of one batch, under one layout."""
    inputs = read_inputs(flags)
    warn_unused(inputs.config, Run, Layout)
    title = inputs.title
    if flags.decode:
        batch = plan_decode.plan_batch(inputs, flags)
        figures = decode_as_json(batch)
        plan_decode.print_plan(batch, figures, title)
        title = f"Decoding: {title}"
    else:
        inputs.check(inputs.run)
        for warning in check_bubble(inputs.run, inputs.layout, inputs.sizes):
            print_note(warning)
        plan = best_plan(inputs, flags.analytic)
        figures = training_figures(plan, inputs.layout, flags)
        print_plan(plan, figures, title)
        if plan.memory.out_of_memory:
            print_note(
                "The compiler refuses this program for lack of memory; its parts, traffic and "
                "time are by the trace."
            )
        if plan.fits is False:
            print(suggest_slice(plan))
            print("Settings that fit: add --sweep (by traces), or `meshloom tune` (compiled).")
    write_json(flags.json_file, figures)
    if flags.html is not None:
        write_page(flags.html, title, figures)


def compare(flags: PlanFlags) -> None:
    """Plans training, or the decoding of one batch, under several layouts, the fastest first."""
    figures = {}
    for name, file in named_layouts(flags.layouts).items():
        inputs = read_inputs(flags, file)
        if flags.decode:
            figures[name] = decode_as_json(plan_decode.plan_batch(inputs, flags))
        else:
            inputs.check(inputs.run)
            figures[name] = training_figures(
                best_plan(inputs, flags.analytic), inputs.layout, flags
            )

    def order(name: str) -> tuple[bool, float]:
        time_s = figures[name]["output_latency_s" if flags.decode else "step_time_s"]
        return figures[name]["fits"] is False, math.inf if time_s is None else time_s

    names = sorted(figures, key=order)
    kind: Any = plan_decode if flags.decode else page
    print_table(["layout", *kind.COLUMNS], [[name, *kind.row(figures[name])] for name in names])
    for name in names:
        if figures[name]["excess_flops"] is not None:
            print_note(f"warning: {name}: the compiled program {figures[name]['excess_flops']}.")
    write_json(flags.json_file, {name: figures[name] for name in names})


def training_figures(plan: StepPlan, layout: Layout, flags: PlanFlags) -> dict[str, Any]:
    assumed = Assumptions(**dataclasses.asdict(flags.run_cost))
    figures = as_json(plan, layout, assumed, flags.price_per_chip_hour)
    if flags.price_per_chip_hour is not None and figures["run_cost"] is not None:
        figures["run_cost"]["currency"] = flags.currency
    return figures


def print_plan(plan: StepPlan, figures: dict[str, Any], title: str) -> None:
    print(f"Plan: {title}, {plan.devices:,} devices, {plan.parameters:,} parameters")
    for line in attention_lines(figures["attention"]):
        print(line)
    if figures["gradient_sums"] is not None:
        step, microbatch = figures["gradient_sums"].values()
        print(
            f"Gradients of {step:,} parameters cross devices once a step; of {microbatch:,}, which "
            "are scales, biases, and weights that are split as rows are, in each of "
            f"{figures['microbatches']} microbatches"
        )
    if figures["host_bytes"]:
        size = size_text(figures["host_bytes"])
        print(f"Activations on the host: {size} per device, written and read once a step")
    page.print_memory(figures)
    print_table(
        ["largest weights", "axes", "bytes", "per device"],
        [
            (row["path"], row["axes"], size_text(row["bytes"]), size_text(row["bytes_per_device"]))
            for row in figures["weights"]
        ],
    )
    page.print_collectives(figures["collectives"], "step")
    if plan.timing is not None:
        page.print_times("step", plan.timing)
        page.print_parts(figures)
    if plan.schedule.stages > 1:
        idle_s, repeats = plan.idle_s, plan.schedule.repeats
        time = "" if idle_s is None else f", up to {idle_s:.3g} s of a step"
        around = f" {repeats} times around," if repeats > 1 else ""
        print(
            f"Pipeline: {plan.schedule.stages} stages,{around} {plan.run.microbatches} "
            f"microbatches; stages idle {plan.schedule.bubble:.0%} of their time{time}"
        )
    page.print_unexpected(figures)
    print(summary(figures))
    if figures["run_cost"] is not None:
        page.print_run_cost(figures)


def summary(figures: dict[str, Any]) -> str:
    """Writes a plan in one line."""
    received_bytes = sum(row["received_bytes"] for row in figures["collectives"])
    parts = [
        f"{figures['model_flops']:.3g} FLOPs per step ({figures['executed_flops']:.3g} executed)",
        f"{size_text(received_bytes)} of traffic per device",
    ]
    if figures["step_time_s"] is not None:
        range_s, limits = figures["step_time_range_s"], ""
        if range_s is not None:
            limits = f" ({range_s[0]:.3g} to {range_s[1]:.3g} s)"
        parts += [
            f"step {figures['step_time_s']:.4g} s{limits}",
            f"{figures['tokens_per_s']:,.0f} {figures['unit']}/s",
            f"utilisation {figures['utilisation']:.1%}",
        ]
        if figures["run_steps"] is not None:
            parts.append(
                f"{figures['run_steps']:,} steps in {with_unit(figures['run_hours'], 'hours')}, "
                f"{with_unit(figures['chip_hours'], 'chip-hours')}"
            )
    return page.summary_line(figures, parts)
