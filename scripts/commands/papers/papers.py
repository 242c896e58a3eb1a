"""Runs `meshloom papers`: lists what the papers publish and ours, and writes docs/papers.md."""

import functools
import hashlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from configs.errors import UserError
from configs.load import load
from data.storage.files import atomic_write
from layouts.cost.collectives import CHECKOUT
from layouts.cost.interconnect import Topology
from scripts.commands.common import write_json
from scripts.commands.papers.figures import SOURCES
from scripts.commands.papers.flags import PapersFlags
from scripts.commands.papers.items import (
    COLUMNS,
    FOLDER,
    ITEMS_BY_KEY,
    PAPERS,
    RUNS,
    Column,
    Drawing,
    Item,
    Row,
    item_named,
    key_of,
)
from scripts.devices import start_devices
from scripts.templates import render
from scripts.terminal import print_note, print_table
from trainer.metrics.plots import png_of

PAGE = CHECKOUT / "docs" / "papers.md"
LIST_HEAD = ["item", "shows", "published", "ours", "how", "where, or why not"]


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
    items = ITEMS_BY_KEY if table is None else {table: item_named(table)}
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


def published(row: Row, name: str) -> str:
    """Writes what a paper publishes for a column of a row."""
    value = row.published.get(name, "")
    return value if isinstance(value, str) else COLUMNS[name].format.format(value)


def ours(row: Row, name: str) -> str:
    """Writes what we have for a column of a row; empty if nothing."""
    column = COLUMNS[name]
    if name in row.records:
        return read_record(row.records[name])
    if column.by == "record" and row.of:
        return read_record(tuple(word.replace("ROW", row.of[0]) for word in column.of))
    if column.by and row.of and column.ratio == bool(row.over):
        return compared(column, value_of(column, row), row.published.get(name))
    return ""


def value_of(column: Column, row: Row) -> float | str:
    """Returns the figure of a row in the unit of its column, or how many times that of `over`."""
    values = [SOURCES[column.by](*words)[column.figure] for words in (row.of, row.over) if words]
    if isinstance(values[0], str):
        return values[0]
    value, *over = (column.scale / v if column.inverse else column.scale * v for v in values)
    return value / over[0] if over and over[0] else value


def compared(column: Column, value: float | str, published: float | str | None) -> str:
    """Writes a value, and its difference from a published number."""
    if isinstance(value, str) or value == 0:
        return str(value or "0")
    text = column.format.format(value)
    if isinstance(published, str | None) or text == column.format.format(published):
        return text
    difference = f"{value / published - 1:+.0%}"
    return text if difference in ("+0%", "-0%") else f"{text} ({difference})"


def rows_under(text: str, heading: str) -> Iterator[dict[str, str]]:
    """Yields the rows of the tables under a heading of a page, up to the next heading."""
    _, _, rest = text.partition(f"# {heading}\n")
    head: list[str] = []
    for line in re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0].splitlines():
        cells = [c.replace("**", "").strip() for c in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if head and cells and not cells[0].startswith("---"):
            yield dict(zip(head, cells, strict=False))
        head = (head or cells) if cells else []


def read_record(words: tuple[str, ...]) -> str:
    """Reads a cell of a table of a page: file, heading, first cell of the row, head of a column."""
    file, heading, row, column = words
    for cells in rows_under((CHECKOUT / file).read_text(), heading):
        if next(iter(cells.values())) == row and column in cells:
            return cells[column]
    raise UserError(
        f"{file}, {heading!r}: no table there has a row {row!r} and a column {column!r}."
    )


def table_of(item: Item) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of an item: each column as published, and ours beside it."""
    head, rows = [item.row], [[row.name] for row in item.rows]
    for name in item.columns:
        for how, write in (("published", published), (COLUMNS[name].how, ours)):
            texts = [write(row, name) for row in item.rows]
            if any(texts):
                head.append(f"{COLUMNS[name].head}: {how}")
                rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    return head, rows


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


def commands_of(item: Item) -> list[str]:
    """Returns the commands behind an item: that of its records, and those of its runs."""
    names = dict.fromkeys(row.of[0] for row in item.rows if row.of and row.of[0] in RUNS)
    plans = any(COLUMNS[name].by == "plan" for name in item.columns)
    return [*filter(None, [item.command]), *(command_of(name, plans) for name in names)]


def command_of(name: str, plans: bool) -> str:
    """Returns the command that plans a run, or that counts its weights."""
    run = RUNS[name]
    files = [f"--gin_file={file}" for file in run.files]
    settings = [f'--gin_param="{setting}"' for setting in run.settings]
    flags = [f"--{flag}={number}" for flag, number in run.decoding.items()]
    work = ["plan", *["--decode"] * bool(flags), f"--topology={run.topology}", "--analytic"]
    words = [*work, *files, *settings, *flags] if plans else ["inspect", "params", *files]
    command = " ".join(["meshloom", *words])
    lines = textwrap.wrap(command, 116, break_long_words=False, break_on_hyphens=False)
    return " \\\n  ".join(lines)


def digest(item: Item, table: str) -> str:
    """Hashes an item, its columns, all settings of its runs, and its table as written."""
    names = {words[0] for row in item.rows for words in (row.of, row.over) if words}
    settings = [
        (name, RUNS[name], [(b.name, repr(b.value)) for b in load(*files).bindings()])
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
