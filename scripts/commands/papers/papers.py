"""Runs `meshloom papers`: lists what the papers publish and ours, and computes items again."""

import functools
from pathlib import Path
from typing import Any

from data.storage.files import atomic_write
from layouts.cost.interconnect import Topology
from scripts.commands.common import write_json
from scripts.commands.papers.figures import SOURCES
from scripts.commands.papers.flags import PapersFlags
from scripts.commands.papers.items import (
    COLUMNS,
    PAPERS,
    Drawing,
    Item,
    item_named,
    key_of,
    keyed_items,
)
from scripts.commands.papers.page import (
    LIST_HEAD,
    PAGE,
    commands_of,
    page,
    rows_under,
    table_of,
    value_of,
)
from scripts.devices import start_devices
from scripts.terminal import print_note, print_table
from trainer.metrics.plots import png_of


def show_papers(flags: PapersFlags) -> None:
    """Prints the list or an item, or writes the page."""
    start_devices()
    if flags.output is not None:
        write(flags.output, flags.table)
    if flags.table is not None:
        show_item(flags, flags.table)
    elif flags.output is None:
        show_list(flags)


def show_list(flags: PapersFlags) -> None:
    """Prints the lists of docs/papers.md."""
    rows = [
        {"name": key_of(name, item)} | row
        for name, paper in PAPERS.items()
        for item, row in zip(paper.items, rows_under(PAGE.read_text(), paper.title), strict=True)
    ]
    head = ["name", *LIST_HEAD[1:5]]
    print_table(head, [[row[column] for column in head] for row in rows])
    print_note("As docs/papers.md has it; --table=NAME computes one of them again.")
    write_json(flags.json_file, rows)


def show_item(flags: PapersFlags, name: str) -> None:
    """Computes an item and prints its rows, what implements it, and its commands."""
    item = item_named(name)
    head, rows = table_of(item)
    print(f"{item.shows}.  {item.note}".strip())
    if rows:
        print_table(head, rows)
    for line in (item.published, *item.files, item.reason, *commands_of(item)):
        if line:
            print(line)
    write_json(flags.json_file, {"head": head, "rows": rows, "commands": commands_of(item)})


def write(folder: Path, table: str | None) -> None:
    """Writes the page and all pictures, or the picture of one item."""
    items = keyed_items() if table is None else {table: item_named(table)}
    (pictures := folder / "papers").mkdir(parents=True, exist_ok=True)
    if table is None:
        atomic_write(folder / "papers.md", page())
    for key, item in items.items():
        if item.draw is not None:
            atomic_write(pictures / f"{key}.png", picture(item))
    print_note(f"Wrote {folder}.")


def picture(item: Item) -> bytes:
    """Draws the picture of an item, as a PNG file."""
    assert item.draw is not None
    draw = {"bars": bars, "lines": lines, "grid": grid}[item.draw.kind]
    return png_of(functools.partial(draw, item=item, drawing=item.draw))


def bars(pyplot: Any, item: Item, drawing: Drawing) -> Any:
    """Stacks the parts of a figure of plans, a bar for each row."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    rows = [row for row in item.rows if not row.over]
    parts = [SOURCES["plan"](*row.of)[drawing.y] for row in rows]
    bottom, colours = [0.0] * len(rows), pyplot.get_cmap("tab20").colors
    for name, color in zip(dict.fromkeys(n for part in parts for n in part), colours, strict=False):
        heights = [drawing.scale * part.get(name, 0.0) for part in parts]
        names = [row.name for row in rows]
        axes.bar(names, heights, bottom=bottom, label=name, width=0.6, color=color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(xlabel=item.row, ylabel=drawing.label)
    axes.grid(alpha=0.3, axis="y")
    figure.legend(fontsize="small", loc="outside right upper")
    return figure


def lines(pyplot: Any, item: Item, drawing: Drawing) -> Any:
    """Draws rows as points, those of one line joined."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    x, y = COLUMNS[drawing.x], COLUMNS[drawing.y]
    for name in dict.fromkeys(row.line for row in item.rows if row.line):
        points = sorted((value_of(x, r), value_of(y, r)) for r in item.rows if r.line == name)
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    if drawing.logarithmic:
        axes.set_xscale("log", base=2)
    if drawing.logarithmic and not y.format.endswith("%}"):
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0, None)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel=x.head, ylabel=y.head)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def grid(pyplot: Any, item: Item, drawing: Drawing) -> Any:
    """Draws the chips of a slice for each order of devices, each with its partition."""
    figure, panels = pyplot.subplots(1, len(item.rows), figsize=(8, 3), layout="constrained")
    for row, axes in zip(item.rows, panels, strict=True):
        places = SOURCES["order"](*row.of)["coordinates"]
        for i, of_row in enumerate(places):
            for j, (x, y, *_) in enumerate(of_row):
                axes.add_patch(pyplot.Rectangle((y - 0.45, x - 0.45), 0.9, 0.9, color=f"C{i}"))
                axes.annotate(f"{i}, {j}", (y, x), ha="center", va="center", color="white")
        height, width = Topology.named(row.of[1]).extents
        axes.set(title=row.name, xlim=(-0.6, width - 0.4), ylim=(height - 0.4, -0.6))
        axes.set(aspect="equal", xlabel="y", ylabel="x", xticks=range(width), yticks=range(height))
    return figure
