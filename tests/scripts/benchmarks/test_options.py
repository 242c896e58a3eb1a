"""Flags of the benchmarks: wrong values are refused before anything is measured."""

import re
from pathlib import Path
from typing import ClassVar

import click
import pytest

from configs.errors import UserError
from scripts import cli
from scripts.benchmarks import moe
from scripts.benchmarks.rounds import BASELINE, CHECKOUT, MESHLOOM, JsonFlags, compare, starters
from scripts.command_line import command_of
from scripts.flag import given_flags


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train --systems=nonsense", "'nonsense' is not one of 'meshloom', 'torch',"),
        ("train --systems=meshloom,meshloom", "contains a name twice"),
        ("train --systems=", "'' is not one of"),
        ("translate --rounds=0", "x>=1"),
        ("moe --passes=-1", "x>=1"),
        ("decode --batch_sizes=16,0", "x>=1"),
        ("decode --batch_sizes=16;32", "'16;32' is not a list of integers"),
        ("serve --model_dir=no_run", "no_run: no such folder"),
        ("train --baseline=/no/such", "/no/such is not a checkout"),
        ("train --baseline=.", ". is not a checkout"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_measured(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((click.UsageError, UserError)) as raised:
        cli.cli.main(["bench", *line.split()], standalone_mode=False)
    error = raised.value
    assert problem in (error.message if isinstance(error, click.UsageError) else str(error))


def test_a_baseline_measures_the_systems_of_meshloom_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(
        "scripts.benchmarks.rounds.Worker",
        lambda *command, checkout: started.append((command, checkout)),
    )
    monkeypatch.setattr("scripts.benchmarks.rounds.installed", list)
    flags = moe.Flags(systems=("dense", "torch"), baseline=CHECKOUT)
    systems = starters("moe", flags)
    assert [*systems] == ["dense", "torch", f"{BASELINE}dense"]
    for start in systems.values():
        start()
    command = (*MESHLOOM, "bench", "moe")
    names = ("dense", "torch", "dense")
    assert started == [((*command, f"--worker={name}"), CHECKOUT) for name in names]
    assert [*given_flags(flags)] == ["--systems", "--baseline"]


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_rounds_alternate_or_each_system_ends_before_the_next_starts(
    monkeypatch: pytest.MonkeyPatch, *, one_at_a_time: bool
) -> None:
    events: list[str] = []

    class Recorder:
        about: ClassVar[dict[str, object]] = {}

        def __init__(self, *command: str, checkout: Path) -> None:
            self.name = command[-1].removeprefix("--worker=")
            events.append(f"start {self.name}")

        def ask(self, question: str | int) -> float:
            events.append(f"{question} {self.name}")
            return len(events)

        def close(self) -> None:
            events.append(f"end {self.name}")

    monkeypatch.setattr("scripts.benchmarks.rounds.Worker", Recorder)
    monkeypatch.setattr("scripts.benchmarks.rounds.installed", list)
    flags = moe.Flags(systems=("dense", "torch"), rounds=2, one_at_a_time=one_at_a_time)
    results, times = compare("moe", flags, 3)
    assert list(results) == ["dense", "torch"]
    assert [sorted(answers) for answers in times] == [["dense", "torch"]] * 2
    apart = events.index("end dense") < events.index("start torch")
    assert apart == one_at_a_time
    assert [event for event in events if event.startswith("3 ")] == (
        ["3 dense"] * 2 + ["3 torch"] * 2
        if one_at_a_time
        else ["3 dense", "3 torch", "3 torch", "3 dense"]
    )


def test_json_goes_to_the_standard_output_as_well() -> None:
    received: list[JsonFlags] = []
    command_of("toy", JsonFlags, received.append).main(["--json=-"], standalone_mode=False)
    assert received == [JsonFlags(json_file="-")]


def test_the_benchmarks_of_make_exist() -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    variables = dict(re.findall(r"^([\w.]+) := (.*)", makefile, re.MULTILINE))
    lines = [[name] for name in re.findall(r"for name in (.*); do", makefile)[0].split()]
    for part in variables["GPU_PARTS"].split():
        rounds = variables["GPU_ROUNDS"]
        lines.append(variables[part].replace("$(GPU_ROUNDS)", rounds).split())
    context = click.Context(cli.cli)
    bench = cli.cli.get_command(context, "bench")
    assert isinstance(bench, click.Group) and len(lines) == 5 + 4
    for name, *arguments in lines:
        command = bench.get_command(context, name)
        assert command is not None, name
        command.make_context(name, arguments)
