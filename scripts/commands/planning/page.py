"""Writes a plan, of training or of decoding, as tables, and as one HTML page."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import click

from layouts.cost.collectives import size_text
from layouts.cost.step_time import Timing
from scripts.commands.common import open_output
from scripts.html_page import render
from scripts.terminal import print_table
from scripts.texts import with_unit
from trainer.planning.figures import FIGURES
from trainer.planning.report import by_line

HEAD = ("fits", "bytes_per_device", "memory_bytes", "cache_bytes", "devices", "parameters",
        "batch_sequences", "source_tokens", "prompt_tokens", "new_tokens", "suffix_tokens",
        "hypotheses", "model_flops", "executed_flops", "step_time_s", "step_time_range_s",
        "start_latency_s", "token_latency_s", "suffix_latency_s", "output_latency_s",
        "tokens_per_s", "utilisation", "utilisation_full_attention", "run_steps", "run_hours",
        "chip_hours", "compiled_for", "compile_s")  # fmt: skip
SHOWN_AS_NULL = {"fits", "compiled_for"}
TIMED = ("products_s", "other_s", "traffic_s")  # what adds to a step
SHORTEST = 1e-4  # of a step: less is left out of a table
MAX_COLLECTIVES = 12  # in a table
COLUMNS = ("fits", "bytes per device", "traffic per device", "step s", "rate", "share of peak")


def print_memory(figures: dict[str, Any]) -> None:
    rows = [*figures["bytes_by_cause"].items(), ("all", figures["bytes_per_device"])]
    if figures["memory_bytes"] is not None:
        rows.append(("available", figures["memory_bytes"]))
    print_table(["memory per device", "bytes"], [(cause, size_text(size)) for cause, size in rows])


def print_collectives(rows: Sequence[dict[str, Any]], unit: str) -> None:
    """Prints the collectives of each line of the model, as often as in one unit: step or token."""
    print_table(
        ["collective", "over", "times", f"received a {unit}", f"s a {unit}", "for"],
        [
            (row["kind"], ",".join(row["mesh_axes"]), row["count"],
             size_text(row["received_bytes"]), f"{row['seconds']:.3g}" if row["seconds"] else "",
             row["source"])
            for row in by_line(rows)[:MAX_COLLECTIVES]
        ],
    )  # fmt: skip


def print_times(what: str, timing: Timing) -> None:
    rows = [(name, f"{s:.4g}", f"{s / timing.step_s:.1%}") for name, s in timing.parts.items()]
    print_table([f"time of a {what}", "s", "share"], rows)


def print_parts(figures: Mapping[str, Any]) -> None:
    """Prints what each part of the model takes of a step, and the longest other compute."""
    for rows in (part_rows(figures), other_rows(figures)):
        if rows:
            print_table([*rows[0]], [[*row.values()] for row in rows])


def part_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Writes the time of a step by part of the model."""

    def text(seconds: float) -> str:
        is_visible = seconds > SHORTEST * figures["step_time_s"]
        return with_unit(seconds, "s") if is_visible else ""

    return [
        {
            "part of the model": row["part"],
            "share": f"{sum(row[kind] for kind in TIMED) / figures['step_time_s']:.1%}",
            "products": text(row["products_s"]),
            "at the peak": text(row["least_s"]),
            "other compute": text(row["other_s"]),
            "traffic": text(row["traffic_s"]),
            "overlapped traffic": text(row["overlapped_s"]),
        }
        for row in figures.get("step_time_by_part") or ()
    ]


def other_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Writes the lines of the longest other compute."""
    return [
        {
            "longest other compute": with_unit(row["seconds"], "s"),
            "part of the model": row["part"],
            "for": row["source"],
        }
        for row in figures.get("longest_other") or ()
    ]


def print_run_cost(figures: Mapping[str, Any]) -> None:
    """Prints the hours of a run, and the interval of checkpoints that costs the least."""
    rows, sentences = run_cost_rows(figures)
    if rows:
        print_table(["whole run", "hours", "share"], rows)
    print("\n".join(sentences))


def run_cost_rows(figures: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Lists the hours of a run by what takes them, and says what they assume."""
    cost = figures["run_cost"]
    whole, assumed = cost["wall_hours"], cost["assumptions"]
    best, every = cost["best_checkpoint_every"], cost["checkpoint_every"]
    sentences = [
        f"Assumes {assumed['failures_per_chip_day']:g} failures of a chip and day (the range: half "
        f"to four times as many), {assumed['restart_minutes']:g} min for a restart, and "
        f"{assumed['storage_gb_per_s']:g} GB/s between each host and the storage.",
    ]
    if whole is None:
        never = f"With Run.checkpoint_every = {every:,}, failures come faster than the run recovers"
        if cost["best_hours"] is not None:
            never += f"; with {best:,} it takes {with_unit(cost['best_hours'], 'hours')}"
        return [], [f"{never}.", *sentences]
    names = {"failures": f"{cost['failures']:,.1f} failures"}
    rows = [
        (names.get(name, name), with_unit(hours, "hours"), with_unit(hours / whole, "share"))
        for name, hours in [*cost["hours"].items(), ("all", whole)]
    ]
    saved = with_unit(whole - cost["best_hours"], "hours")
    better = f"{best:,} would save {saved}" if cost["best_hours"] < whole else "no other is better"
    ends = " to ".join(
        "never ends" if end is None else with_unit(end, "hours") for end in cost["wall_hours_range"]
    )
    price = f"; {with_unit(cost['price'], cost['currency'])}" if "price" in cost else ""
    if "evaluations" not in cost["hours"]:
        sentences.append("Evaluations are not counted: Run.evaluate_batches is not set.")
    return rows, [
        f"The whole run: {ends}; {with_unit(cost['chip_hours'], 'chip-hours')}{price}",
        f"Checkpoints of {size_text(cost['checkpoint_bytes'])} stop training for "
        f"{with_unit(cost['copy_s'], 's')} and are written in {with_unit(cost['write_s'], 's')}; "
        f"Run.checkpoint_every = {every:,}: {better}",
        *sentences,
    ]


def print_unexpected(figures: dict[str, Any]) -> None:
    """Prints what the compiled program does beyond the trace: FLOPs, then traffic."""
    if figures["excess_flops"] is not None:
        print(f"The compiled program {figures['excess_flops']}.")
    for text in figures["unexpected_collectives"]:
        print(f"The compiled program differs from the layout: {text}.")


def summary_line(figures: dict[str, Any], parts: Sequence[str]) -> str:
    """Joins whether a plan fits, its other figures and its compile time."""
    fits = {True: "fits", False: "does not fit", None: "memory"}[figures["fits"]]
    parts = [f"{fits}: {size_text(figures['bytes_per_device'])} per device", *parts]
    if figures["compile_s"] is not None:
        parts.append(f"compiled in {figures['compile_s']:.0f} s")
    return "; ".join(parts) + "."


def row(figures: dict[str, Any]) -> list[str]:
    """Writes a plan of training as `COLUMNS`."""
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


def write_page(file: str, title: str, figures: dict[str, Any]) -> None:
    """Writes the page of a plan, of training or of decoding, from its figures."""
    parts = figures.get("step_time_by_part") or ()
    spent, sentences = run_cost_rows(figures) if figures.get("run_cost") else ([], [])
    text = render(
        "commands/planning/plan.html",
        title=title,
        figures=figures,
        head=head(figures),
        seconds_by_part={row["part"]: sum(row[kind] for kind in TIMED) for row in parts},
        by_part=part_rows(figures),
        other=other_rows(figures),
        spent=[dict(zip(("part", "hours", "share"), row, strict=True)) for row in spent],
        sentences=sentences,
        collectives=collectives(figures),
    )
    with open_output(file) as output:
        output.write(text)
    click.echo(f"Wrote {file}.")


def head(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Lists the single figures as rows of a table, each with what it means."""
    return [
        {
            "figure": FIGURES[name].label,
            "value": FIGURES[name].null
            if figures[name] is None
            else with_unit(figures[name], FIGURES[name].unit),
            "meaning": FIGURES[name].meaning,
        }
        for name in HEAD
        if figures.get(name) is not None or name in SHOWN_AS_NULL & figures.keys()
    ]


def collectives(figures: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Sums the collectives of each line, by part of the model, the slowest part first."""
    parts = defaultdict[str, list[dict[str, Any]]](list)
    for row in by_line(figures["collectives"]):
        parts[row["model_part"]].append(row)
    return parts
