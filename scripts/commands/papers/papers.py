"""Runs `meshloom papers`: lists what the papers publish and ours, and computes items again."""

from pathlib import Path

from data.storage.files import atomic_write
from scripts.commands.common import write_json
from scripts.commands.papers.flags import PapersFlags
from scripts.commands.papers.items import PAPERS, item_named, key_of, keyed_items
from scripts.commands.papers.page import LIST_HEAD, PAGE, commands_of, page, rows_under, table_of
from scripts.commands.papers.pictures import picture
from scripts.devices import start_devices
from scripts.terminal import print_note, print_table


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
