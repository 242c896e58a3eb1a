"""`meshloom inspect data`: rows with their documents, and the steps that read a document."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.commands.inspect.data import shown
from tests.scripts.conftest import Meshloom, Place


@pytest.fixture
def inspect(run: Meshloom, trained: Place, tmp_path: Path) -> Any:
    def inspect(*flags: str, model_dir: str = trained.model_dir) -> Any:
        file = tmp_path / "data.json"
        answer = run("inspect", "data", model_dir, f"--json={file}", *flags)
        assert answer.code == 0, answer.error
        return json.loads(file.read_text())

    return inspect


def test_the_steps_of_a_document_are_those_whose_rows_hold_it(inspect: Any, trained: Place) -> None:
    lines = trained.text.read_text().splitlines()
    steps: dict[str, list[int]] = {}
    for step in range(1, 5):
        for segment in inspect(f"--step={step}"):
            path, _, number = segment["document"].rpartition(":")
            assert path == str(trained.text) and segment["text"] == lines[int(number) - 1]
            steps.setdefault(segment["document"], []).append(step)
    first, *others = steps
    for document in (first, others[5]):
        segments = inspect(f"--document={document}")
        assert sorted(s for segment in segments for s in segment["steps"]) == steps[document]
    text = lines[int(first.rpartition(":")[2]) - 1]
    assert first in {segment["document"] for segment in inspect(f"--containing={text}")}
    counts = inspect("--counts", "--step=3")
    batch = len({s["row"] for s in inspect("--step=3")})
    assert [c["rows_read"] for c in counts] == [3 * batch]
    assert inspect("--counts")[0]["rows_read"] == 4 * batch


def test_rows_that_a_run_cuts_are_shown_in_parts(inspect: Any) -> None:
    whole = inspect("--step=2")
    length = max(sum(s["tokens"] for s in whole if s["row"] == each["row"]) for each in whole)
    flag = f"--gin_param=Run.length_stages=((0,{length // 2}),(2,{length}))"
    parts = inspect("--step=2", flag)
    assert {part["part of the row"] for part in parts} == {1, 2} and len(parts) > len(whole)
    for segment in whole:
        key = segment["row"], segment["segment"]
        cut = [part for part in parts if (part["row"], part["segment"]) == key]
        assert sum(part["tokens"] for part in cut) == segment["tokens"]
        assert " ".join(part["pieces"] for part in cut) == segment["pieces"]
    for row, part in {(part["row"], part["part of the row"]) for part in parts}:
        here = [p["tokens"] for p in parts if (p["row"], p["part of the row"]) == (row, part)]
        assert sum(here) <= length // 2
    assert inspect("--step=3", flag) == inspect("--step=3")


def test_contamination_names_lines_documents_and_steps(
    inspect: Any, trained: Place, tmp_path: Path
) -> None:
    document = inspect("--step=2")[0]["document"]
    known = trained.text.read_text().splitlines()[int(document.rpartition(":")[2]) - 1]
    (tmp_path / "test").write_text(f"{known}!\n\nnothing of this is in any text\n")
    result = inspect(f"--contamination={tmp_path / 'test'}", "--ngram=3")
    first, second = result["lines"]
    assert result["ngram"] == 3 and (first["line"], second["line"]) == (1, 3)
    assert first["ngrams"] == first["words"] == 1 and first["documents"] and first["steps"]
    assert second["ngrams"] == second["words"] == 0 and second["documents"] == second["steps"] == []
    assert result["counts"] == {"gpt3_dirty": 1, "palm": 1, "llama2_dirty": 1, "llama2_clean": 1}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--counts", "--document=x"], "--document, --counts: unclear what to show."),
        (["--containing=x", "--step=2"], "--step, --containing: unclear what to show."),
        (["--ngram=5"], "--ngram: unclear what to show.  Give one of"),
        (["--contamination=/dev/null"], "--contamination=/dev/null: no line has words."),
        (["--document=x:3"], "'x:3': the rows contain no such file."),
        (["--split=validation", "--step=1"], "--split=validation: no such split.  Legal: train."),
        (["--split=validation", "--counts"], "--split=validation: no such split.  Legal: train."),
    ],
)
def test_wrong_flags_are_named(
    run: Meshloom, trained: Place, flags: list[str], problem: str
) -> None:
    answer = run("inspect", "data", trained.model_dir, *flags)
    assert answer.code == 2 and problem in answer.error and "Traceback" not in answer.error


def test_long_lists_are_cut() -> None:
    assert (shown([3, 8]), shown(1 / 3)) == ("3, 8", "0.333")
    assert shown([*range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, 12 more"
