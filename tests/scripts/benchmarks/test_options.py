"""Flags of the benchmarks: wrong values are refused before anything is measured."""

from pathlib import Path

import click
import pytest

from configs.errors import UserError
from scripts import cli
from scripts.benchmarks import moe
from scripts.benchmarks.rounds import BASELINE, CHECKOUT, MESHLOOM, JsonFlags, start
from scripts.command_line import command_of
from scripts.flag import given_flags


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train --systems=nonsense", "'nonsense' is not one of 'meshloom', 'torch',"),
        ("train --systems=meshloom,meshloom", "has a name twice"),
        ("train --systems=", "'' is not one of"),
        ("translate --rounds=0", "x>=1"),
        ("moe --passes=-1", "x>=1"),
        ("start --rounds=0", "x>=1"),
        ("input --batches=many", "'many' is not a valid integer"),
        ("decode --batch_sizes=16,0", "x>=1"),
        ("decode --batch_sizes=16;32", "'16;32' is not a list of integers"),
        ("generate --batch_sizes=", "'' is not a list of integers"),
        ("generate --json=no_folder/file.json", "no_folder/file.json: cannot be written"),
        ("collectives --figure=-", "-: not a picture format.  Legal ending: .png"),
        ("collectives --figure=no_folder/a.png", "no_folder/a.png: cannot be written"),
        ("collectives --megabytes=8,0", "x>=1"),
        ("collectives --chip=v7", "'v7' is not one of 'v2', 'v3'"),
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
    assert [*start("moe", flags)] == ["dense", "torch", f"{BASELINE}dense"]
    command = (*MESHLOOM, "bench", "moe")
    names = ("dense", "torch", "dense")
    assert started == [((*command, f"--worker={name}"), CHECKOUT) for name in names]
    assert given_flags(flags) == ["--systems", "--baseline"]


def test_json_goes_to_the_standard_output_as_well() -> None:
    received: list[JsonFlags] = []
    command_of("toy", JsonFlags, received.append).main(["--json=-"], standalone_mode=False)
    assert received == [JsonFlags(json_file="-")]
