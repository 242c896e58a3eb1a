"""Flags from dataclasses, and imports that follow use."""

import errno
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest

from scripts import cli, command_line, devices
from scripts.command_line import command_of, parameters_of
from scripts.flag import Flag
from tests.scripts.conftest import Meshloom
from tests.toys import ROOT


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    HEADING = "Sizes"
    width: Annotated[int | None, Flag("Width.", metavar="N", min=1)] = None
    share: Annotated[float, Flag("Share.", min=0, max=1)] = 0.5


@dataclass(frozen=True, kw_only=True)
class ListFlags:
    names: Annotated[tuple[str, ...], Flag("Names.", choices=("a", "b"))] = ("a",)
    sizes: Annotated[tuple[int, ...], Flag("Sizes.")] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class ToyFlags:
    """Does nothing.

    It is a toy.
    """

    EXAMPLES = ("meshloom toy --text=a",)
    text: Annotated[str, Flag("Text.")]
    names: Annotated[tuple[str, ...], Flag("Names.", name="name")] = ()
    kind: Annotated[Literal["a", "b"], Flag("Kind.")] = "a"
    fast: Annotated[bool, Flag("Speed.", off="slow")] = True
    dry: bool = False
    """Dry, in a
    docstring."""
    sizes: SizeFlags = field(default_factory=SizeFlags)


def parse(*arguments: str) -> ToyFlags:
    received: list[Any] = []
    command_of("toy", ToyFlags, received.append).main(list(arguments), standalone_mode=False)
    (flags,) = received
    assert isinstance(flags, ToyFlags)
    return flags


def test_flags_arrive_as_the_dataclass() -> None:
    assert parse("--text=a") == ToyFlags(text="a")
    given = ["--text=a", "--name=x", "--name=y", "--kind=b", "--slow", "--dry", "--width=3"]
    assert parse(*given) == ToyFlags(
        text="a", names=("x", "y"), kind="b", fast=False, dry=True, sizes=SizeFlags(width=3)
    )


def test_commas_separate_names_and_integers(capsys: pytest.CaptureFixture[str]) -> None:
    received: list[Any] = []
    command = command_of("toy", ListFlags, received.append)
    for arguments in [], ["--names=b,a", "--sizes=3,3"]:
        command.main(arguments, standalone_mode=False)
    assert received == [ListFlags(), ListFlags(names=("b", "a"), sizes=(3, 3))]
    command.main(["--help"], standalone_mode=False)
    assert "[default: 1,2]" in capsys.readouterr().out


def test_two_flags_may_not_write_the_same_file(run: Meshloom, tmp_path: Path) -> None:
    outputs = [f"--json={tmp_path}/plan", f"--html={tmp_path}/./plan"]
    answer = run("plan", "--gin_file=configs/runs/quickstart.gin", *outputs)
    assert answer.code == 2 and "--html and --json name the same file" in answer.error


@pytest.mark.parametrize("wrong", ["--width=0", "--share=2", "--kind=c", "--names=x"])
def test_illegal_values_are_usage_errors(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        parse("--text=a", wrong)


@pytest.mark.parametrize("flag", ["--model_dir", "--data_dir"])
@pytest.mark.parametrize("path", ["az://bucket/run", "gs:/bucket/run", "file:///run", "gs://b", ""])
def test_a_path_of_another_scheme_or_without_a_name_is_refused_and_makes_no_folder(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    path: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"--model_dir": "run", "--data_dir": "data", flag: path}
    problem = f"{path}: .*  Legal: .*gs://bucket/name" if path else "the name is empty"
    with pytest.raises(click.UsageError, match=problem):
        cli.cli.main(["train", *(f"{k}={v}" for k, v in flags.items())], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_help_shows_groups_of_flags_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    command_of("toy", ToyFlags, print).main(["--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert shown.index("--text") < shown.index("Sizes:") < shown.index("--width")
    assert "Dry, in a docstring." in shown
    assert shown.index("Examples:") < shown.index("meshloom toy --text=a")


def every_command() -> list[tuple[str, type]]:
    groups = {
        "": cli.WORK,
        "inspect ": cli.INSPECT_WORK,
        "import ": cli.IMPORT_WORK,
        "export ": cli.EXPORT_WORK,
    }
    return [
        (group + name, command_line.imported(flags))
        for group, work in groups.items()
        for name, (flags, _) in work.items()
    ]


@pytest.mark.parametrize(("name", "flags"), every_command(), ids=str)
def test_every_command_explains_itself_in_sentences(name: str, flags: type) -> None:
    assert (flags.__doc__ or "").rstrip().endswith(".")
    assert all(example.find(f"meshloom {name} ") >= 0 for example in flags.EXAMPLES)
    for option in parameters_of(flags):
        if isinstance(option, click.Option):
            assert (option.help or "").endswith("."), option.name


def test_devices_are_flags_of_the_commands_that_use_them() -> None:
    without = {"gains", "papers", "report", "supervise"}
    without |= {f"{way} {what}" for way in ("import", "export") for what in ("hf", "peft")}
    without |= {"inspect config", "inspect data", "inspect checkpoint", "inspect settings"}
    named = {
        name
        for name, flags in every_command()
        if "simulate_devices" not in {parameter.name for parameter in parameters_of(flags)}
    }
    assert named == without
    assert devices.ProcessFlags.HEADING == "Devices and processes"


def imported_by(*arguments: str) -> set[str]:
    """The modules that a process has imported once a command is done."""
    script = (
        "import sys, scripts.cli as m\n"
        f"m.cli.main({list(arguments)!r}, standalone_mode=False)\n"
        "print('modules', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["decode", "--help"], ["plan", "--help"]])
def test_help_imports_no_library_of_the_work(arguments: list[str]) -> None:
    heavy = {"jax", "flax", "numpy", "orbax", "rich", "pydantic", "matplotlib", "sacrebleu"}
    assert not imported_by(*arguments) & heavy


def test_inspect_config_imports_what_settings_need() -> None:
    used = imported_by("inspect", "config", "--gin_file=configs/runs/quickstart.gin")
    heavy = {"orbax", "sacrebleu", "matplotlib", "tensorflow_datasets"}
    assert not used & heavy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "trian: no such command.  Did you mean train?  Legal: train, prepare, "),
        (["inspect", "parms"], "parms: no such command.  Did you mean params?  Legal: config, "),
    ],
)
def test_a_command_that_is_misspelt(run: Meshloom, arguments: list[str], message: str) -> None:
    answer = run(*arguments)
    assert answer.code == 2 and message in answer.error


def test_version_is_printed(run: Meshloom) -> None:
    answer = run("--version")
    assert answer.code == 0 and answer.out.startswith("meshloom, version ")


def test_help_shows_only_the_bounds_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of("toy", SizeFlags, print)
    command.main(["--help"], standalone_mode=False)
    help_text = capsys.readouterr().out
    assert "[x>=1]" in help_text and str(command_line.LARGEST) not in help_text
    unbounded = ["decode", "--help"]
    cli.cli.main(unbounded, standalone_mode=False)
    help_text = capsys.readouterr().out
    assert "x<=None" not in help_text and "RANGE" not in help_text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(value: str) -> None:
    one = ["decode", "--model_dir=m", "--input=-", f"--alpha={value}"]
    for arguments in (one, ["report", "a", "b", f"--losses=4,{value}"]):
        with pytest.raises(click.BadParameter, match="not a finite number"):
            cli.cli.main(arguments, standalone_mode=False)


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_factor_of_logits_is_positive(value: str) -> None:
    arguments = ["evaluate", "--model_dir=m", f"--logit_scale={value}"]
    with pytest.raises(click.BadParameter, match="not in the range x>0"):
        cli.cli.main(arguments, standalone_mode=False)


def test_a_closed_output_ends_a_command_with_a_code_of_its_own() -> None:
    """As click 8 does not: it exits with 1, and says nothing."""

    def write(flags: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        command_of("toy", SizeFlags, write).main([], standalone_mode=False)


@pytest.mark.parametrize(
    ("flag", "kind"), [("--batch_sequences=x", "integer"), ("--logit_scale=x", "number")]
)
def test_a_word_is_no_number_of_a_range(flag: str, kind: str) -> None:
    with pytest.raises(click.BadParameter, match=rf"'x' is not a valid {kind}\.$"):
        cli.cli.main(["evaluate", "--model_dir=m", flag], standalone_mode=False)


def test_an_integer_beyond_int32_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="2147483648 is above 2147483647"):
        cli.cli.main(["tune", f"--simulate_devices={2**31}"], standalone_mode=False)


@pytest.mark.parametrize("group", [[], ["inspect"], ["import"], ["export"], ["bench"]])
def test_a_group_shows_whole_sentences(
    capsys: pytest.CaptureFixture[str], group: list[str]
) -> None:
    cli.cli.main([*group, "--help"], standalone_mode=False)
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert listed.strip().endswith(".") and "..." not in listed
