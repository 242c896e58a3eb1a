"""What each command prints and writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.packing.rows import packed_lines
from data.vocabs import load_vocab
from tests.scripts.conftest import Meshloom, Place
from trainer.metrics.jsonl import read_lines


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_training_writes_what_scripts_rely_on(trained: Place) -> None:
    lines = read_lines(trained.folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    expected = {"step", "loss", "tokens_per_s", "grad_norm", "learning_rate", "accuracy"}
    assert expected <= set(lines[-1])
    plan = read_json(trained.folder / "run" / "plan.json")
    assert plan["compiled_for"] == "CPU" and plan["step_time_s"] is None
    assert plan["executed_flops"] == pytest.approx(plan["model_flops"], rel=0.1)


def test_evaluate_names_its_numbers(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    flags = [trained.model_dir, f"--data_dir={trained.folder / 'data'}"]
    answer = run("evaluate", *flags, "--checkpoint=all", f"--json={tmp_path / 'all.json'}")
    assert answer.code == 0
    all_steps = read_json(tmp_path / "all.json")
    assert [line["step"] for line in all_steps] == [2, 4]
    run("evaluate", *flags, f"--json={tmp_path / 'last.json'}", "--gin_file=layouts/fsdp.gin")
    last = read_json(tmp_path / "last.json")
    names = {
        "loss", "perplexity_per_token", "perplexity_per_word", "bits_per_byte", "tokens", "words",
    }  # fmt: skip
    assert names <= set(last)
    assert last["loss"] == pytest.approx(all_steps[1]["loss"], rel=1e-5)
    assert all_steps[0]["loss"] > last["loss"]


def test_a_text_file_is_counted_in_raw_words(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("kara lost\nmitu\n")
    flags = [f"--input={tmp_path / 'text.txt'}", f"--json={tmp_path / 'j'}"]
    assert run("evaluate", trained.model_dir, *flags).code == 0
    counted = read_json(tmp_path / "j")
    assert (counted["words"], counted["lines"]) == (3, 2)


def test_a_type_that_the_processor_is_slow_in_is_warned_of_in_decoding(
    run: Meshloom, trained: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checks.check_precision", lambda run: ["Warning: slow."])
    answer = run("decode", trained.model_dir, f"--input={trained.text}", "--checkpoint=99")
    assert answer.code == 2 and "Warning: slow." in answer.error


def test_scores_add_up_to_the_loss(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    text = "kara lost nevo\n\nmitu mitu\n"
    (tmp_path / "in.txt").write_text(text)
    flags = [f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.tsv'}"]
    assert run("score", trained.model_dir, *flags).code == 0
    header, *rows = (tmp_path / "out.tsv").read_text().splitlines()
    assert header.split("\t") == ["log_likelihood", "words", "tokens"]
    assert len(rows) == 3
    numbers = [[float(x) for x in row.split("\t")] for row in rows]
    assert [words for _, words, _ in numbers] == [3, 0, 2]
    vocab = load_vocab(trained.folder / "run" / "vocab.model")
    counted = packed_lines(["kara lost nevo", "mitu mitu"], vocab, 24, None, True)[1].tokens
    assert numbers[0][2] + numbers[2][2] == counted
    assert run("evaluate", trained.model_dir, flags[0], f"--json={tmp_path / 'j'}").code == 0
    result = read_json(tmp_path / "j")
    scored = -sum(log_likelihood for log_likelihood, _, _ in numbers)
    assert scored == pytest.approx(result["loss"] * result["tokens"], rel=1e-4)


def test_decoding_is_a_line_a_prompt_and_follows_its_seed(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("kara\nlost mi\n")
    flags = ["decode", trained.model_dir, f"--input={tmp_path / 'in.txt'}", "--max_tokens=6"]
    mesh = "--gin_param=Layout.mesh='model:4'"
    greedy = run(*flags).out
    first, second = greedy.splitlines()
    assert first.startswith("kara") and second.startswith("lost mi")
    warm = [run(*flags, "--temperature=1.5", f"--seed={seed}").out for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    assert run(*flags, "--temperature=1.5", "--top_k=1").out == greedy
    assert run(*flags, "--gin_file=layouts/model_parallel.gin", mesh).out == greedy
    assert run(*flags, f"--output={tmp_path / 'out.txt'}").code == 0
    assert (tmp_path / "out.txt").read_text() == greedy


def test_samples_are_ranked_by_a_suffix(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("kara\nlost mi\n")
    flags = ["decode", trained.model_dir, f"--input={tmp_path / 'in.txt'}", "--max_tokens=6"]
    flags += ["--samples=3", "--nbest=3", f"--json={tmp_path / 'j'}"]
    assert run(*flags, "--rescore_suffix=mitu kara").code == 0
    decoded = read_json(tmp_path / "j")
    assert decoded["settings"]["rescore_suffix"] == "mitu kara"
    for line in decoded["lines"]:
        scores = [one["score"] for one in line["hypotheses"]]
        own = [one["log_probability"] for one in line["hypotheses"]]
        assert scores == sorted(scores, reverse=True) and scores != own
        assert all(one["text"].startswith(line["source"]) for one in line["hypotheses"])
    assert run(*flags, "--rescore_suffix=" + "kara " * 20).code == 2  # beyond the positions


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("config", "Transformer.d_ff"),
        ("data", "segment"),
        ("params", "parameters"),
        ("checkpoint", "step"),
        ("layout", "problems"),
    ],
)
def test_inspect_prints_and_writes_json(
    run: Meshloom, trained: Place, tmp_path: Path, what: str, expected: str
) -> None:
    flags = [trained.model_dir, f"--json={tmp_path / 'j'}"]
    if what == "data":
        flags.append(f"--data_dir={trained.folder / 'data'}")
    answer = run("inspect", what, *flags)
    assert answer.code == 0 and answer.out
    assert expected in json.dumps(read_json(tmp_path / "j"))


def test_inspect_layout_fails_where_train_would(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    answer = run(
        "inspect", "layout", trained.model_dir,
        "--gin_param=Layout.rules = 'd_fff:data'", f"--json={tmp_path / 'j'}",
    )  # fmt: skip
    assert answer.code == 2 and "d_fff:data" in answer.error
    assert len(read_json(tmp_path / "j")["problems"]) == 1


def test_parameters_are_counted_exactly(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    run("inspect", "params", trained.model_dir, f"--json={tmp_path / 'j'}")
    expected = 288 * 32 + 24 * 32 + 32 + 2 * (2 * 32 + 4 * 32 * 4 * 6 + 2 * 32 * 40)
    assert read_json(tmp_path / "j")["parameters"] == expected
