"""Runs `meshloom papers`: lists what the papers publish and ours."""

import re
import textwrap
from collections.abc import Iterator

from configs.errors import UserError, did_you_mean
from configs.imports import CHECKOUT
from scripts.commands.common import write_json
from scripts.commands.papers import items
from scripts.commands.papers.figures import SOURCES
from scripts.commands.papers.flags import PapersFlags
from scripts.devices import start_devices
from scripts.terminal import print_note, print_table

PAGE = CHECKOUT / "docs" / "papers.md"
LIST_HEAD = ["item", "shows", "published", "ours", "how", "where, or why not"]


def show_papers(flags: PapersFlags) -> None:
    """Prints the lists of docs/papers.md, or an item."""
    start_devices()
    if flags.table is not None:
        return show_item(flags, flags.table)
    rows = [
        {"name": items.key_of(name, item)} | row
        for name, paper in items.PAPERS.items()
        for item, row in zip(paper.items, rows_under(PAGE.read_text(), paper.title), strict=True)
    ]
    head = ["name", *LIST_HEAD[1:5]]
    print_table(head, [[row[column] for column in head] for row in rows])
    print_note("As docs/papers.md has it; --table=NAME computes one of them again.")
    write_json(flags.json_file, rows)


def show_item(flags: PapersFlags, name: str) -> None:
    """Computes an item and prints its rows, what implements it, and its commands."""
    if name not in items.ITEMS_BY_KEY:
        raise UserError(
            f"--table={name}: no such item.{did_you_mean(name, items.ITEMS_BY_KEY)}  "
            "Legal: the names that `meshloom papers` lists, such as gshard_table_3."
        )
    item = items.ITEMS_BY_KEY[name]
    head, rows = table_of(item)
    print(f"{item.shows}.  {item.note}".strip())
    if rows:
        print_table(head, rows)
    for line in (item.published, *item.files, item.reason, *commands_of(item)):
        if line:
            print(line)
    write_json(flags.json_file, {"head": head, "rows": rows, "commands": commands_of(item)})


def published(row: items.Row, name: str) -> str:
    """Writes what a paper publishes for a column of a row."""
    value = row.published.get(name, "")
    return value if isinstance(value, str) else items.COLUMNS[name].format.format(value)


def ours(row: items.Row, name: str) -> str:
    """Writes what we have for a column of a row; empty if nothing."""
    column = items.COLUMNS[name]
    if name in row.records:
        return read_record(row.records[name])
    if column.by == "record" and row.of:
        return read_record(tuple(word.replace("ROW", row.of[0]) for word in column.of))
    if column.by and row.of and column.ratio == bool(row.over):
        return compared(column, value_of(column, row), row.published.get(name))
    return ""


def value_of(column: items.Column, row: items.Row) -> float | str:
    """Returns the figure of a row in the unit of its column, or how many times that of `over`."""
    values = [SOURCES[column.by](*words)[column.figure] for words in (row.of, row.over) if words]
    if isinstance(values[0], str):
        return values[0]
    value, *over = (column.scale / v if column.inverse else column.scale * v for v in values)
    return value / over[0] if over and over[0] else value


def compared(column: items.Column, value: float | str, published: float | str | None) -> str:
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
    raise UserError(f"{file}, {heading!r}: no table there has a row {row!r} and column {column!r}.")


def table_of(item: items.Item) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of an item: each column as published, and ours next to it."""
    head, rows = [item.row], [[row.name] for row in item.rows]
    for name in item.columns:
        for how, write in (("published", published), (items.COLUMNS[name].how, ours)):
            texts = [write(row, name) for row in item.rows]
            if any(texts):
                head.append(f"{items.COLUMNS[name].head}: {how}")
                rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    return head, rows


def commands_of(item: items.Item) -> list[str]:
    """Returns the commands behind an item: that of its records, and those of its runs."""
    names = dict.fromkeys(row.of[0] for row in item.rows if row.of and row.of[0] in items.RUNS)
    plans = any(items.COLUMNS[name].by == "plan" for name in item.columns)
    return [*filter(None, [item.command]), *(command_of(name, plans) for name in names)]


def command_of(name: str, plans: bool) -> str:
    """Returns the command that plans a run, or that counts its weights."""
    run = items.RUNS[name]
    files = [f"--gin_file={file}" for file in run.files]
    settings = [f'--gin_param="{setting}"' for setting in run.settings]
    flags = [f"--{flag}={number}" for flag, number in run.decoding.items()]
    work = ["plan", *["--decode"] * bool(flags), f"--topology={run.topology}", "--analytic"]
    words = [*work, *files, *settings, *flags] if plans else ["inspect", "params", *files]
    command = " ".join(["meshloom", *words])
    lines = textwrap.wrap(command, 116, break_long_words=False, break_on_hyphens=False)
    return " \\\n  ".join(lines)
