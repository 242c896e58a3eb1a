"""Shows the progress of a training run."""

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from scripts.terminal import console, print_note
from trainer.observers import Observer, StepResult
from trainer.processes.peers import is_first_process
from trainer.run import Run

PLAIN_EVERY = 20  # lines of progress in a log that is no terminal


class ProgressBar(Observer):
    """Shows a live bar on a terminal, a line now and then in a log."""

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
            disable=not (console.is_terminal and is_first_process()),
        )

    def on_start(self, run: Run, first_step: int) -> None:
        self._first, self._steps = first_step, run.steps
        self._task = self._progress.add_task(
            "train", total=run.steps, completed=first_step, numbers="compiling"
        )
        self._progress.start()

    def on_step(self, result: StepResult) -> None:
        step, steps, line = result.step, self._steps, result.line
        step_s = line["step_s"] or 0.0
        numbers = f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s"
        if console.is_terminal:
            self._progress.update(self._task, completed=step, numbers=numbers)
        elif step == self._first + 1:  # compiling is part of it, so it says nothing of the rest
            print_note(f"step {step}/{steps}  loss {line['loss']:.3f}  after {step_s:.1f} s")
        elif step % max(1, steps // PLAIN_EVERY) == 0:
            print_note(f"step {step}/{steps}  {numbers}  {(steps - step) * step_s:.0f} s left")

    def close(self) -> None:
        self._progress.stop()
