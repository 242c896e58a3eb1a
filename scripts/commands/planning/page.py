"""Writes a plan, of training or of decoding, as tables, and as one HTML page."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from layouts.cost.collectives import scaled, size_text
from layouts.cost.step_time import Timing
from scripts.commands.common import open_output
from scripts.html_page import page, table
from scripts.terminal import print_table
from trainer.planning.figures import FIGURES
from trainer.planning.report import by_line
from trainer.planning.run_cost import HOUR_S

STYLE = Path(__file__).with_suffix(".css").read_text()
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
           "#3ca951", "#ff8ab7", "#b8a72e", "#2f6f73")  # fmt: skip
HEAD = ("fits", "bytes_per_device", "memory_bytes", "cache_bytes", "devices", "parameters",
        "batch_sequences", "source_tokens", "prompt_tokens", "new_tokens", "suffix_tokens",
        "hypotheses", "model_flops", "executed_flops", "step_time_s", "step_time_range_s",
        "start_latency_s", "token_latency_s", "suffix_latency_s", "output_latency_s",
        "tokens_per_s", "utilisation", "utilisation_full_attention", "run_steps", "run_hours",
        "chip_hours", "compiled_for", "compile_s")  # fmt: skip
SHOWN_AS_NULL = {"fits", "compiled_for"}
TIMES = {
    "step_time_parts_s": ("Time of a step", "step_time_s"),
    "start_parts_s": ("Time to the first token", "start_latency_s"),
    "token_parts_s": ("Time of a token", "token_latency_s"),
    "suffix_parts_s": ("Time of the suffix", "suffix_latency_s"),
}
SHORT_HOURS = 0.1  # shown in seconds
TIMED = ("products_s", "other_s", "traffic_s")  # what adds to a step
SHORTEST = 1e-4  # of a step: less is left out of a table
OVERLAPPED = "Overlapped traffic takes time only where it takes longer than the compute meanwhile."
MAX_COLLECTIVES = 12  # in a table


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
        for row in figures["longest_other"]
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


def write_page(file: str, title: str, figures: dict[str, Any]) -> None:
    """Writes the page of a plan, of training or of decoding, from its figures."""
    sizes, available = figures["bytes_by_cause"], figures["memory_bytes"]
    limit = "" if available is None else f"; the red line is what it has: {size_text(available)}"
    needed = size_text(figures["bytes_per_device"])
    parts = [
        head(figures),
        f"<h2>Memory per device</h2><p>{needed} needed{limit}.",
        bar(sizes, available or 0.0, limit=available is not None),
        legend({cause: (size_text(size), size) for cause, size in sizes.items()}),
    ]
    for name, (heading, whole) in TIMES.items():
        if figures.get(name):
            parts += [f"<h2>{heading}</h2>", *times(figures[name], figures[whole])]
    if by_part := part_rows(figures):
        sums = {
            row["part"]: sum(row[kind] for kind in TIMED) for row in figures["step_time_by_part"]
        }
        parts += [
            "<h2>Time of a step by part of the model</h2>",
            bar(sums, 0.0, limit=False),
            legend({part: (with_unit(s, "s"), s) for part, s in sums.items()}),
            table(by_part),
            table(other_rows(figures)),
        ]
    if figures.get("run_cost"):
        spent, sentences = run_cost_rows(figures)
        names = ("part", "hours", "share")
        parts += [
            "<h2>The whole run</h2>",
            table(dict(zip(names, row, strict=True)) for row in spent) if spent else "",
            *(f"<p>{html.escape(text)}" for text in sentences),
        ]
    parts += ["<h2>Collectives</h2>", *collectives(figures)]
    unexpected = [*filter(None, [figures["excess_flops"]]), *figures["unexpected_collectives"]]
    if unexpected:
        items = "".join(f"<li>{html.escape(text)}" for text in unexpected)
        parts.append(f"<h2>Where the compiled program differs from the trace</h2><ul>{items}</ul>")
    if "weights" in figures:
        rows = (
            {
                "bytes": size_text(row["bytes"]),
                "per device": size_text(row["bytes_per_device"]),
                "axes": row["axes"],
                "weight": row["path"],
            }
            for row in figures["weights"]
        )
        parts += ["<h2>Largest weights</h2>", table(rows)]
    with open_output(file) as output:
        output.write(page(title, parts, STYLE))
    click.echo(f"Wrote {file}.")


def head(figures: Mapping[str, Any]) -> str:
    """Writes the table of single figures, each with what it means."""
    return table(
        {
            "figure": FIGURES[name].label,
            "value": FIGURES[name].null
            if figures[name] is None
            else with_unit(figures[name], FIGURES[name].unit),
            "meaning": FIGURES[name].meaning,
        }
        for name in HEAD
        if figures.get(name) is not None or name in SHOWN_AS_NULL & figures.keys()
    )


def times(seconds: Mapping[str, float], whole_s: float) -> list[str]:
    """Draws what a time consists of."""
    parts = {name: s for name, s in seconds.items() if s and not name.startswith("overlapped")}
    overlapped = {name: s for name, s in seconds.items() if s and name.startswith("overlapped")}
    texts = {
        name: (f"{with_unit(s, 's')}, {with_unit(s / whole_s, 'share')}", s)
        for name, s in {**parts, **overlapped}.items()
    }
    note = [f"<p>{OVERLAPPED}"] if overlapped else []
    return [
        f"<p>{with_unit(whole_s, 's')}.",
        bar(parts, whole_s, limit=False),
        legend(texts),
        *note,
    ]


def collectives(figures: Mapping[str, Any]) -> list[str]:
    """Sums collectives by part of the model, the slowest first; one click opens their lines."""
    rows = by_line(figures["collectives"])
    parts = {row["model_part"]: list[dict[str, Any]]() for row in rows}
    for row in rows:
        parts[row["model_part"]].append(row)
    return [
        f"<details><summary>{html.escape(traffic_of(part, lines))}</summary>{lines_table(lines)}"
        "</details>"
        for part, lines in parts.items()
    ] or ["<p>None: the devices exchange nothing."]


def traffic_of(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Describes the collectives of a part of the model in a line."""
    kinds: dict[str, tuple[int, float, float]] = {}
    for row in rows:
        count, size, time_s = kinds.get(row["kind"], (0, 0.0, 0.0))
        kinds[row["kind"]] = (
            count + row["count"], size + row["received_bytes"], time_s + row["seconds"]
        )  # fmt: skip
    texts = (
        f"{kind} {count:,} times, {size_text(round(size))}"
        + (f", {with_unit(time_s, 's')}" if time_s else "")
        for kind, (count, size, time_s) in kinds.items()
    )
    return f"{part}: {'; '.join(texts)}"


def lines_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lists the collectives of each line of the model."""
    return table(
        {
            **({"part": row["part"]} if "part" in row else {}),
            "collective": row["kind"],
            "over": ", ".join(row["mesh_axes"]),
            "times": row["count"],
            "received": size_text(row["received_bytes"]),
            "takes": with_unit(row["seconds"] or None, "s"),
            "overlaps compute": "yes" if row["overlaps"] else "no",
            "for": row["source"],
        }
        for row in rows
    )


def with_unit(value: Any, unit: str) -> str:
    """Writes a figure as people read it.

    >>> with_unit(0.0123, "s"), with_unit(0.5, "share"), with_unit(1234.5, "hours")
    ('12.3 ms', '50.0 %', '1,234 hours')
    >>> with_unit(3.2e15, "FLOPs"), with_unit(True, ""), with_unit(None, "s")
    ('3.2 PFLOPs', 'yes', 'unknown')
    >>> with_unit(0.0000123, "s"), with_unit(2.25e-10, "s"), with_unit(0.01, "hours")
    ('12.3 µs', '0.225 ns', '36 s')
    """
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return " to ".join(with_unit(end, unit) for end in value)
    match unit:
        case "bytes":
            return size_text(value)
        case "s":
            return seconds_text(value)
        case "hours" if 0 < value < SHORT_HOURS:
            return seconds_text(HOUR_S * value)
        case "share":
            return f"{100 * value:.1f} %"
        case "FLOPs":
            return scaled(value, unit)
    if not isinstance(value, str):
        value = f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:.3g}"
    return f"{value} {unit}".strip()


def seconds_text(seconds: float) -> str:
    """Formats a time, a short one in smaller units."""
    if seconds >= 1:
        return f"{seconds:.4g} s"
    for unit, size in (("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bar(sizes: Mapping[str, float], whole: float, limit: bool) -> str:
    """Draws parts next to each other on a bar that is at least the whole; a line is its limit."""
    total = max(sum(sizes.values()), whole) or 1.0
    parts = "".join(
        f'<div style="width:{100 * size / total:.2f}%;background:{colour(i)}"'
        f' title="{html.escape(name)}"></div>'
        for i, (name, size) in enumerate(sizes.items())
    )
    line = f'<div class="limit" style="left:{100 * whole / total:.2f}%"></div>' if limit else ""
    return f'<div class="bar">{parts}{line}</div>'


def legend(texts: Mapping[str, tuple[str, float]]) -> str:
    """Names the colours of a bar, with the text of each part; those of size 0 are left out."""
    items = "".join(
        f'<li><i style="background:{colour(i)}"></i>{html.escape(name)}: {html.escape(text)}'
        for i, (name, (text, size)) in enumerate(texts.items())
        if size
    )
    return f'<ul class="legend">{items}</ul>'


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]
