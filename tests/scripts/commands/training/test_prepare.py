"""What `meshloom prepare` prints of the pairs of each part."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from data.batch_sizes import BatchSizes
from data.mixture import MixtureOrder
from data.packing.rows import Counts, Rows, RowsOfPart
from scripts.commands.training.prepare import mixture_lines, print_parts
from tests.scripts.conftest import Meshloom, Place


def test_a_rule_that_drops_no_pair_shows_zero(capsys: pytest.CaptureFixture[str]) -> None:
    none = {"targets": np.zeros((0, 6), np.uint16)}
    train = RowsOfPart(
        "de", range(2), Counts(lines=30, rows=2), {"a repeat": 0, "longer than a row": 10}
    )
    empty = RowsOfPart("de", range(0), Counts(), {})
    test = RowsOfPart("de", range(3), Counts(lines=9, rows=3), {"longer than a row": 0})
    parts = {"train": train, "validation": empty, "test": test}
    print_parts({name: Rows(none, Counts(), parts=[part]) for name, part in parts.items()})
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "not in the rows" and "a repeat" in head
    assert [row.split() for row in rows] == [
        ["train", "de", "30", "2", "0", "10", "25.00%"],
        ["validation", "de", "0", "0", "0.00%"],
        ["test", "de", "9", "3", "0", "0.00%"],
    ]
    print_parts({"train": Rows(none, Counts())})  # of a text, which has no pairs
    assert capsys.readouterr().out == ""


def test_rates_shares_and_repetitions_of_a_mixture_are_described() -> None:
    none = {"targets": np.zeros((40, 6), np.uint16)}
    parts = [
        RowsOfPart(name, rows, Counts(rows=len(rows)), {})
        for name, rows in (("de", range(30)), ("fr", range(30, 40)))
    ]
    rows = Rows(none, Counts(), parts=parts, mix=MixtureOrder.of((30, 10), (1, 1)))
    assert list(mixture_lines(rows, (0, 30, BatchSizes(4)))) == [
        "de: 50.0% of the rows of training, 75.0% of all; the run reads each of its 30 rows 2.00 "
        "times.",
        "fr: 50.0% of the rows of training, 25.0% of all; the run reads each of its 10 rows 6.00 "
        "times.",
    ]
    assert list(mixture_lines(rows, None))[1] == "fr: 50.0% of the rows of training, 25.0% of all."
    assert list(mixture_lines(Rows(none, Counts()), (0, 30, BatchSizes(4)))) == []
    staged = MixtureOrder.of((30, 10), (1, 0), ((10, (1, 1)),))
    assert list(mixture_lines(dataclasses.replace(rows, mix=staged), (0, 30, BatchSizes(4))))[
        1
    ] == (
        "fr: 0.0% of the rows of training, 50.0% after step 10, 25.0% of all; the run reads each "
        "of its 10 rows 4.00 times."
    )


def test_a_setting_of_the_text_that_nothing_reads_is_told(run: Meshloom, place: Place) -> None:
    """A setting of the run is none: prepare reads only the task."""
    unread = ["web/TextFiles.train = 'x'", "Clean.max_ratio = 9.0", "Run.stall_minutes = 3.0"]
    error = run("prepare", *place.flags(*unread)).error
    assert [line for line in error.splitlines() if line.startswith("Warning")] == [
        "Warning: --gin_param: web/TextFiles.train is set, but nothing uses it.",
        "Warning: --gin_param: Clean.max_ratio is set, but nothing uses it.",
    ]


def test_a_task_in_a_scope_reads_its_settings_and_what_a_file_had_for_another_is_no_mistake(
    run: Meshloom, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one two three four\n" * 9)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "</s>": 1}, "one"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    params = [
        "Run.task = @mine/Task()", "mine/Task.name = 'mine'", "mine/Task.length = 8",
        "mine/Task.source = @TextFiles()", f"TextFiles.train = '{tmp_path}/a.txt'",
        "Task.vocab = @TokenizerJson()", f"TokenizerJson.path = '{tmp_path}'",
        "TokenizerJson.end = '</s>'", "Clean.max_ratio = 9.0",
    ]  # fmt: skip
    flags = [f"--gin_param={param}" for param in params]
    files = ["--gin_file=configs/tasks/text.gin", f"--data_dir={tmp_path / 'data'}"]
    answer = run("prepare", *files, *flags)
    assert answer.code == 0, answer.error
    assert (tmp_path / "data" / "mine").exists()
    warnings = [line for line in answer.error.splitlines() if line.startswith("Warning: -")]
    assert warnings == ["Warning: --gin_param: Clean.max_ratio is set, but nothing uses it."]
    assert "SentencePiece" not in answer.error
