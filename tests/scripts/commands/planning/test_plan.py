"""`meshloom plan`: its figures, its page, and what it says of mistakes."""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import mesh_sizes
from scripts.commands.planning import inputs
from scripts.commands.planning import tune as tune_command
from scripts.commands.planning.inputs import with_largest_batch
from scripts.commands.planning.page import alternative_rows, run_cost_rows
from scripts.templates import render
from tests.scripts.conftest import Meshloom, Place
from tests.trainer.command import settings
from tests.trainer.planning.runs import toy_run
from trainer.planning import tune
from trainer.planning.report import FIGURES, SCHEMA_VERSION, by_line
from trainer.planning.run_cost import Assumptions
from trainer.planning.tune import Candidate, Trial

STABLE = {
    "fits", "bytes_per_device", "bytes_by_cause", "parameters", "model_flops", "executed_flops",
    "collectives", "step_time_s", "tokens_per_s", "utilisation", "compile_s",
}  # fmt: skip


def toy(folder: Path, *params: str, layout: str = "data_and_model_parallel") -> list[str]:
    given = [*settings(folder / "text.txt"), *params]
    return [f"--gin_file=layouts/{layout}.gin", *(f"--gin_param={setting}" for setting in given)]


def test_a_plan_by_layout_alone(run: Meshloom, tmp_path: Path) -> None:
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    flags = ["--topology=v3:2x2", "--analytic", f"--json={json_file}", f"--html={page}"]
    answer = run("plan", *toy(tmp_path), *flags)
    assert answer.code == 0, answer.error
    figures = json.loads(json_file.read_text())
    assert STABLE <= set(figures) <= set(FIGURES)
    assert figures["schema_version"] == SCHEMA_VERSION
    assert figures["fits"] is True and figures["compile_s"] is None
    assert figures["memory_bytes"] == 16 * 2**30
    assert figures["bytes_per_device"] == sum(figures["bytes_by_cause"].values())
    assert figures["tokens_per_s"] * figures["step_time_s"] == pytest.approx(8 * 24)
    assert {"kind", "mesh_axes", "count", "bytes", "source"} <= set(figures["collectives"][0])
    assert "decoder/layers_N/mlp/wi_DF" in answer.out and "chip-hours" in answer.out
    named = {row["weight"]: row for row in figures["collectives"]}
    assert {"wi_DF", "wo_FD", "wq_DJQK", "wo_JQKD", ""} <= set(named)
    assert named["wi_DF"]["model_part"] == "feed-forward" and "mlp.py:" in named["wi_DF"]["source"]
    assert re.search(r"all-reduce .* no +wi_DF +feed-forward, backward", answer.out)
    assert "dot_general" not in answer.out and "dot_general" in page.read_text()
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "matrix products" in text
    assert "http" not in text  # it needs no other file
    assert "the red line is the memory of the device: 17.2 GB" in text and "model FLOPs" in text
    assert "by the trace alone" in text and "color-scheme: light dark" in text


def test_alternatives_are_listed_if_they_are_faster(run: Meshloom, tmp_path: Path) -> None:
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    flags = ["--topology=v3:2x2", "--analytic", f"--json={json_file}", f"--html={page}"]
    full = toy(tmp_path, "Transformer.remat = 'full'")
    answer = run("plan", *full, *flags, "--alternatives")
    assert answer.code == 0, answer.error
    figures = json.loads(json_file.read_text())
    assert set(figures) <= set(FIGURES)
    *_, shown = answer.out.partition("By the traces of ")
    assert shown.startswith(f"{len(figures['alternatives'])} alternatives")
    row = re.search(r"^Transformer.remat = 'none' +(\S+ \S+) +(\S+)", shown, re.M)
    change = next(
        each["time_change"] for each in figures["alternatives"]
        if each["settings"] == {"Transformer.remat": "none"}
    )  # fmt: skip
    assert row is not None and row[2] == f"{change:.1%}" and change < 0
    assert "<h2>What to change</h2>" in page.read_text() and row[1] in page.read_text()
    for wrong in (["--decode"], ["--compare", "layouts/fsdp.gin"]):
        refused = run("plan", *full, *flags[:2], "--alternatives", *wrong)
        assert refused.code == 2 and "--alternatives needs --topology" in refused.error
    assert run("plan", *full, "--alternatives").code == 2


def test_an_alternative_has_the_names_of_scopes(run: Meshloom, tmp_path: Path) -> None:
    """A bare name counts less than the one of a scope."""
    blocks = {name: f"{name}/Block.feed_forward = @{name}/Moe()" for name in "ab"}
    scoped = [f"{name}/Moe.dispatch = 'gather'" for name in blocks]
    model = ["Transformer.pattern = (@a/Block(), @b/Block())", "Moe.experts = 4", *blocks.values()]
    json_file = tmp_path / "plan.json"
    flags = ["--topology=v3:2x2", "--analytic", f"--json={json_file}"]
    base = [*model, "Transformer.layers = 2", *scoped]
    answer = run("plan", *toy(tmp_path, *base), *flags, "--alternatives")
    assert answer.code == 0, answer.error
    rows = json.loads(json_file.read_text())["alternatives"]
    (row,) = (row for row in rows if row["settings"].get("Moe.dispatch") == "dropless")
    assert row["settings"].keys() == {"Moe.dispatch", "a/Moe.dispatch", "b/Moe.dispatch"}
    changed = [f"{name} = {value!r}" for name, value in row["settings"].items()]
    assert run("plan", *toy(tmp_path, *base, *changed), *flags).code == 0
    figures = json.loads(json_file.read_text())
    assert figures["step_time_s"] == pytest.approx(row["step_time_s"])


def test_no_alternative_is_as_good_as_the_plan(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.commands.planning.page.MIN_SAVED", 2.0)
    flags = ["--topology=v3:2x2", "--analytic", f"--html={tmp_path / 'plan.html'}"]
    answer = run("plan", *toy(tmp_path), *flags, "--alternatives")
    assert answer.code == 0, answer.error
    assert "microbatches or layout, none fits and saves" in answer.out
    _, _, section = (tmp_path / "plan.html").read_text().partition("<h2>What to change</h2>")
    assert "none fits and saves" in section and "<table>" not in section.partition("<h2>")[0]


def test_of_a_plan_that_does_not_fit_those_that_do_are_alternatives() -> None:
    row = {"settings": {"Run.microbatches": 2}, "bytes_per_device": 2_000_000}
    slower = row | {"step_time_s": 2.0, "time_change": 1.0, "fits": True}
    smaller = slower | {"bytes_per_device": 1_000_000}
    too_large = row | {"step_time_s": 0.5, "time_change": -0.5, "fits": False}
    figures = {"alternatives": [slower, slower, smaller, too_large], "fits": True}
    assert alternative_rows({"fits": True}) is None and alternative_rows(figures) == []
    shown = alternative_rows(figures | {"fits": False})
    assert shown is not None and [each["change"] for each in shown] == ["+100.0%", "+100.0%"]
    assert [each["bytes per device"] for each in shown] == ["2 MB", "1 MB"]


def test_all_stages_of_a_run_are_legal(run: Meshloom, tmp_path: Path) -> None:
    """The first batch does not divide over as many devices as the largest."""
    stages = toy(tmp_path, "Run.batch_sequences = 2", "Run.batch_stages = ((4, 16),)")
    flags = ["--topology=v3:2x2", "--analytic", f"--json={tmp_path / 'plan.json'}"]
    two = [*stages, "--gin_param=Layout.mesh='data:2,model:4'"]
    answer = run("plan", *two, *flags, "--alternatives")
    assert answer.code == 0, answer.error
    for row in json.loads((tmp_path / "plan.json").read_text())["alternatives"]:
        rows = mesh_sizes(row["settings"].get("Layout.mesh", "data:2,model:4"), 8)["data"]
        assert 2 % (rows * row["settings"].get("Run.microbatches", 1)) == 0
    refused = run("plan", *stages, "--gin_param=Layout.mesh='data:8,model:1'", *flags)
    assert (
        refused.code == 2
        and "batch = 2 (Run.batch_sequences) does not divide over data = 8" in refused.error
    )
    ranked = tmp_path / "ranked.gin"
    tuned = ["--topology=v3:2x2", "--budget=0", f"--output={ranked}"]
    assert run("tune", *stages[1:], *tuned).code == 0
    assert mesh_sizes(load([str(ranked)]).make(Layout).mesh, 8).get("data", 1) <= 2


def test_a_run_is_planned_by_its_tokens(run: Meshloom, tmp_path: Path) -> None:
    flags = ["--topology=v3:2x2", "--analytic", f"--json={tmp_path / 'plan.json'}"]
    answer = run("plan", *toy(tmp_path), *flags, "--tokens=1e11")
    assert answer.code == 0, answer.error
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["run_steps"] == math.ceil(1e11 / (8 * 24))
    hours = figures["step_time_s"] * figures["run_steps"] / 3600
    assert figures["run_hours"] == pytest.approx(hours)
    assert f"{figures['run_steps']:,} steps in" in answer.out
    for wrong in (["--tokens=0"], ["--tokens=1e12", "--decode"]):
        assert run("plan", *toy(tmp_path), *flags, *wrong).code == 2


def test_a_plan_of_stages_says_how_long_they_idle(run: Meshloom, tmp_path: Path) -> None:
    given = toy(
        tmp_path, "Run.microbatches = 2", "Layout.pipeline_repeats = 2", "Transformer.layers = 4",
        layout="pipeline",
    )  # fmt: skip
    flags = ["--topology=v3:2x2", "--analytic", f"--json={tmp_path / 'plan.json'}"]
    answer = run("plan", *given, *flags)
    assert answer.code == 0, answer.error
    assert "2 stages, 2 times around, 2 microbatches; stages idle 20% of their time, " in (
        answer.out
    )
    assert "stages" not in answer.error
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["bubble"] == pytest.approx(1 / 5) and figures["pipeline_repeats"] == 2
    assert 0 < figures["idle_s"] < figures["step_time_s"] / 5
    permutes = [row for row in figures["collectives"] if row["kind"] == "collective-permute"]
    assert {tuple(row["mesh_axes"]) for row in permutes} == {("pipe",)}
    # Hidden states at each of five ticks; layers in two exchanges, and their gradients in two.
    counts = {row["count"] for row in permutes}
    assert 5 in counts and {count % 4 for count in counts - {5}} == {0}


def test_a_plan_for_gpus_is_a_range(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.commands.planning.inputs.has_compiler", lambda platform: False)
    monkeypatch.setattr("scripts.commands.planning.tune.has_compiler", lambda platform: False)
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    mesh = "--gin_param=Layout.mesh='data:4,model:2'"
    flags = ["--topology=b200:4x2", f"--json={json_file}", f"--html={page}"]
    answer = run("plan", *toy(tmp_path), mesh, *flags)
    assert answer.code == 0, answer.error
    figures = json.loads(json_file.read_text())
    low_s, high_s = figures["step_time_range_s"]
    assert low_s < figures["step_time_s"] < high_s
    assert figures["memory_bytes"] == 180e9 and figures["compiled_for"] is None
    assert f"({low_s:.3g} to {high_s:.3g} s)" in answer.out
    assert "The compiler for GPUs is not installed" in answer.error
    refused = run("tune", *toy(tmp_path)[1:], "--topology=b200:1x2")
    assert refused.code == 2 and "plan-gpu" in refused.error
    for command in ("plan", "tune"):
        refused = run(command, *toy(tmp_path)[1:], "--topology=b200:1x2", "--simulate_devices=2")
        assert refused.code == 2 and "no effect on --topology.  Remove one" in refused.error


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"length_stages": ((0, 8),)}, (48, 8)),
        ({"length_stages": ((0, 8), (5, 24)), "batch_stages": ((3, 4),)}, (48, 8)),
        ({"batch_stages": ((3, 32),)}, (32, 24)),
    ],
)
def test_stages_are_planned_by_the_largest_batch(
    changes: dict[str, Any], shape: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = with_largest_batch(dataclasses.replace(toy_run(), **changes))
    assert (planned.batch_sequences, planned.task.length) == shape
    said = f"Planned as if all batches had {shape[0]} rows of {shape[1]} tokens, as the largest."
    assert said in capsys.readouterr().err


def test_collectives_are_summed_by_line() -> None:
    row = {"kind": "all-reduce", "mesh_axes": ["data"], "source": "a.py:1", "overlaps": False}
    rows = [
        {**row, "count": 2, "received_bytes": 30, "seconds": 0.25},
        {**row, "source": "b.py:7", "count": 1, "received_bytes": 5, "seconds": 0.875},
        {**row, "count": 3, "received_bytes": 40, "seconds": 0.5},
    ]
    first, second = by_line(rows)
    assert first == rows[1]
    assert second == {**row, "count": 5, "received_bytes": 70, "seconds": 0.75}


def test_a_plan_of_the_settings_of_a_model_directory(run: Meshloom, trained: Place) -> None:
    flags = ["--gin_file=layouts/data_parallel.gin", "--topology=v3:2x2", "--analytic"]
    given = run("plan", *(flag for flag in trained.flags() if "param" in flag), *flags)
    saved = run("plan", trained.model_dir, *flags)
    assert saved.code == 0, saved.error
    assert saved.out == given.out


def test_a_plan_for_the_devices_at_hand(run: Meshloom, tmp_path: Path) -> None:
    json_file = tmp_path / "plan.json"
    answer = run("plan", *toy(tmp_path), f"--json={json_file}")
    assert answer.code == 0, answer.error
    figures = json.loads(json_file.read_text())
    assert figures["compiled_for"] == "CPU" and figures["compile_s"] > 0
    assert figures["step_time_s"] is None and figures["fits"] is None
    assert figures["executed_flops"] == pytest.approx(figures["model_flops"], rel=0.1)


def test_what_does_not_fit_comes_with_ways_out(run: Meshloom, tmp_path: Path) -> None:
    wide = ["Transformer.d_ff = 6400000", "Transformer.layers = 2", "Run.batch_sequences = 512"]
    answer = run("plan", *toy(tmp_path, *wide), "--topology=v2:2x2", "--analytic")
    assert answer.code == 0
    assert "does not fit" in answer.out
    assert "Settings that fit: `meshloom tune`" in answer.out
    assert re.search(r"need about \d+ devices: try --topology=v2:", answer.out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v9:2x2"], "Legal: v2, v3, v4, v5e, v5p, v6e"),
        (["--topology=v3:4x4x4"], "v3 has a torus of 2 axes"),
        (["--topology=h100:2x3"], "nodes and GPUs of each"),
        (["--topology=h100:2x8x2"], "as in h100:4x8"),
        (["--topology=2xh100:1x8"], "as in h100:2x8"),
        (["--topology=2xv3:2x2"], "or several of v5e, v5p, v6e, tpu7x."),
        (["--topology=v5e:16x32"], "no such slice.  Legal nearby: v5e:"),
        (
            ["--topology=v3:2x2", "--gin_param=Layout.mesh='data:3,model:2'"],
            "its sizes multiply to 6, and --topology=v3:2x2 has 8 devices (4 chips of 2)",
        ),
        (
            ["--topology=v3:2x2", "--gin_param=Layout.mesh='data:-1,model:3'"],
            "Legal: sizes that multiply to 8, or -1 for one",
        ),
    ],
)
def test_errors_say_what_is_legal(
    run: Meshloom, tmp_path: Path, flags: list[str], message: str
) -> None:
    answer = run("plan", *toy(tmp_path), *flags)
    assert answer.code == 2
    assert message in answer.error
    assert "Traceback" not in answer.error


def test_without_the_tpu_compiler_it_says_what_is_missing(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = run("plan", *toy(tmp_path), "--topology=v3:2x2")
    assert answer.code == 0
    assert 'pip install -e ".[plan]"' in answer.error and "are missing" in answer.error


def test_layouts_beside_each_other(run: Meshloom, tmp_path: Path) -> None:
    files = ["layouts/data_parallel.gin", "layouts/fsdp.gin"]
    flags = ["--topology=v3:2x2", "--analytic", f"--json={tmp_path / 'both.json'}"]
    answer = run("plan", *toy(tmp_path)[1:], *flags, "--compare", *files)
    assert answer.code == 0, answer.error
    plans = json.loads((tmp_path / "both.json").read_text())
    assert list(plans) == sorted(plans, key=lambda name: plans[name]["step_time_s"])
    assert plans["fsdp"]["bytes_by_cause"]["parameters"] * 8 == pytest.approx(
        plans["data_parallel"]["bytes_by_cause"]["parameters"], rel=0.01
    )
    assert run("plan", *toy(tmp_path), *files).code == 2


def test_layouts_of_one_name_are_all_compared(run: Meshloom, tmp_path: Path) -> None:
    same = tmp_path / "fsdp.gin"
    same.write_text(Path("layouts/data_parallel.gin").read_text())
    files = ["layouts/fsdp.gin", str(same)]
    for number, flags in enumerate([["--compare"], ["--compare", "--decode"]]):
        json_file = tmp_path / f"{number}.json"
        outputs = ["--topology=v3:2x2", "--analytic", f"--json={json_file}"]
        answer = run("plan", *toy(tmp_path)[1:], *outputs, *flags, *files)
        assert answer.code == 0, answer.error
        assert set(json.loads(json_file.read_text())) == set(files)


def test_the_best_layout_is_written(run: Meshloom, tmp_path: Path) -> None:
    best = tmp_path / "best.gin"
    flags = ["--topology=v5e:2x2", f"--output={best}", f"--json={tmp_path / 'all.json'}"]
    answer = run("tune", "--budget=0", *toy(tmp_path)[1:], *flags)
    assert answer.code == 0, answer.error
    ranking = json.loads((tmp_path / "all.json").read_text())
    times = [plan["step_time_s"] for plan in ranking if plan["fits"]]
    assert len(times) > 10 and times == sorted(times)
    text = best.read_text()
    assert "Next:" in text and f"{times[0]:.4g} s per step" in text
    assert load([str(best)]).value("Run.microbatches") == 1
    again = run("plan", *toy(tmp_path)[1:], f"--gin_file={best}", "--topology=v5e:2x2",
                "--analytic", f"--json={tmp_path / 'one.json'}")  # fmt: skip
    assert again.code == 0, again.error
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["step_time_s"] == pytest.approx(times[0])


def test_the_best_layout_for_the_devices_at_hand(run: Meshloom, tmp_path: Path) -> None:
    best = tmp_path / "best.gin"
    small = ["Transformer.layers = 1", "Transformer.heads = 1", "Transformer.d_ff = 4"]
    flags = [f"--output={best}", f"--json={tmp_path / 'all.json'}"]
    answer = run("tune", "--budget=0", *toy(tmp_path, *small)[1:], *flags)
    assert answer.code == 0, answer.error
    ranking = json.loads((tmp_path / "all.json").read_text())
    assert all(plan["step_time_s"] > 0 and plan["fits"] is None for plan in ranking)
    text = best.read_text()
    assert text.startswith(f"# The fastest of {len(ranking)} layouts on 8 devices of one machine")
    assert f"Layout.mesh = '{ranking[0]['layout'].split(' ')[0]}'" in text


def test_an_order_that_the_slice_cannot_have_is_refused(run: Meshloom, tmp_path: Path) -> None:
    order = "--gin_param=Layout.order='data:x;model:y'"
    answer = run("plan", *toy(tmp_path), order, "--topology=v3:2x2", "--analytic")
    assert answer.code == 2
    assert "core has 2, and nothing is placed along it" in answer.error
    assert "'data:x;data:y;model:core'" in answer.error  # that would do


def test_what_fits_nowhere_is_refused_with_a_slice_that_would_do(
    run: Meshloom, tmp_path: Path
) -> None:
    wide = ["Transformer.d_ff = 6400000", "Transformer.layers = 2", "Run.batch_sequences = 512"]
    answer = run("tune", "--budget=0", *toy(tmp_path, *wide)[1:], "--topology=v2:2x2")
    assert answer.code == 2
    assert "by their traces, fits" in answer.error and "try --topology=v2:16x16" in answer.error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--price_per_chip_hour=2", "--decode"], "Remove it, or --decode"),
        (["--restart_minutes=2"], "--restart_minutes is for the training of a run"),
        (
            ["--storage_gb_per_s=5", "--price_per_chip_hour=2"],
            "--price_per_chip_hour, --storage_gb_per_s is for the training of a run on --topology",
        ),
        (
            ["--topology=v5e:2x2", "--restart_minutes=2", "--compare", "layouts/fsdp.gin"],
            "--restart_minutes with --compare needs --json",
        ),
        (["--price_per_chip_hour=-1"], "-1"),
        (["--price_per_chip_hour=1e300"], "not in the range"),
        (["--gin_file="], "'': no such file in"),
        (["--topology=v5e:2x2", "--beam=4"], "--beam needs --decode"),
    ],
)
def test_flags_that_a_plan_cannot_have(
    run: Meshloom, tmp_path: Path, flags: list[str], message: str
) -> None:
    answer = run("plan", *toy(tmp_path), *flags)
    assert answer.code == 2
    assert message in answer.error


def test_a_run_that_never_ends_says_which_interval_would_end_it() -> None:
    cost = {
        "wall_hours": None, "best_hours": 117.0, "checkpoint_every": 100,
        "best_checkpoint_every": 2, "assumptions": Assumptions()._asdict(),
    }  # fmt: skip
    file = "commands/planning/run_cost.txt"
    never = render(file, figures={"run_cost": cost})
    assert not run_cost_rows({"run_cost": cost})
    assert "every = 100, failures come faster" in never and "with 2 it takes 117 hours." in never
    never = render(file, figures={"run_cost": {**cost, "best_hours": None}})
    assert "than the run recovers.\nAssumes" in never


def test_tuned_settings_are_a_file_that_training_takes(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_on(topology: Topology | None) -> Callable[[Candidate], Trial]:
        def measure(candidate: Candidate) -> Trial:
            is_best = candidate.run.microbatches == 1 and candidate.run.model.remat == "full"
            return Trial(1.0 if is_best else 2.0, 7, True)

        return measure

    def recomputations(model: Any, *, offload: bool) -> list[Any]:
        return [dataclasses.replace(model, remat=remat) for remat in ("none", "full")]

    monkeypatch.setattr(tune, "recomputations", recomputations)
    monkeypatch.setattr(tune_command, "has_compiler", lambda platform: True)
    monkeypatch.setattr(tune_command, "measure_on", measure_on)
    monkeypatch.setattr(tune_command, "shortlist", lambda ranking, *of_run: ranking[:1])
    output = tmp_path / "tuned.gin"
    flags = ["--topology=v5e:2x2", "--best=1", f"--output={output}", "--budget=1h"]
    answer = run("tune", *toy(tmp_path), *flags)
    assert answer.code == 0, answer.error
    assert "1 s per step" in answer.out and "v5e_tensor_parallel.gin" in answer.error + answer.out
    tuned = load([str(output)])
    assert tuned.value("Transformer.remat") == "full" and tuned.value("Run.microbatches") == 1
    assert tuned.make(Layout).mesh == "data:4"
    monkeypatch.setattr(tune_command, "rank_layouts", None)  # the log has the layouts
    text = output.read_text()
    assert run("tune", *toy(tmp_path), *flags).code == 0 and output.read_text() == text
    named = run("tune", *toy(tmp_path), *flags, f"--output={tmp_path / 'x.jsonl'}")
    assert named.code == 2 and "the log has this name" in named.error
    refused = run("tune", *toy(tmp_path), *flags[:-1], "--budget=soon")
    assert refused.code == 2 and "--budget=soon: legal" in refused.error
    for wrong, message in (
        ([*flags[:-1], "--budget=0"], "--best chooses layouts to compile"),
        ([*flags, f"--json={tmp_path / 'x.json'}"], "--json lists the plans of --budget=0"),
    ):
        refused = run("tune", *toy(tmp_path), *wrong)
        assert refused.code == 2 and message in refused.error
    other = run("tune", *toy(tmp_path, "Run.batch_sequences = 32"), *flags)
    assert other.code == 2 and "log of another search" in other.error


def test_names_and_durations_of_the_command_line() -> None:
    assert inputs.named_layouts(["a/fsdp.gin", "b/fsdp.gin", "whole.gin"]) == {
        "a/fsdp.gin": "a/fsdp.gin", "b/fsdp.gin": "b/fsdp.gin", "whole": "whole.gin",
    }  # fmt: skip
    assert tune_command.parse_duration("1.5h") == 5400 and tune_command.parse_duration("0") == 0
