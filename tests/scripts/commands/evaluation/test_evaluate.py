"""Evaluation through the command line: what its JSON says of a task of prompts."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.sources.text import Docstrings, TextFiles
from scripts.commands.evaluation.evaluate import note_counting
from scripts.commands.evaluation.flags import EvaluateFlags
from scripts.commands.shared_flags import CheckpointFlags
from tests.scripts.conftest import Meshloom, Place
from tests.trainer.planning.runs import toy_run
from trainer.checkpoints.manager import Checkpoints


def test_prompts_that_do_not_fit_a_row_are_counted(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    pairs, json_file = tmp_path / "pairs.tsv", tmp_path / "found.json"
    lines = [f"kara lost {i}\tmitu {i}\n" for i in range(90)]
    pairs.write_text("".join([*lines, "kara lost " * 90 + "\tmitu\n"]))
    flags = place.flags(
        "Run.task = @PromptTask()", "PromptTask.name = 'prompts'", "PromptTask.source = @Tsv()",
        f"Tsv.train = '{pairs}'", f"Tsv.validation = '{pairs}'", "SentencePiece.size = 288",
        "PromptTask.vocab = @SentencePiece()", "PromptTask.length = 24", "Run.steps = 1",
        "Run.checkpoint_every = 1",
    )  # fmt: skip
    assert run("train", place.model_dir, *flags).code == 0
    answer = run("evaluate", place.model_dir, flags[0], f"--json={json_file}")
    note = "1 of 91 examples do not fit a row (length 24): the loss leaves them out.\n"
    assert note in answer.error
    assert json.loads(json_file.read_text())["left_out_pairs"] == 1


def test_commands_load_the_average(run: Meshloom, place: Place) -> None:
    """So do exports, whose tensors are those of the average."""
    model = "Transformer.positions = @Rotary()", "Mlp.gated = True"  # which Hugging Face has
    assert run("train", place.model_dir, *place.flags("Run.ema = 0.5", *model)).code == 0
    numbers = {}
    for average in ("1", "ema"):
        file = place.folder / f"{average}.json"
        answer = run("evaluate", place.model_dir, f"--average={average}", f"--json={file}")
        assert answer.code == 0, answer.error
        numbers[average] = json.loads(file.read_text())
    assert "Loaded opt_state/average of step 4." in answer.error
    assert numbers["ema"]["average"] == "ema" and numbers["ema"]["averaged_steps"] == [4]
    assert numbers["ema"]["loss"] != numbers["1"]["loss"]
    for command in ("decode", "score"):
        flags = [f"--input={place.text}", f"--output={place.folder / 'out'}", "--average=ema"]
        answer = run(command, place.model_dir, *flags, "--gin_param=Tsv.test = 'other.tsv'")
        assert answer.code == 0 and "Loaded opt_state/average of step 4." in answer.error
        assert "Warning: --gin_param: Tsv.test is set, but nothing uses it." in answer.error

    outputs = {average: place.folder / f"exported {average}" for average in ("1", "ema")}
    for average, output in outputs.items():
        answer = run("export", "hf", place.model_dir, f"--output={output}", f"--average={average}")
        assert answer.code == 0, answer.error
    imported = place.folder / "imported"
    answer = run("import", "hf", f"--model_dir={imported}", f"--input={outputs['ema']}")
    assert answer.code == 0, answer.error
    with Checkpoints(imported) as new, Checkpoints(place.folder / "run") as checkpoints:
        roots = (new, 0, "params/"), (checkpoints, 4, "opt_state/average/")
        shapes = {p: a.shape for p, a in new.describe(0).items() if p.startswith("params/")}
        weights, averages = (
            {
                path.removeprefix(root): array
                for path, array in saved.arrays(
                    step, {path.replace("params/", root): shapes[path] for path in shapes}
                )
            }
            for saved, step, root in roots
        )
    layers = [path for path in weights if "/layers_N/" in path]  # others are scaled
    for path in layers:
        np.testing.assert_array_equal(weights[path], averages[path], err_msg=path)
    assert len(layers) > 8

    answer = run("evaluate", place.model_dir, "--average=none")
    assert "--average=none: legal: a number of checkpoints" in answer.error and answer.code == 2
    shutil.rmtree(place.folder / "run")
    assert run("train", place.model_dir, *place.flags("Run.steps = 1", *model)).code == 0
    for command in (["evaluate"], ["export", "hf", f"--output={place.folder / 'other'}"]):
        answer = run(*command, place.model_dir, "--average=ema")
        assert answer.code == 2 and "the run keeps no moving average" in answer.error


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        (
            TextFiles(train="a"),
            "ends of 2 examples; a blank line is one only with TextFiles.example = ",
        ),
        (TextFiles(train="a", example="any line"), "ends of 2 lines, blank ones too."),
        (Docstrings(), "ends of 2 examples."),
    ],
)
def test_what_a_perplexity_counts_is_said_of_the_source(
    source: Any, counted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = toy_run()
    run = dataclasses.replace(run, task=dataclasses.replace(run.task, source=source))
    evaluation: Any = SimpleNamespace(words=9, lines=2)
    note_counting(EvaluateFlags(model=CheckpointFlags(model_dir=Path("run"))), run, evaluation)
    assert f"counts 9 words and the {counted}" in capsys.readouterr().err
