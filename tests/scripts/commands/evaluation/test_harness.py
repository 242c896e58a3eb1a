"""Tasks of lm-evaluation-harness through the command line: what is printed, written and refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import Meshloom, Place

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder}/cache}}
test_split: test
fewshot_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
PICK = TASK + 'doc_to_choice: "{{{{choices}}}}"\ndoc_to_target: answer\n'
SAY = TASK + 'doc_to_target: "{{{{choices[answer]}}}}"\ngeneration_kwargs: {{max_gen_toks: 3}}\n'
QUESTIONS = [
    {"question": "kara lost", "choices": ["mitu", "QQQ"], "answer": 0},
    {"question": "mist", "choices": ["KKK", "neka lora", "mitu"], "answer": 2},
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task of choices and one of generated answers."""
    data, folder = tmp_path / "questions.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    folder.mkdir()
    for name, text, kind, metric in (
        ("pick", PICK, "multiple_choice", "acc"), ("say", SAY, "generate_until", "exact_match"),
    ):  # fmt: skip
        task = text.format(name=name, data=data, folder=tmp_path, kind=kind, metric=metric)
        (folder / f"{name}.yaml").write_text(task)
    (folder / "_base.yaml").write_text("no_task: true\n")
    return folder


def test_a_folder_of_tasks_and_another_layout(
    run: Meshloom, trained: Place, tasks: Path, tmp_path: Path
) -> None:
    results = list[dict[str, Any]]()
    for chosen, layout, flag in (
        (tasks, "whole", "--checkpoint=all"),
        (tasks / "pick.yaml", "data_and_model_parallel", "--checkpoint=4"),
    ):
        answer = run(
            "evaluate", trained.model_dir, f"--harness={chosen}", flag,
            f"--json={tmp_path / 'j'}", f"--gin_file=layouts/{layout}.gin",
        )  # fmt: skip
        assert answer.code == 0, answer.error
        written = json.loads((tmp_path / "j").read_text())
        results += written if isinstance(written, list) else [written]
    assert [result["step"] for result in results] == [2, 4, 4]
    assert [sorted(result["results"]) for result in results] == [["pick", "say"]] * 2 + [["pick"]]
    first, whole, split = (
        [score for sample in result["samples"]["pick"] for [[score, _]] in sample["resps"]]
        for result in results
    )
    assert split == pytest.approx(whole, rel=1e-4) and len(whole) == 5 and first != whole
    assert results[1]["results"]["pick"] == results[2]["results"]["pick"]


def test_shots_stand_before_each_question(
    run: Meshloom, trained: Place, tasks: Path, tmp_path: Path
) -> None:
    answer = run(
        "evaluate", trained.model_dir, f"--harness={tasks}/pick.yaml", "--shots=1", "--limit=1",
        f"--json={tmp_path / 'j'}",
    )  # fmt: skip
    assert answer.code == 0
    result = json.loads((tmp_path / "j").read_text())
    [sample] = result["samples"]["pick"]
    assert result["n-shot"] == {"pick": 1} and result["settings"]["limit"] == 1
    assert sample["arguments"][0] == ["mist mitu\n\nkara lost", " mitu"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--harness=x.yaml", "--split=test", "--beam=2"], "--split, --beam: not with --harness"),
        (["--harness=none.yaml"], "--harness=none.yaml: no such task."),
        (["--harness="], "no task.  Give names"),
        (["--shots=2", "--limit=3"], "--shots, --limit has no effect without --harness=TASK"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    run: Meshloom, trained: Place, flags: list[str], expected: str
) -> None:
    answer = run("evaluate", trained.model_dir, *flags)
    assert answer.code == 2 and expected in answer.error and "Traceback" not in answer.error


@pytest.mark.parametrize(
    ("before", "after", "flags", "expected"),
    [
        ("", "", ["--shots=50"], "a task fails: ValueError"),
        ("metric: acc,", "metric: accc,", [], "pick: name metrics of the harness"),
    ],
)
def test_a_task_that_fails_is_one_message(
    run: Meshloom, trained: Place, tasks: Path, before: str, after: str, flags: list[str],
    expected: str,
) -> None:  # fmt: skip
    file = tasks / "pick.yaml"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    answer = run("evaluate", trained.model_dir, f"--harness={file}", *flags)
    assert answer.code == 2 and expected in answer.error and "Traceback" not in answer.error


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("questions.jsonl", "absent.jsonl", "cannot be loaded: FileNotFoundError"),
        ("{{question}}", "{{qestion}}", "cannot be loaded: UndefinedError: 'qestion' is undefined"),
        ("{{question}}", "{{question", "cannot be loaded: TemplateSyntaxError"),
    ],
)
def test_a_broken_task_is_named(
    run: Meshloom, trained: Place, tasks: Path, before: str, after: str, expected: str
) -> None:
    file = tasks / "pick.yaml"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    answer = run("evaluate", trained.model_dir, f"--harness={file}")
    assert answer.code == 2 and f"--harness={file}: {expected}" in answer.error
    assert "Traceback" not in answer.error
