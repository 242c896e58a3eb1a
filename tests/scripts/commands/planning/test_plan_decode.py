"""`meshloom plan --decode`: its figures, and what it says of mistakes."""

import json
import re
from pathlib import Path

import pytest

from configs.load import load
from layouts.cost.interconnect import Topology
from scripts.commands.planning.flags import DecodePlanFlags, PlanFlags
from scripts.commands.planning.inputs import PlanInputs
from scripts.commands.planning.plan_decode import plan_batch
from tests.scripts.commands.planning.test_plan import toy
from tests.scripts.conftest import Meshloom
from trainer.memory import shard_bytes

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
    figures = json.loads(json_file.read_text())
    assert set(figures) >= STABLE
    assert figures["fits"] is True and figures["compile_s"] is None
    # As `decode` would: rows fill the four parts of the batch, lengths the next of its shapes.
    sizes = (figures["batch_sequences"], figures["prompt_tokens"], figures["new_tokens"])
    assert sizes == (8, 16, 7) and figures["hypotheses"] == 3
    assert figures["bytes_per_device"] == sum(figures["bytes_by_cause"].values())
    assert figures["output_latency_s"] == pytest.approx(
        figures["start_latency_s"] + 7 * figures["token_latency_s"]
    )
    assert {row["part"] for row in figures["collectives"]} == {"token", "start"}
    assert "waiting for memory" in answer.out and "ms a token" in answer.out
    text = page.read_text()
    assert "Time to the first token" in text and "<td>hypotheses<td>3" in text


def test_a_plan_that_does_not_fit_names_a_slice_that_may(run: Meshloom, tmp_path: Path) -> None:
    """Each part of the batch has the weights, in 8 bits, which count once."""
    flags = ["--batch_sequences=64", "--prompt_tokens=4", "--max_tokens=7", "--weights=int8"]
    wide = "--gin_param=Transformer.d_ff=64000000"
    json_file = tmp_path / "plan.json"
    answer = run("plan", "--decode", *toy(tmp_path), *SLICE, *flags, wide, f"--json={json_file}")
    assert answer.code == 0, answer.error
    figures = json.loads(json_file.read_text())
    (devices,) = re.findall(r"need about (\d+) devices: try --topology=v3:4x4", answer.out)
    every = figures["devices"] * figures["bytes_per_device"]
    copies = figures["devices"] * figures["bytes_by_cause"]["parameters"] - figures["parameters"]
    needed = (every - copies) / Topology.named("v3:2x2").chip.memory_bytes
    assert figures["fits"] is False and needed < int(devices) < needed + 1.5


def test_a_plan_of_samples_that_a_suffix_ranks(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.commands.planning.inputs.has_compiler", lambda platform: False)
    flags = ["--samples=3", "--prompt_tokens=4", "--max_tokens=7", "--suffix_tokens=2"]
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    files = [f"--json={json_file}", f"--html={page}"]
    answer = run("plan", "--decode", "--topology=h100:1x4", *toy(tmp_path), *flags, *files)
    assert answer.code == 0, answer.error
    figures = json.loads(json_file.read_text())
    assert figures["suffix_latency_s"] > 0
    assert figures["output_latency_s"] == pytest.approx(
        figures["start_latency_s"] + 7 * figures["token_latency_s"] + figures["suffix_latency_s"]
    )
    rate = figures["batch_sequences"] * 7 / figures["output_latency_s"]
    assert figures["tokens_per_s"] == pytest.approx(rate)
    assert {row["part"] for row in figures["collectives"]} == {"token", "start", "suffix"}
    assert "s for the suffix" in answer.out and "one text a row" in answer.out
    text = page.read_text()
    assert "Time of the suffix" in text and "decoding counts one text a row" in text
    assert "The compiler for GPUs is not installed" in answer.out + answer.error
    assert "step time" not in answer.out + answer.error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--beam=4"], "--beam needs --decode.  Add it"),
        (["--apart"], "--apart needs --decode"),
        (["--currency=EUR"], "--currency is for --price_per_chip_hour"),
        (
            ["--compare", "layouts/fsdp.gin", "--html=page.html"],
            "--html writes the page of one plan",
        ),
        (["--decode", "--source_tokens=9"], "the model has no encoder"),
        (["--decode", "--beam=2", "--samples=2"], "choose either search or sampling"),
        (["--decode", "--top_k=3"], "Add --temperature"),
        (["--decode", "--suffix_tokens=3", "--beam=2"], "Add --samples"),
        (
            ["--decode", "--suffix_tokens=9", "--samples=2", "--max_tokens=4"],
            "4 new ones and 9 of the suffix",
        ),
        (["--decode", "--prompt_tokens=20", "--max_tokens=9"], "24 positions"),
    ],
)
def test_errors_say_what_is_legal(
    run: Meshloom, tmp_path: Path, flags: list[str], message: str
) -> None:
    answer = run("plan", *toy(tmp_path), *SLICE, *flags)
    assert answer.code == 2
    assert message in answer.error
    assert "Traceback" not in answer.error


def test_layouts_of_decoding_beside_each_other(run: Meshloom, tmp_path: Path) -> None:
    layouts, json_file = ["data_parallel", "model_parallel"], tmp_path / "both.json"
    files = [f"layouts/{name}.gin" for name in layouts]
    flags = ["--decode", "--analytic", "--topology=v5e:2x2", "--batch_sequences=8"]
    answer = run("plan", *toy(tmp_path)[1:], *flags, f"--json={json_file}", "--compare", *files)
    assert answer.code == 0, answer.error
    plans = json.loads(json_file.read_text())
    assert sorted(plans) == layouts
    assert list(plans) == sorted(plans, key=lambda name: plans[name]["output_latency_s"])
    for name, plan in plans.items():
        alone = run("plan", *toy(tmp_path, layout=name), *flags, f"--json={json_file}")
        assert alone.code == 0 and json.loads(json_file.read_text()) == plan


@pytest.mark.parametrize(
    ("model", "mesh", "rules", "topology", "rows"),
    [
        ("llama3_8b", "model:1", "", "v6e:1x1", 1),
        ("llama2_70b", "model:8,wide:2", ";d_ff:wide;vocab:wide", "v5e:4x4", 64),
    ],
)
def test_a_token_takes_at_least_as_long_as_reading_weights_and_cache(
    model: str, mesh: str, rules: str, topology: str, rows: int
) -> None:
    """No table of docs/planning.md has a token that is faster than its memory."""
    settings = [
        "Precision.store = 'bfloat16'",
        f"Layout.mesh = '{mesh}'",
        f"Layout.rules = 'heads:model;d_ff:model;vocab:model{rules}'",
    ]
    config = load([f"configs/models/{model}.gin"], settings)
    decoding = DecodePlanFlags(
        batch_sequences=rows, prompt_tokens=512, max_tokens=128, temperature=0.0
    )
    inputs = PlanInputs.read(config, Topology.named(topology))
    plan = plan_batch(inputs, PlanFlags(analytic=True, decoding=decoding))
    read_bytes = plan.step.array_bytes["parameters"] + plan.step.array_bytes["cache"]
    read_bytes -= shard_bytes(plan.step.params["embed_VD"])  # of which a token reads one row
    assert plan.topology is not None and plan.timings is not None
    assert plan.timings.token.step_s > read_bytes / plan.topology.chip.memory_bandwidth > 0
    bits = 16 * plan.parameters / plan.devices  # of the weights, were all of them split evenly
    assert 8 * plan.step.array_bytes["parameters"] == pytest.approx(bits, rel=0.25)
