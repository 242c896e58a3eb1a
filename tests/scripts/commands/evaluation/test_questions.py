"""Questions through the command line: what is printed, written and refused."""

import json
from pathlib import Path

import pytest

from tests.scripts.conftest import Meshloom, Place

QUESTIONS = [{"question": f"kara {word}", "answer": ["x", word]} for word in ("lost", "mitu", "vo")]
CHOICES = [
    {"question": "kara lost", "choices": ["mitu", "QQQ"], "answer": 0},
    {"question": "mist", "choices": ["KKK", "neka lora", "mitu"], "answer": 0},
]


def write(path: Path, entries: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def test_exact_match_of_two_checkpoints(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    file = write(tmp_path / "dev.jsonl", [*QUESTIONS])
    answer = run(
        "evaluate", trained.model_dir, f"--questions={file}", "--shots=1", "--checkpoint=all",
        "--template={question} ={answer} ", "--max_tokens=3", "--show_prompts=1",
        f"--json={tmp_path / 'j'}",
    )  # fmt: skip
    assert answer.code == 0 and "exact match" in answer.out
    results = json.loads((tmp_path / "j").read_text())
    assert [result["step"] for result in results] == [2, 4]
    [shot] = results[1]["shots"]
    shown = f"{shot['text']}{results[1]['predictions'][0]['question']} ="
    assert shown in answer.out
    assert results[1]["questions"] == results[1]["exact_match"]["total"] == 2
    lines = {entry["line"] for entry in results[1]["predictions"]}
    assert lines == {1, 2, 3} - {shot["line"]}
    assert results[1]["settings"]["max_tokens"] == 3


def test_choices_under_another_layout(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    file, output = write(tmp_path / "c.jsonl", [*CHOICES]), tmp_path / "j"
    flags = ["evaluate", trained.model_dir, f"--questions={file}", f"--json={output}"]
    flags += ["--template={question}"]
    sums = []
    for layout in ("whole", "data_and_model_parallel"):
        assert run(*flags, f"--gin_file=layouts/{layout}.gin").code == 0
        result = json.loads(output.read_text())
        assert result["accuracy"]["right"] == 1 and result["accuracy"]["total"] == 2
        assert result["predictions"][0]["prediction"] == 0
        sums.append([x for entry in result["predictions"] for x in entry["log_likelihoods"]])
    assert sums[0] == pytest.approx(sums[1], rel=1e-4) and len(sums[0]) == 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--split=test"], "--split: not with --questions"),
        (["--no_drop", "--sentences=3", "--tokenize=13a"], "--no_drop, --sentences, --tokenize"),
        (["--shots=4"], "--shots=4: "),
        (["--shots=3"], "among the 3 shots"),
        (["--template=x"], "--template='x"),
        (["--shots_from=none.jsonl"], "none.jsonl: cannot be opened"),
        (["--answer_field=answr"], "dev.jsonl:1: there is no \"answr\".  Did you mean answer?"),
        (["--max_tokens=30"], "dev.jsonl:1: "),
        (["--tag=de"], "--tag=de"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    run: Meshloom, trained: Place, tmp_path: Path, flags: list[str], expected: str
) -> None:
    file = write(tmp_path / "dev.jsonl", [*QUESTIONS])
    answer = run("evaluate", trained.model_dir, f"--questions={file}", *flags)
    assert answer.code == 2 and expected in answer.error and "Traceback" not in answer.error


def test_flags_of_questions_need_questions(run: Meshloom, trained: Place) -> None:
    answer = run("evaluate", trained.model_dir, "--shots=2", "--answer_field=x")
    assert (
        answer.code == 2
        and "--shots, --answer_field has no effect without --questions" in answer.error
    )
