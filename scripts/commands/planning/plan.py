"""Runs `meshloom plan`: predicts what a run costs, as tables, JSON and one page."""

import dataclasses
import math
from typing import Any

from configs.errors import UserError
from configs.load import Config
from layouts.layout import Layout
from scripts.commands.common import warn_unused, write_json
from scripts.commands.planning import page, plan_decode
from scripts.commands.planning.flags import PlanFlags
from scripts.commands.planning.inputs import best_plan, named_layouts, read_inputs
from scripts.flag import given_flags
from scripts.terminal import print_note
from trainer.checks import check_bubble
from trainer.planning.alternatives import alternatives
from trainer.planning.report import as_json, decode_as_json
from trainer.planning.run_cost import Assumptions
from trainer.planning.search import suggest_slice
from trainer.planning.training import StepPlan
from trainer.run import Run


def plan(flags: PlanFlags) -> None:
    """Plans training or decoding of a run, under one layout or several."""
    check_flags(flags)
    if flags.compare:
        return compare(flags)
    inputs = read_inputs(flags)
    warn_unused(inputs.config, Run, Layout)
    title = inputs.title
    if flags.decode:
        decode_plan = plan_decode.plan_batch(inputs, flags)
        figures = decode_as_json(decode_plan)
        page.print_plan(title, figures)
        if decode_plan.fits is False:
            rows = decode_plan.step.shape.rows
            run = dataclasses.replace(inputs.run, batch_sequences=rows, microbatches=1)
            print(suggest_slice(decode_plan, run, decode_plan.weight_bytes))
        title = f"Decoding: {title}"
    else:
        inputs.check(*inputs.stages)
        print_note(*check_bubble(inputs.run, inputs.layout, inputs.sizes))
        step_plan = best_plan(inputs, flags.analytic)
        figures = training_figures(step_plan, flags)
        if flags.alternatives:
            print_note("Tracing alternatives, which takes seconds each.")
            figures["alternatives"] = alternatives(step_plan, inputs.stages)
            name_scopes(figures["alternatives"], inputs.config)
        page.print_plan(title, figures)
        if step_plan.memory.out_of_memory:
            print_note(
                "The compiler rejects this program for lack of memory; its parts, traffic and "
                "time come from the trace."
            )
        if step_plan.fits is False:
            print(suggest_slice(step_plan, step_plan.run))
            print("Settings that fit: `meshloom tune`.")
    write_json(flags.json_file, figures)
    if flags.html is not None:
        page.write_page(flags.html, title, figures)


def name_scopes(rows: list[dict[str, Any]], config: Config) -> None:
    """Adds the scoped names of settings that files bind, which override unscoped names."""
    for row in rows:
        for bare, value in list(row["settings"].items()):
            scoped = [name for name in config.bound if name.endswith(f"/{bare}")]
            row["settings"] |= dict.fromkeys(scoped, value)


def check_flags(flags: PlanFlags) -> None:
    """Refuses flags that do not go together."""
    if not flags.decode and (given := given_flags(flags.decoding)):
        raise UserError(f"{', '.join(given)} needs --decode.  Add it.")
    if flags.compare and flags.html is not None:
        raise UserError("--html writes the page of one plan.  Remove --compare, or use --json.")
    if flags.alternatives and (flags.decode or flags.compare or flags.topology is None):
        raise UserError("--alternatives needs --topology, and neither --decode nor --compare.")
    if flags.tokens is not None and flags.decode:
        raise UserError("--tokens is the length of a training run.  Remove it, or --decode.")
    price = ["--price_per_chip_hour"] if flags.price_per_chip_hour is not None else []
    if priced := [*price, *given_flags(flags.run_cost)]:
        if flags.decode or flags.topology is None:
            raise UserError(
                f"{', '.join(priced)} is for the training of a run on --topology.  Remove it, or "
                "--decode, or add --topology."
            )
        if flags.compare and flags.json_file is None:
            raise UserError(f"{', '.join(priced)} with --compare needs --json.  Add it.")
    if flags.price_per_chip_hour is None and flags.currency is not None:
        raise UserError("--currency is for --price_per_chip_hour.  Add it, or remove --currency.")
    if flags.layouts and not flags.compare:
        raise UserError(
            f"{flags.layouts[0]}: layout files need --compare.  Give the layout of one plan with "
            "--gin_file."
        )
    if flags.compare and not flags.layouts:
        raise UserError("--compare needs layout files, as in --compare a.gin b.gin.")


def compare(flags: PlanFlags) -> None:
    """Plans training, or decoding of one batch, under several layouts, the fastest first."""
    figures = {}
    for name, file in named_layouts(flags.layouts).items():
        inputs = read_inputs(flags, file)
        if flags.decode:
            figures[name] = decode_as_json(plan_decode.plan_batch(inputs, flags))
        else:
            inputs.check(*inputs.stages)
            figures[name] = training_figures(best_plan(inputs, flags.analytic), flags)

    def order(name: str) -> tuple[bool, float]:
        time_s = figures[name]["output_latency_s" if flags.decode else "step_time_s"]
        return figures[name]["fits"] is False, math.inf if time_s is None else time_s

    figures = {name: figures[name] for name in sorted(figures, key=order)}
    page.print_comparison(figures)
    for name, plan in figures.items():
        if plan["excess_flops"] is not None:
            print_note(f"warning: {name}: the compiled program {plan['excess_flops']}.")
    write_json(flags.json_file, figures)


def training_figures(plan: StepPlan, flags: PlanFlags) -> dict[str, Any]:
    assumed = Assumptions(**dataclasses.asdict(flags.run_cost))
    figures = as_json(plan, assumed, flags.price_per_chip_hour)
    if flags.price_per_chip_hour is not None and figures["run_cost"] is not None:
        figures["run_cost"]["currency"] = flags.currency or "USD"
    return figures
