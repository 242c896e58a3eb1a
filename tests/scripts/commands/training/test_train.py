"""`meshloom train`: what it says of mistakes in its own flags."""

from pathlib import Path

import pytest

from tests.scripts.conftest import Meshloom
from tests.trainer.command import settings


@pytest.mark.parametrize("steps", ["0:2", "12", "5:4", "10:1000"])
def test_no_range_of_steps_ends_before_anything_is_written(
    run: Meshloom, tmp_path: Path, steps: str
) -> None:
    model_dir = tmp_path / "model"
    params = (f"--gin_param={setting}" for setting in settings(tmp_path / "text.txt"))
    given = ("--gin_file=layouts/data_parallel.gin", *params)
    answer = run("train", f"--model_dir={model_dir}", *given, f"--profile_steps={steps}")
    assert answer.code == 2 and "as in 10:13, from 1 to 160 (Run.steps)." in answer.error
    assert not model_dir.exists()
