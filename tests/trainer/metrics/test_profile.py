"""A profile of some steps: of these alone, with the model's names, and its time by part."""

import contextlib
import dataclasses
import gzip
import json
import logging
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from configs.errors import UserError
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh
from tests.trainer.test_loop import RUN, job
from trainer.loop import TrainJob, train
from trainer.metrics.profile import (
    PARTS_FILE,
    PROFILE_FOLDER,
    Profile,
    kind_of_time,
    parse_profile_steps,
    part_of_operation,
)
from trainer.observers import CompiledStep, Observer, StepResult
from trainer.planning.breakdown import seconds_of

STEPS = range(2, 4)


class Program(Observer):
    """Keeps the text of the compiled step, and ends the run in a step if one is named."""

    def __init__(self, last: int = 0) -> None:
        self._last = last

    def on_compiled(self, compiled: CompiledStep) -> None:
        self.text = compiled.executable.as_text()

    def on_step(self, result: StepResult) -> None:
        if result.step == self._last:
            raise KeyboardInterrupt


def sharded_job(model_dir: Path) -> TrainJob:
    layout = Layout(mesh="data:2,model:2", rules="batch:data;d_ff:model;vocab:model")
    run = dataclasses.replace(RUN, microbatches=2)  # a loop, in which each operation counts once
    return dataclasses.replace(job(model_dir, run), layout=layout, mesh=make_mesh(layout))


def parts(model_dir: Path) -> list[dict]:
    figures = json.loads((model_dir / PROFILE_FOLDER / PARTS_FILE).read_text())
    assert (figures["first_step"], figures["last_step"]) == (STEPS[0], STEPS[-1])
    return figures["step_time_by_part"]


def test_a_profile_names_the_steps_and_the_parts_of_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The times are those of the timeline that the profiler writes as JSON."""
    program = Program()
    with caplog.at_level(logging.INFO):
        train(sharded_job(tmp_path), [Profile(tmp_path, STEPS), program])
    (xplane,) = (tmp_path / PROFILE_FOLDER).rglob("*.xplane.pb")
    names = xplane.read_bytes()
    for name in (b"attention", b"mlp", b"softmax_loss", b"optimizer", b"norm"):
        assert name in names, name
    (events,) = (tmp_path / PROFILE_FOLDER).rglob("*.trace.json.gz")
    timeline = gzip.decompress(events.read_bytes()).decode()
    assert [step for step in range(1, 6) if f'"step_num":"{step}"' in timeline] == [*STEPS]
    assert '"data"' in timeline and '"device"' in timeline

    traced_us, counts, unnamed_us = Counter[str](), Counter[str](), 0.0
    for event in json.loads(timeline)["traceEvents"]:
        args = event.get("args", {})
        if args.get("hlo_module") != "jit_train_step":
            continue
        [line] = re.findall(rf"^ +(?:ROOT )?%{re.escape(args['hlo_op'])} = .*", program.text, re.M)
        if re.search(r" (while|call|conditional)\(", line):
            continue
        counts[args["hlo_op"]] += 1
        traced_us["all"] += event["dur"]
        traced_us["traffic_s"] += event["dur"] * ("all-reduce(" in line or "all-gather(" in line)
        scopes = re.findall(r"\b(optimizer|norm|embed|softmax_loss|mlp|attention)\b", line)
        traced_us["optimizer"] += event["dur"] * ({*scopes} == {"optimizer"})
        unnamed_us += event["dur"] * ("op_name" not in line)  # of the part next to it
    rows = parts(tmp_path)
    runs = 4 * len(STEPS)  # on four devices
    assert {count % runs for count in counts.values()} == {0}
    measured = {
        "all": sum(map(seconds_of, rows)),
        "traffic_s": sum(row["traffic_s"] for row in rows),
        "optimizer": sum(seconds_of(row) for row in rows if row["part"] == "optimizer"),
    }
    assert min(measured.values()) > 0
    for name, time_s in measured.items():
        more_us, atol = time_s * runs * 1e6 - traced_us[name], 1e-3 * traced_us[name]
        assert -atol <= more_us <= atol + unnamed_us * (name == "optimizer"), name
    assert unnamed_us < traced_us["all"] / 10
    assert [seconds_of(row) for row in rows] == sorted(map(seconds_of, rows), reverse=True)
    by_name = {row["part"]: row for row in rows}
    assert {"attention", "feed-forward", "softmax", "norms", "embedding"} <= by_name.keys()
    assert by_name["feed-forward"]["products_s"] > 0 == by_name["norms"]["products_s"]
    [line] = [record.message for record in caplog.records if "Steps 2 to 3" in record.message]
    assert f"{rows[0]['part']} {seconds_of(rows[0]) / measured['all']:.1%}" in line


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("last", "settings"),
    [(2, {}), (5, {"batch_stages": ((2, 8),)}), (5, {"replay_every": 3})],
    ids=["ends", "stage", "replay"],
)
def test_a_profile_of_several_programs_or_too_few_steps_has_no_times(
    tmp_path: Path, last: int, settings: dict[str, Any]
) -> None:
    """Nor those of an older profile."""
    (tmp_path / PROFILE_FOLDER).mkdir()
    (tmp_path / PROFILE_FOLDER / PARTS_FILE).write_text("older")
    with contextlib.suppress(KeyboardInterrupt):
        run = dataclasses.replace(RUN, **settings)
        train(job(tmp_path, run), [Profile(tmp_path, STEPS), Program(last)])
    assert list((tmp_path / PROFILE_FOLDER).rglob("*.xplane.pb"))
    assert parts(tmp_path) == []


def test_a_profile_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        stop_trace()
        raise jax.errors.JaxRuntimeError("OUT_OF_RANGE: File too large")

    stop_trace = jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "stop_trace", fails)
    outcome = train(job(tmp_path), [Profile(tmp_path, STEPS)])
    assert outcome.steps == 5 and "the profile is incomplete: OUT_OF_RANGE: " in caplog.text


def test_all_devices_finish_the_steps_before_and_the_last_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of a step, for which the loop waits, may be ready on one device alone."""
    waited, block = list[int](), jax.block_until_ready

    def noted(state: Any) -> Any:
        waited.append(int(state["step"]))
        return block(state)

    monkeypatch.setattr(jax, "block_until_ready", noted)
    train(job(tmp_path), [Profile(tmp_path, STEPS)])
    assert waited == [STEPS[0] - 1, STEPS[-1]]


def test_the_time_of_writing_a_profile_is_not_that_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_s, stop_trace = 3.0, jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: (time.sleep(stop_s), stop_trace()))
    outcome = train(job(tmp_path), [Profile(tmp_path, STEPS)])
    assert outcome.step_s is not None and outcome.step_s < stop_s / 4


def test_a_profile_ends_with_a_run_that_fails(tmp_path: Path) -> None:
    for _ in range(2):  # a second profile cannot start while one runs
        profile = Profile(tmp_path, range(1, 5))
        profile.before_step(1)
        profile.close()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('custom-call(%a, %b), custom_call_target="__cublas$gemm"', "products_s"),
        ('custom-call(%a, %b), custom_call_target="tpu_custom_call"', "products_s"),
        ('custom-call(%a), custom_call_target="TopK"', "other_s"),
        ("fusion(%a, %b), kind=kOutput, calls=%with_dot", "products_s"),
        ("fusion(%a, %b), kind=kLoop, calls=%with_add", "other_s"),
        ("convolution(%a, %b), dim_labels=bf_io->bf", "products_s"),
        ("all-gather-start(%a), dimensions={0}", "traffic_s"),
        ("all-reduce-done(%a)", "traffic_s"),
        ("ragged-all-to-all(%a, %b)", "traffic_s"),
        ("copy-done(%a)", "other_s"),
    ],
)
def test_an_operation_is_a_product_or_traffic_or_other_compute(line: str, kind: str) -> None:
    bodies = "".join(
        f"%with_{name} (p: f32[2,2]) -> f32[2,2] {{\n  %p = f32[2,2] parameter(0)\n"
        f"  ROOT %r = f32[2,2] {name}(%p, %p), lhs_contracting_dims={{1}}\n}}\n\n"
        for name in ("dot", "add")
    )
    text = (
        f"HloModule jit_train_step, is_scheduled=true\n\n{bodies}ENTRY %main () -> f32[2,2] {{\n"
        "  %a = f32[2,2] constant(0)\n  %b = f32[2,2] constant(1)\n"
        f"  ROOT %op = f32[2,2] {line}\n}}\n"
    )
    compiled = CompiledText.read(text)
    assert kind_of_time(compiled.computations["main"]["op"], compiled) == kind


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        ('add(%near, %near), metadata={op_name="jit(f)/jvp(layers)/mlp/add"}', "feed-forward"),
        ('add(%near, %near), metadata={op_name="jit(f)/add"}', "other"),
        ("dot(%near, %far)", "experts"),
        ("dot(%far, %far)", "other"),
        ("fusion(%far), kind=kLoop, calls=%body", "norms"),
        ('all-reduce(%near), metadata={op_name="jit(f)/(mlp/mul:reduce_sum)"}', "feed-forward"),
        ('all-reduce(%near), metadata={op_name="(mlp/mul:norm/mul)"}', "several parts"),
    ],
)  # fmt: skip
def test_an_operation_without_a_name_is_of_the_part_next_to_it(operation: str, part: str) -> None:
    text = (
        "HloModule jit_train_step, is_scheduled=true\n\n%body (p: f32[2]) -> f32[2] {\n"
        '  ROOT %p = f32[2] parameter(0), metadata={op_name="jit(f)/norm/mul"}\n}\n\n'
        "ENTRY %main () -> f32[2] {\n  %far = f32[2] constant(0)\n"
        '  %near = f32[2] copy(%far), metadata={op_name="jit(f)/experts/reshape"}\n'
        f"  ROOT %op = f32[2] {operation}\n}}\n"
    )
    compiled = CompiledText.read(text)
    main = compiled.computations["main"]
    assert part_of_operation(main["op"], main, compiled) == part


@pytest.mark.parametrize("text", ["", "3", "3:", "a:b", "0:2", "4:3", "3:6", "-1:2", "1:2:3"])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--profile_steps=.* from 1 to 5 "):
        parse_profile_steps(text, RUN.steps)
