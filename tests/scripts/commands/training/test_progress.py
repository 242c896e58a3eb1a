"""The lines of progress of a training run."""

import dataclasses

import pytest

from scripts.commands.training.progress import ProgressBar
from tests.trainer.test_loop import RUN
from trainer.observers import StepResult


def test_rates_are_of_all_steps_since_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A step that is read right after the one before has no rate of its own."""
    bar, run = ProgressBar(), dataclasses.replace(RUN, steps=80)
    bar.on_start(run, 3)
    for step, step_s in ((4, 9.0), (5, 1.0), (6, 2.0), (7, 0.999), (8, 0.001)):
        line = {"loss": 2.5, "tokens": 100.0, "step_s": step_s, "learning_rate": 0.00123456}
        bar.on_step(StepResult(step, {**line, "step": step, "tokens_per_s": 100 / step_s}, {}))
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 4/80  loss 2.500  learning rate 0.00123  after 9.0 s",
        "step 8/80  loss 2.500  learning rate 0.00123  100 tokens/s  72 s left",
    ]
