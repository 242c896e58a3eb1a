"""Shows the progress of a training run, and of preparing its data."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from rich import progress

from data.build import OnProgress
from data.packing.rows import Counts
from scripts.terminal import console, print_note
from trainer.observers import Observer, StepResult
from trainer.processes.peers import is_first_process
from trainer.run import Run

PLAIN_EVERY = 20  # lines of progress in a log


class ProgressBar(Observer):
    """Shows a live bar on a terminal, or a line now and then in a log."""

    def __init__(self) -> None:
        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal and is_first_process()),
        )

    def on_start(self, run: Run, first_step: int) -> None:
        self._first, self._steps = first_step, run.total_steps
        self._unit = "preferences" if run.task.has_rejected else run.task.unit
        # Results come late and some two at a time, so only a mean over several steps is a rate.
        self._recent: deque[tuple[float, float]] = deque(maxlen=max(1, self._steps // PLAIN_EVERY))
        self._task = self._progress.add_task(
            "train", total=self._steps, completed=first_step, numbers="compiling"
        )
        self._progress.start()

    def on_step(self, result: StepResult) -> None:
        step, steps, line = result.step, self._steps, result.line
        tokens, step_s, loss = line["tokens"] or 0.0, line["step_s"] or 0.0, line["loss"]
        shown = f"loss {loss:.3f}  learning rate {line['learning_rate']:.3g}"
        if step == self._first + 1:  # it includes compilation, so it says nothing about the rest
            numbers, left = shown, f"after {step_s:.1f} s"
        else:
            self._recent.append((tokens, step_s))
            recent_tokens, recent_s = map(sum, zip(*self._recent, strict=True))
            rate = recent_tokens / max(recent_s, 1e-9)
            numbers = f"{shown}  {rate:,.0f} {self._unit}/s"
            left = f"{(steps - step) * recent_s / len(self._recent):.0f} s left"
        if console.is_terminal:
            self._progress.update(self._task, completed=step, numbers=numbers)
        elif step == self._first + 1 or step % max(1, steps // PLAIN_EVERY) == 0:
            print_note(f"step {step}/{steps}  {numbers}  {left}")

    def close(self) -> None:
        self._progress.stop()


@contextlib.contextmanager
def build_bar() -> Iterator[OnProgress | None]:
    """Shows how much text is packed on a terminal; elsewhere, the log says it now and then."""
    if not (console.is_terminal and is_first_process()):
        yield None
        return
    begun: dict[str, tuple[progress.TaskID, float, float]] = {}

    def update(split: str, counts: Counts, share: float | None) -> None:
        """Shows the progress of a split; the rate is of what this process packed.

        If the share of the split is unknown, the bar is indeterminate.
        """
        megabytes, now = (counts.bytes + counts.source_bytes) / 1e6, time.monotonic()
        if split not in begun:
            begun[split] = bar.add_task(split, total=None, numbers=""), megabytes, now
        task, first, start = begun[split]
        minutes = (now - start) / 60
        numbers = f"{counts.lines:,} lines  {megabytes:,.0f} MB"
        numbers += f"  {(megabytes - first) / minutes:,.0f} MB/min" if minutes > 0.1 else ""
        bar.update(task, numbers=numbers, total=None if share is None else 1.0, completed=share)

    with progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
        progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        yield update
