"""Writes a plan, for training or decoding, as tables and as one HTML page."""

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from layouts.cost.collectives import size_text
from scripts.commands.common import open_output
from scripts.templates import render, text_table
from scripts.texts import with_unit
from trainer.planning.breakdown import seconds_of
from trainer.planning.report import FIGURES, by_line

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HEAD, COMPARED, TIMES = TABLES["head"], TABLES["compared"], TABLES["times"]
SHOWN_AS_NULL = {"fits", "compiled_for"}
SHORTEST = 1e-4  # of a step; tables leave out shorter times
MAX_COLLECTIVES = 12  # in a table
MAX_ALTERNATIVES = 6
MIN_SAVED = 0.01  # of a step; alternatives that save less are left out


def part_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Writes the time of each part of the model in a step, planned or profiled."""

    def text(seconds: float) -> str:
        is_visible = seconds > SHORTEST * figures["step_time_s"]
        return with_unit(seconds, "s") if is_visible else ""

    return [
        {
            "part of the model": row["part"],
            "share": f"{seconds_of(row) / figures['step_time_s']:.1%}",
            **{head: text(row[key]) for head, key in TABLES["parts"].items() if key in row},
        }
        for row in figures.get("step_time_by_part") or ()
    ]


def rows_of(figures: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    """Writes the rows of a figure in the columns of `TABLES`."""
    return [
        {head: with_unit(row[key], unit) for head, (key, unit) in TABLES[name].items()}
        for row in figures.get(name) or ()
    ]


def alternative_rows(figures: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Writes the alternatives that save time, or that fit if the plan does not."""
    if "alternatives" not in figures:
        return None
    by_cost = dict[tuple[str, str], dict[str, str]]()  # among equal costs, the fewest changes
    for row in figures["alternatives"]:
        if row["fits"] and (row["time_change"] <= -MIN_SAVED or not figures["fits"]):
            text = {
                "settings": ", ".join(f"{n} = {v!r}" for n, v in row["settings"].items()),
                "step": with_unit(row["step_time_s"], "s"),
                "change": f"{row['time_change']:+.1%}",
                "bytes per device": size_text(row["bytes_per_device"]),
            }
            by_cost.setdefault((text["step"], text["bytes per device"]), text)
    return [*by_cost.values()][:MAX_ALTERNATIVES]


def run_cost_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Writes the hours of a run by cause; none if it never ends."""
    cost = figures.get("run_cost")
    if not cost or cost["wall_hours"] is None:
        return []
    names = {"failures": f"failures ({cost['failures']:,.2g})"}
    return [
        {
            "whole run": names.get(name, name),
            "time": with_unit(hours, "hours"),
            "share": with_unit(hours / cost["wall_hours"], "share"),
        }
        for name, hours in [*cost["hours"].items(), ("all", cost["wall_hours"])]
    ]


def memory_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Writes the memory of a device by cause."""
    sizes = figures["bytes_by_cause"] | {"all": figures["bytes_per_device"]}
    if figures["memory_bytes"] is not None:
        sizes["available"] = figures["memory_bytes"]
    return [{"memory per device": name, "bytes": size_text(size)} for name, size in sizes.items()]


def collective_rows(collectives: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Writes collectives, as summed by `by_line`."""
    return [
        {
            **({"part": row["part"]} if "part" in row else {}),
            "collective": row["kind"],
            "over": ", ".join(row["mesh_axes"]),
            "times": row["count"],
            "received": size_text(row["received_bytes"]),
            "takes": with_unit(row["seconds"] or None, "s"),
            "overlaps compute": "yes" if row["overlaps"] else "no",
            "weight": row["weight"],
            "for": row["source"],
        }
        for row in collectives
    ]


def print_comparison(plans: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the figures of several plans for training, or several for decoding, one row each."""
    rows = []
    for name, figures in plans.items():
        received_bytes = sum(row["received_bytes"] for row in figures["collectives"])
        row = {FIGURES[key].label: value_text(figures, key) for key in COMPARED if key in figures}
        rows.append({"layout": name} | row | {"traffic per device": size_text(received_bytes)})
    print(text_table(rows))


def print_plan(title: str, figures: Mapping[str, Any]) -> None:
    """Prints a plan for training or decoding from its figures."""
    lines = by_line(
        {**row, "source": row["model_part"] + ", backward" * row["source"].endswith("(backward)")}
        for row in figures["collectives"] if row.get("part", "token") == "token"
    )  # fmt: skip
    times = [
        [
            {heading: name, "s": f"{s:.4g}", "share": f"{s / figures[whole]:.1%}"}
            for name, s in (figures.get(parts) or {}).items()
        ]
        for heading, (parts, whole) in TIMES.items()
    ]
    tables = [
        memory_rows(figures), rows_of(figures, "weights"),
        collective_rows(lines[:MAX_COLLECTIVES]), *times, part_rows(figures),
        rows_of(figures, "longest_other"),
    ]  # fmt: skip
    spent, alternatives = run_cost_rows(figures), alternative_rows(figures)
    values = {"title": title, "figures": figures, "spent": spent, "alternatives": alternatives}
    print(render("commands/planning/plan.txt", tables=tables, **values), end="")


def write_page(file: str, title: str, figures: Mapping[str, Any]) -> None:
    """Writes the page of a plan for training or decoding from its figures."""
    parts = figures.get("step_time_by_part") or ()
    lines = defaultdict[str, list[dict[str, Any]]](list)
    for line in by_line(figures["collectives"]):
        lines[line["model_part"]].append(line)
    text = render(
        "commands/planning/plan.html",
        title=title,
        figures=figures,
        head=head(figures),
        times=[(h, figures.get(parts), figures.get(whole)) for h, (parts, whole) in TIMES.items()],
        seconds_by_part={row["part"]: seconds_of(row) for row in parts},
        by_part=part_rows(figures),
        other=rows_of(figures, "longest_other"),
        spent=run_cost_rows(figures),
        alternatives=alternative_rows(figures),
        collectives={part: (rows, collective_rows(rows)) for part, rows in lines.items()},
        weights=rows_of(figures, "weights"),
    )
    with open_output(file) as output:
        output.write(text)
    click.echo(f"Wrote {file}.")


def head(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns the single figures as rows of a table, each with its meaning."""
    return [
        {
            "figure": FIGURES[name].label,
            "value": value_text(figures, name),
            "meaning": FIGURES[name].meaning,
        }
        for name in HEAD
        if figures.get(name) is not None or name in SHOWN_AS_NULL & figures.keys()
    ]


def value_text(figures: Mapping[str, Any], name: str) -> str:
    """Writes a single figure, or the meaning of its absence."""
    figure, value = FIGURES[name], figures[name]
    return figure.null if value is None and figure.null else with_unit(value, figure.unit)
