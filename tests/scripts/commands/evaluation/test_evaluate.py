"""Evaluation through the command line: what its JSON says of a task of prompts."""

import json
from pathlib import Path

from tests.scripts.conftest import Meshloom, Place


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
    assert "1 of 91 pairs do not fit a row (length 24)" in answer.error
    assert json.loads(json_file.read_text())["left_out_pairs"] == 1
