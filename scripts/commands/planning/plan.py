"""Runs `meshloom plan`: predicts what a run costs, as tables, JSON and one page."""

import dataclasses
from typing import Any

from configs.errors import UserError
from layouts.cost.collectives import size_text
from layouts.layout import Layout
from scripts.command_line import given_flag
from scripts.commands.common import warn_unused, write_json
from scripts.commands.planning import tables
from scripts.commands.planning.flags import DecodePlanFlags, PlanFlags
from scripts.commands.planning.inputs import best_plan, read_inputs
from scripts.commands.planning.layouts import compare
from scripts.commands.planning.page import with_unit, write_page
from scripts.commands.planning.plan_decode import compare_decoding, plan_decoding
from scripts.commands.planning.sweep import sweep_run
from scripts.terminal import print_note
from trainer.checks import attention_lines, check_bubble
from trainer.planning.report import as_json
from trainer.planning.savings import memory_savings, suggest_slice
from trainer.planning.training import StepPlan
from trainer.run import Run


def plan(flags: PlanFlags) -> None:
    """Plans training or decoding of a run, its training under several layouts, or a sweep."""
    check_flags(flags)
    if flags.sweep:
        sweep_run(flags)
    elif flags.decode and flags.compare:
        compare_decoding(flags)
    elif flags.decode:
        plan_decoding(flags)
    elif flags.compare:
        compare(flags)
    else:
        plan_run(flags)


def check_flags(flags: PlanFlags) -> None:
    """Refuses flags that do not belong together."""
    for other in ("decode", "compare"):
        if flags.sweep and getattr(flags, other):
            raise UserError(f"--sweep and --{other} are different plans.  Choose one.")
    for field in dataclasses.fields(DecodePlanFlags):
        if not flags.decode and (flag := given_flag(field.name)) is not None:
            raise UserError(f"{flag} needs --decode.  Add it.")
    if flags.tokens is not None and flags.decode:
        raise UserError("--tokens is the length of a training.  Remove it, or --decode.")
    if flags.price_per_chip_hour is not None and not flags.sweep:
        raise UserError("--price_per_chip_hour needs --sweep.  Add it.")
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
    """Plans one run under one layout."""
    inputs = read_inputs(flags)
    warn_unused(inputs.config, Run, Layout)
    inputs.check(inputs.run)
    for warning in check_bubble(inputs.run, inputs.layout, inputs.sizes):
        print_note(warning)
    plan = best_plan(inputs, flags.analytic)
    figures = as_json(plan, inputs.layout)
    print_plan(plan, figures, inputs.title)
    if plan.fits is False:
        for saving in memory_savings(plan, inputs.layout):
            print(saving)
        print(suggest_slice(plan))
    write_json(flags.json_file, figures)
    if flags.html is not None:
        write_page(flags.html, inputs.title, figures)


def print_plan(plan: StepPlan, figures: dict[str, Any], title: str) -> None:
    print(f"Plan: {title}, {plan.devices:,} devices, {plan.parameters:,} parameters")
    for line in attention_lines(figures["attention"]):
        print(line)
    tables.print_memory(figures)
    tables.print_weights(figures)
    tables.print_collectives(figures["collectives"], "step")
    if plan.timing is not None:
        tables.print_times("step", plan.timing)
    if plan.schedule.stages > 1:
        idle_s, repeats = plan.idle_s, plan.schedule.repeats
        time = "" if idle_s is None else f", up to {idle_s:.3g} s of a step"
        around = f" {repeats} times around," if repeats > 1 else ""
        print(
            f"Pipeline: {plan.schedule.stages} stages,{around} {plan.run.microbatches} "
            f"microbatches; stages idle {plan.schedule.bubble:.0%} of their time{time}"
        )
    tables.print_unexpected(figures)
    print(summary(figures))


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
            limits = f" ({range_s[0]:.3g} to {range_s[1]:.3g} s; not validated on these GPUs)"
        parts += [
            f"step {figures['step_time_s']:.4g} s{limits}",
            f"{figures['tokens_per_s']:,.0f} {figures['unit']}/s",
            f"utilisation {figures['utilisation']:.1%}",
            f"{figures['run_steps']:,} steps in {with_unit(figures['run_hours'], 'hours')}, "
            f"{with_unit(figures['chip_hours'], 'chip-hours')}",
        ]
    return tables.summary_line(figures, parts)
