"""Writes what the papers publish and ours side by side: tables of items, and docs/papers.md."""

import hashlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax

from configs.errors import UserError
from configs.load import load
from layouts.cost.collectives import CHECKOUT
from scripts.commands.papers.figures import SOURCES
from scripts.commands.papers.items import COLUMNS, FOLDER, PAPERS, RUNS, Column, Item, Row, key_of

PAGE = CHECKOUT / "docs" / "papers.md"
LIST_HEAD = ["item", "shows", "published", "ours", "how", "where, or why not"]


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
    picture = f"papers/{key}.png" if item.draw else item.picture
    table = markdown(*table_of(item))
    parts = [
        f"### {title}, {item.name}",
        f"{item.shows}. {item.note}".strip(),
        table,
        f"![{item.shows}]({picture})" if picture else "",
        "\n".join(["```", f"meshloom papers --table={key}", *commands_of(item)[:1], "```"]),
        f"<!-- {digest(item, table)} -->\n",
    ]
    return "\n\n".join(filter(None, parts))


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
