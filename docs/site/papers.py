"""Writes docs/papers.md and its pictures: `make papers`, in some minutes.

`python -m docs.site.papers FOLDER` writes them into another folder.
"""

import functools
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import jax

from configs.load import load
from data.storage.files import atomic_write
from layouts.cost.interconnect import Topology
from scripts.commands.papers.items import (
    COLUMNS,
    FOLDER,
    ITEMS_BY_KEY,
    PAPERS,
    RUNS,
    Drawing,
    Item,
    key_of,
)
from scripts.commands.papers.papers import (
    LIST_HEAD,
    PAGE,
    SOURCES,
    commands_of,
    ours,
    published,
    table_of,
    value_of,
)
from scripts.devices import start_devices
from scripts.templates import render
from trainer.metrics.plots import png_of


def write(folder: Path) -> None:
    """Writes the page and all pictures."""
    (pictures := folder / "papers").mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "papers.md", page())
    for key, item in ITEMS_BY_KEY.items():
        if item.draw is not None:
            atomic_write(pictures / f"{key}.png", picture(item))


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


def list_row(item: Item) -> list[str]:
    """Returns what the list says of an item: the first number that both sides have."""
    numbers = [(published(row, name), ours(row, name), row.name, COLUMNS[name])
               for row in item.rows for name in item.columns]  # fmt: skip
    numbers.sort(key=lambda number: not (number[0] and number[1]))  # keeps the order otherwise
    theirs = [f"{row}: {text} {column.head}" for text, _, row, column in numbers if text]
    ours_texts = [f"{row}: {text} {column.head}" for _, text, row, column in numbers if text]
    hows = dict.fromkeys(column.how for _, text, _, column in numbers if text)
    words = [*hows, *["implemented"] * bool(item.files)]
    words += ["numbers not reproduced"] * (not hows and bool(numbers))
    where = "; ".join(filter(None, [", ".join(map(link, item.files)), item.reason]))
    return [item.name, item.shows, item.published or "".join(theirs[:1]), "".join(ours_texts[:1]),
            ", ".join(words) or "not reproduced", where]  # fmt: skip


def link(file: str) -> str:
    """Links a file of the checkout from a page of docs/."""
    return f"[{Path(file).name}]({file[5:] if file.startswith('docs/') else f'../{file}'})"


def digest(item: Item, table: str) -> str:
    """Hashes an item, its columns, all settings of its runs, and its table as written."""
    names = {words[0] for row in item.rows for words in (row.of, row.over) if words}
    settings = [
        (name, RUNS[name], [(b.name, repr(b.value)) for b in load(*files).bound.values()])
        for name in sorted(names & RUNS.keys())
        for files in [(RUNS[name].files, RUNS[name].settings)]
    ]
    parts = (item, [COLUMNS[name] for name in item.columns], settings, table)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def section(key: str, title: str, item: Item) -> str:
    """Returns the section of an item that has rows or a picture."""
    table = markdown(*table_of(item))
    made = {"table": table, "commands": commands_of(item)[:1], "digest": digest(item, table)}
    return render("commands/papers/section.md", key=key, title=title, item=item, **made)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Writes a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page() -> str:
    """Returns docs/papers.md."""
    version = ".".join(jax.__version__.split(".")[:2])
    parts = [(FOLDER / "introduction.md").read_text().replace("VERSION", version)]
    for name, paper in PAPERS.items():
        rows, sections = [], []
        for item in paper.items:
            rows.append(list_row(item))
            if item.rows:
                heading = re.sub(r"[^\w -]", "", f"{paper.title}, {item.name}".lower())
                rows[-1][0] = f"[{item.name}](#{heading.replace(' ', '-')})"
                sections.append(section(key_of(name, item), paper.title, item))
        items = markdown(LIST_HEAD, rows)
        parts += [f"## {paper.title}\n\n{paper.citation}\n\n{items}\n", *sections]
    return "\n".join(parts)


if __name__ == "__main__":
    start_devices()
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE.parent)
