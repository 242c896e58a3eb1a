"""`meshloom plan --decode`: its figures, and what it says of mistakes."""

import json
from pathlib import Path

import pytest

from tests.scripts.commands.test_plan import toy
from tests.scripts.conftest import Meshloom

STABLE = {
    "fits", "bytes_per_device", "bytes_by_cause", "cache_bytes", "parameters", "model_flops",
    "executed_flops", "collectives", "token_latency_s", "output_latency_s", "tokens_per_s",
    "compile_s", "batch_sequences", "prompt_tokens", "new_tokens",
}  # fmt: skip
SLICE = ["--topology=v3:2x2", "--analytic"]


def test_a_plan_of_decoding(run: Meshloom, tmp_path: Path) -> None:
    flags = [*SLICE, "--beam=3", "--batch_sequences=5", "--prompt_tokens=4", "--max_tokens=7"]
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    files = [f"--json={json_file}", f"--html={page}"]
    answer = run("plan", "--decode", *toy(tmp_path), *flags, *files)
    assert answer.code == 0, answer.error
    found = json.loads(json_file.read_text())
    assert set(found) >= STABLE
    assert found["fits"] is True and found["compile_s"] is None
    # As `decode` would: rows fill the four parts of the batch, lengths the next of its shapes.
    sizes = (found["batch_sequences"], found["prompt_tokens"], found["new_tokens"])
    assert sizes == (8, 16, 16) and found["hypotheses"] == 3
    assert found["bytes_per_device"] == sum(found["bytes_by_cause"].values())
    assert found["output_latency_s"] == pytest.approx(
        found["start_latency_s"] + 16 * found["token_latency_s"]
    )
    assert {own["part"] for own in found["collectives"]} == {"token", "start"}
    assert "waiting for memory" in answer.out and "ms a token" in answer.out
    assert "Time before the first token" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--beam=4"], "--beam is about decoding.  Give --decode"),
        (["--apart"], "--flat is about decoding"),
        (["--decode", "--compare", "layouts/fsdp.gin"], "plans one layout"),
        (["--compare", "layouts/fsdp.gin", "--html=page.html"], "--html is the page of one plan"),
        (["--decode", "--source_tokens=9"], "the model translates nothing"),
        (["--decode", "--beam=2", "--samples=2"], "choose one way to search"),
        (["--decode", "--top_k=3"], "Give --temperature"),
        (["--decode", "--prompt_tokens=20", "--max_tokens=9"], "24 learned positions"),
    ],
)
def test_mistakes_are_told_with_what_is_legal(
    run: Meshloom, tmp_path: Path, flags: list[str], wanted: str
) -> None:
    answer = run("plan", *toy(tmp_path), *SLICE, *flags)
    assert answer.code == 2
    assert wanted in answer.error
    assert "Traceback" not in answer.error
