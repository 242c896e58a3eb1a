"""Writes a profile of some training steps into the model directory."""

import re
from pathlib import Path
from typing import NamedTuple

import jax

from configs.errors import UserError, brief
from data.storage.files import WorkingFolder
from trainer.observers import Observer, StepResult

FOLDER = "profile"  # in the model directory


class ProfileSteps(NamedTuple):
    """Holds the first and the last step of a profile, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, steps: int) -> "ProfileSteps":
        """Parses the range of steps, which must be within the steps of the run.

        >>> ProfileSteps.parse("10:13", steps=100)
        ProfileSteps(first=10, last=13)
        """
        match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
        chosen = cls(int(match[1]), int(match[2])) if match else None
        if chosen is None or not 1 <= chosen.first <= chosen.last <= steps:
            raise UserError(
                f"--profile_steps={brief(text)}: not a range of steps of this run.  Legal: the "
                "first and the last step with a colon between them, as in 10:13, from 1 to "
                f"{steps} (Run.steps)."
            )
        return chosen


class Profile(Observer):
    """Profiles a range of steps with `jax.profiler`, in the first process.

    The range begins where its first step is dispatched, while the one before may still run, and
    ends with the metrics of its last step, or with the run.
    """

    def __init__(self, model_dir: Path, steps: ProfileSteps):
        self._target = model_dir / FOLDER
        self._steps = steps
        self._is_running = False

    def before_step(self, step: int) -> None:
        if step == self._steps.first and jax.process_index() == 0:
            self._folder = WorkingFolder(self._target)
            jax.profiler.start_trace(str(self._folder.path))
            self._is_running = True

    def on_step(self, result: StepResult) -> None:
        if result.step == self._steps.last:
            self.close()

    def close(self) -> None:
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()
            self._folder.close()
