"""`meshloom train`: what it says of mistakes in its own flags."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs.load import load
from scripts.commands.inspect.layout import model_of
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.start import note_no_export
from scripts.commands.training.train import profile_observers
from tests.scripts.conftest import Meshloom, Place
from tests.trainer.command import settings
from tests.trainer.test_loop import RUN
from trainer.metrics.jsonl import read_lines
from trainer.processes.training_lock import lock


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


def test_a_start_waits_for_no_preparation_while_another_trains(
    run: Meshloom, tmp_path: Path
) -> None:
    """What it read before would be of the run before: step, settings and text."""
    model_dir = tmp_path / "model"
    (tmp_path / "text.txt").write_text("kara mila\n" * 50)
    params = (f"--gin_param={setting}" for setting in settings(tmp_path / "text.txt"))
    flags = (f"--data_dir={tmp_path / 'data'}", "--gin_file=layouts/data_parallel.gin", *params)
    with lock(model_dir):
        answer = run("train", f"--model_dir={model_dir}", *flags)
        assert answer.code == 2 and "another training is under way there" in answer.error
        assert not (tmp_path / "data").exists()
    assert not model_dir.exists()


def test_a_run_that_was_started_again_profiles_steps_to_come_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = TrainFlags(model_dir=tmp_path, profile_steps="3:4")
    assert len(profile_observers(flags, RUN, first_step=2)) == 1
    assert not capsys.readouterr().err
    assert profile_observers(flags, RUN, first_step=3) == []
    assert "no profile: the run resumes after step 3" in capsys.readouterr().err


def test_training_says_at_its_start_that_a_model_has_no_export(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note_no_export(RUN)
    words = "`meshloom export hf` cannot write this model: Hugging Face's llama has another"
    assert f"{words} Transformer.positions, Mlp.gated (" in capsys.readouterr().err
    for file in ("models/transformer_tiny.gin", "models/tiny.gin"):
        note_no_export(dataclasses.replace(RUN, model=model_of(load([f"configs/{file}"]))))
        kind = "t5" if "transformer" in file else "llama"
        assert f"Hugging Face's {kind} has another" in capsys.readouterr().err
    for file in ("models/tiny_llama.gin", "models/small.gin", "runs/news_tuned.gin"):
        model = model_of(load([f"configs/{file}"]))
        note_no_export(dataclasses.replace(RUN, model=model))
    assert not capsys.readouterr().err


@pytest.mark.long
def test_a_run_continues_with_layers_in_stages_and_without(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    """Checkpoints are the same under any layout and schedule: each leg continues the one before.

    The first step runs in a circular pipeline, and each other one under another layout.
    """
    params = "Transformer.layers = 4", "Run.microbatches = 2", "Run.checkpoint_every = 1"
    flags = place.flags(*params, "Run.steps = 3")
    answer = run("train", f"--model_dir={tmp_path / 'straight'}", *flags)
    assert answer.code == 0, answer.error
    layouts = [
        ("pipeline", ("Layout.pipeline_repeats = 2",), 2),
        ("fsdp", ("Layout.mesh = 'data:4'",), 1),
        ("pipeline", ("Layout.mesh = 'data:2,pipe:4'",), 4),
    ]
    for step, (layout, changes, stages) in enumerate(layouts, 1):
        given = (*params, *changes, f"Run.steps = {step}")
        answer = run("train", place.model_dir, *place.flags(*given, layout=layout))
        assert answer.code == 0, answer.error
        assert json.loads((tmp_path / "run" / "plan.json").read_text())["stages"] == stages
    computed, expected = (
        {line["step"]: line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")}
        for name in ("run", "straight")
    )
    assert list(computed) == [1, 2, 3]
    assert computed == pytest.approx(expected, rel=2e-6)
