"""Shows users what happens: log records, progress bars, tables and one-line summaries."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trainer.processes.peers import is_first_process

# Without emoji, which ":x" in a layout would become; plain text in notebooks, as in pipes.
console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, force_jupyter=False)

# What concerns one process: its connections, and what it prepares on its disk.
LOCAL_LOGGERS = ("data", "trainer.prepare", "trainer.processes")


class LogHandler(logging.Handler):
    """Shows log records on the standard error, above a live bar if there is one.

    If every process of a run logs a record, only process 0 shows it; warnings are shown by all.
    """

    def emit(self, record: logging.LogRecord) -> None:
        is_local = record.levelno >= logging.WARNING or record.name.startswith(LOCAL_LOGGERS)
        if is_local or is_first_process():
            console.print(self.format(record), markup=False)


def show_log_records(*loggers: str) -> None:
    """Shows what these loggers and their children log; calling it again changes nothing."""
    for name in loggers:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # libraries give the root logger a handler of their own
        if not any(isinstance(handler, LogHandler) for handler in logger.handlers):
            logger.addHandler(LogHandler())


show_log_records("trainer", "data")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows under headers to the standard output, with numbers aligned right."""
    print(table_text(headers, rows), end="")


def table_text(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats rows under headers as the standard output shows them."""
    rows = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False)
    for i, header in enumerate(headers):
        number = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else str(x) for x in row))
    width = None if sys.stdout.isatty() else 240  # files and pipes have no edge to wrap at
    out = Console(
        file=sys.stdout, highlight=False, markup=False, emoji=False, width=width,
        force_jupyter=False,
    )  # fmt: skip
    with out.capture() as capture:
        out.print(table)
    return capture.get()


def print_note(*texts: str, in_each_process: bool = False) -> None:
    """Prints lines for the user to the standard error; results go to the standard output."""
    if in_each_process or is_first_process():
        for text in texts:
            console.print(text, markup=False)


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that shows how much of a total is done; silent without a terminal."""
    is_shown = console.is_terminal and is_first_process()
    with Progress(console=console, disable=not is_shown, transient=True) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
