"""Flags of the benchmarks: wrong values are refused before anything is measured."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from scripts.benchmarks import collectives, decode, generate, input, moe, start, train, translate
from scripts.benchmarks.options import json_option, options
from scripts.benchmarks.rounds import CHECKOUT

COMMANDS = {
    "collectives": collectives.main,
    "decode": decode.main,
    "generate": generate.main,
    "input": input.main,
    "moe": moe.main,
    "start": start.main,
    "train": train.main,
    "translate": translate.main,
}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train --systems=nonsense", "no system 'nonsense'.  Legal: meshloom, torch,"),
        ("train --systems=meshloom,meshloom", "names a system twice"),
        ("train --systems=", "no system ''"),
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
        ("train --baseline=/no/such", "/no/such is not a checkout"),
        ("train --baseline=.", ". is not a checkout"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_measured(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *arguments = line.split()
    result = CliRunner().invoke(COMMANDS[command], arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_legal_flags_arrive(tmp_path: Path) -> None:
    received = {}

    @click.command()
    @options(("meshloom", "torch"), count=7, others=("torch_compiled",))
    def command(**values: object) -> None:
        received.update(values)

    result = tmp_path / "result.json"
    flags = ["--systems=torch_compiled", f"--baseline={CHECKOUT}", f"--json={result}"]
    command(flags, standalone_mode=False)
    assert received == {
        "worker": None,
        "count": 7,
        "systems": "torch_compiled",
        "baseline": CHECKOUT,
        "json_file": str(result),
    }


def test_json_goes_to_the_standard_output_as_well() -> None:
    command = click.command()(json_option()(lambda json_file: click.echo(json_file)))
    assert CliRunner().invoke(command, ["--json=-"]).output == "-\n"
