"""`meshloom train`: what it says of mistakes in its own flags."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.train import profile_observers
from tests.scripts.conftest import Meshloom, Place
from tests.trainer.command import settings
from tests.trainer.test_loop import RUN
from trainer.metrics.jsonl import read_lines


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


def test_a_run_that_was_started_again_profiles_steps_to_come_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = TrainFlags(model_dir=tmp_path, profile_steps="3:4")
    assert len(profile_observers(flags, RUN, first_step=2)) == 1
    assert not capsys.readouterr().err
    assert profile_observers(flags, RUN, first_step=3) == []
    assert "no profile: the run resumes after step 3" in capsys.readouterr().err


def test_a_run_continues_with_layers_in_stages_and_without(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    """From step 2 to 4 in stages, and once more from step 3 on without: the files are the same."""
    place = dataclasses.replace(trained, folder=tmp_path)
    shutil.copytree(trained.folder / "run", tmp_path / "run")
    for layout, stages in (("pipeline", 2), ("whole", 1)):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
        flags = place.flags("Run.checkpoint_every = 1", layout=layout)
        answer = run("train", place.model_dir, *flags)
        assert answer.code == 0, answer.error
        assert json.loads((tmp_path / "run" / "plan.json").read_text())["stages"] == stages
        computed, expected = (
            {line["step"]: line["loss"] for line in read_lines(folder / "run" / "metrics.jsonl")}
            for folder in (tmp_path, trained.folder)
        )
        assert computed == pytest.approx(expected, rel=2e-6)
