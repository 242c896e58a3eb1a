"""A run learns preferences, resumes, and is refused where it would learn something else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.conftest import Meshloom, Place
from trainer.metrics.jsonl import read_lines

WORDS = ("kara", "lost", "mitu", "nevo", "lora")
RECORDS = [
    {"prompt": WORDS[i % 5], "chosen": WORDS[i % 3], "rejected": "nest " * (1 + i % 2)}
    for i in range(40)
]


@pytest.fixture
def flags(trained: Place, tmp_path: Path) -> list[str]:
    file = tmp_path / "preferences.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    given = [
        "Run.task = @PreferenceTask()", "PreferenceTask.name = 'p'", "PreferenceTask.length = 24",
        "PreferenceTask.source = @JsonlPreferences()", f"JsonlPreferences.train = '{file}'",
        f"JsonlPreferences.validation = '{file}'", "PreferenceTask.vocab = @SentencePiece()",
        f"Run.start_from = '{trained.folder / 'run'}'", "Run.teacher = @Dpo()",
        f"Dpo.model_dir = '{trained.folder / 'run'}'", "Transformer.dropout = 0.0",
    ]  # fmt: skip
    return Place(tmp_path, trained.text).flags(*given)


def test_preferences_are_learned_and_a_run_continues(
    run: Meshloom, flags: list[str], tmp_path: Path
) -> None:
    for folder, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            answer = run("train", f"--model_dir={tmp_path / folder}", *flags,
                         f"--gin_param=Run.steps = {count}")  # fmt: skip
            assert answer.code == 0, answer.error
    whole, parts = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [line["loss"] for line in whole] == [line["loss"] for line in parts]
    assert whole[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)  # it is the other model still
    assert whole[-1]["loss"] < whole[0]["loss"] and whole[-1]["accuracy"] > 0.5
    assert {line["preferences"] for line in whole} <= {*range(1, 41)}
    assert run("evaluate", f"--model_dir={tmp_path / 'whole'}").code == 0
    answer = run("evaluate", f"--model_dir={tmp_path / 'whole'}", "--split=train")
    assert answer.code == 2 and "half of its answers are rejected" in answer.error
    answer = run("report", f"--model_dir={tmp_path / 'whole'}")
    page = (tmp_path / "whole" / "report.html").read_text()
    assert answer.code == 0 and "loss (nats per preference)" in page and "preferences per s" in page
    answer = run("plan", *flags, "--topology=v5e:1x1", "--analytic")
    assert answer.code == 0, answer.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("Run.start_from = None", "the model would start with random weights"),
        ("Transformer.dropout = 0.1", "the model has dropout"),
        (
            "Transformer.adapter = @Lora()",
            "Run.teacher = @Dpo(): it trains all weights of a @Transformer(), not",
        ),
        ("PreferenceTask.template = ''", "PreferenceTask.template = '': found {prompt} 0 times"),
        ("Run.teacher = None", "half of its answers are rejected"),
        ("Run.task = @Task()", "@Task() has no rejected answers"),
        ("Run.z_loss = 0.1", "Run.z_loss = 0.1: @Dpo() has no such term"),
        ("Dpo.beta = 0", "Dpo.beta"),
        ("Dpo.model_dir = 'nowhere'", "Dpo.model_dir = 'nowhere': no trained model there"),
        ("JsonlPreferences.rejected = 'bad'", "needs field 'bad': no such field"),
    ],
)
def test_what_would_be_learned_otherwise_is_refused(
    run: Meshloom, flags: list[str], tmp_path: Path, change: str, words: str
) -> None:
    answer = run("train", f"--model_dir={tmp_path / 'run'}", *flags, f"--gin_param={change}")
    assert answer.code == 2 and words in answer.error, answer.error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_beta_changes_by_override_and_the_other_model_moves(
    run: Meshloom, flags: list[str], trained: Place, tmp_path: Path
) -> None:
    model_dir, steps = f"--model_dir={tmp_path / 'run'}", "--gin_param=Run.steps = 4"
    assert run("train", model_dir, *flags, "--gin_param=Run.steps = 2").code == 0
    answer = run("train", model_dir, steps, "--gin_param=Dpo.beta = 0.2")
    assert (
        answer.code == 2 and "Dpo.beta: 0.1 there, 0.2 now: legal with --override" in answer.error
    )
    moved = shutil.copytree(trained.folder / "run", tmp_path / "moved")
    where = f"--gin_param=Dpo.model_dir = '{moved}'"
    answer = run("train", model_dir, steps, where, "--gin_param=Dpo.beta = 0.2", "--override")
    assert answer.code == 0, answer.error


def test_a_reference_with_fewer_positions_than_rows_need_is_refused(
    run: Meshloom, flags: list[str], tmp_path: Path
) -> None:
    longer = ("Transformer.length = 40", "PreferenceTask.length = 40")
    answer = run("train", f"--model_dir={tmp_path / 'run'}", *flags,
                 *(f"--gin_param={setting}" for setting in longer))  # fmt: skip
    assert answer.code == 2 and "has positions for 24 tokens" in answer.error, answer.error
    assert "Dpo.model_dir" in answer.error
