"""What a person sees: a live progress line, tables, one-line summaries."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# No emoji, or ":x" in a layout becomes one.
console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
PLAIN_EVERY = 20  # lines of progress in a log that is no terminal


class Terminal:
    """Shows a training run: a live bar on a terminal, a line now and then in a log."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._first = self._steps = 0

    def __enter__(self) -> "Terminal":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        console.print(text, markup=False)

    def start(self, first_step: int, steps: int) -> None:
        self._first, self._steps = first_step, steps
        self._task = self._progress.add_task(
            "train", total=steps, completed=first_step, numbers="compiling"
        )

    def step(self, line: dict[str, float | None]) -> None:
        step, step_s = int(line["step"] or 0), line["step_s"] or 0.0
        numbers = f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s"
        if console.is_terminal:
            self._progress.update(self._task, completed=step, numbers=numbers)
        elif step == self._first + 1:  # compiling is part of it, so it says nothing of the rest
            self.say(f"step {step}/{self._steps}  loss {line['loss']:.3f}  after {step_s:.1f} s")
        elif step % max(1, self._steps // PLAIN_EVERY) == 0:
            left = (self._steps - step) * step_s
            self.say(f"step {step}/{self._steps}  {numbers}  {left:.0f} s left")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows under headers to the standard output; numbers to the right."""
    rows = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False)
    for i, header in enumerate(headers):
        number = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else str(x) for x in row))
    width = None if sys.stdout.isatty() else 240  # files and pipes have no edge to wrap at
    out = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)
    out.print(table)


def tell(text: str) -> None:
    """A line for the user, beside the results that go to the standard output."""
    console.print(text, markup=False)


class Bar:
    """A bar for work of known length; silent where there is no terminal."""

    def __init__(self, name: str) -> None:
        self._progress = Progress(console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task(name, total=None)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
