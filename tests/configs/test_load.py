"""Gin files and flags: what is read, and what is said of mistakes."""

import os

import pytest

from configs.load import _renamed, load
from configs.read import MAX_CHARACTERS
from tests.configs.gin_specs import MODEL, RUN, GinModel, GinRun, GinSgd, message


def test_later_wins_and_what_it_replaced_is_kept(write):
    a, b = write(RUN, "a.gin"), write("\nGinRun.steps = 20\n", "b.gin")
    config = load([a, b], ["GinRun.steps=30"])
    by_name = {binding.name: binding for binding in config.bound.values()}
    steps = by_name["GinRun.steps"]
    assert (steps.value, steps.origin) == (30, "--gin_param")
    assert config.replaced_values == (10, 20)
    assert (by_name["GinRun.model"].value, by_name["GinRun.model"].origin) == (
        "@GinModel()",
        "a.gin:3",
    )
    assert load([b, a]).make(GinRun).steps == 10


def test_includes_stand_where_they_are_written(write):
    write("GinModel.layers = 1\nGinModel.width = 1\n", "models/tiny.gin")
    text = "GinModel.layers = 3\ninclude 'models/tiny.gin'\nGinModel.width = 5\n"
    config = load([write(text)])
    assert config.make(GinModel) == GinModel(layers=1, width=5)
    assert [b.origin for b in config.bound.values()] == ["models/tiny.gin:1", "run.gin:3"]


def test_files_are_found_in_the_current_folder_then_in_the_checkout(folder, write, monkeypatch):
    checkout = folder / "checkout"
    monkeypatch.setattr("configs.read.CHECKOUT", checkout)
    write("GinModel.layers = 1\n", "checkout/models/one.gin")
    write("include 'models/one.gin'\n", "checkout/runs/run.gin")
    assert load(["runs/run.gin"]).make(GinModel).layers == 1
    write("GinModel.layers = 2\n", "models/one.gin")
    assert load(["runs/run.gin"]).make(GinModel).layers == 2
    assert load([str(checkout / "models" / "one.gin")]).make(GinModel).layers == 1


def test_a_missing_file_suggests_a_neighbour(write):
    write(RUN, "runs/quickstart.gin")
    error = message("runs/quikstart.gin", "other.gin", make=GinRun)
    assert error.startswith("Configuration: 2 problems.\n  runs/quikstart.gin: no such file in ")
    assert os.getcwd() in error and "Did you mean quickstart.gin?" in error
    assert "\n  other.gin: no such file" in error


def test_a_missing_included_file_says_who_includes_it(write):
    error = message(write("\ninclude 'gone.gin'\n"))
    assert error.startswith("run.gin:2: gone.gin: no such file in ")


def test_a_file_that_includes_itself(write):
    write("include 'run.gin'\n", "b.gin")
    assert message(write("include 'b.gin'\n")) == "b.gin:1: run.gin includes itself."


def test_two_configs_live_side_by_side(write):
    a = load([write(RUN)])
    b = load(["run.gin"], ["GinRun.steps=99", "GinModel.layers=9"])
    assert (a.make(GinRun).steps, b.make(GinRun).steps, a.make(GinRun).steps) == (10, 99, 10)
    assert a.make(GinRun).model.layers == 2 and not load([]).bound


def test_odd_names_and_files_are_refused(write, folder):
    os.mkfifo(folder / "fifo.gin")
    (folder / "loop.gin").symlink_to("loop.gin")
    for name in ("x" * 300 + ".gin", "a\0b", "", ".", "fifo.gin", "loop.gin", "/dev/zero"):
        assert "no such file in" in message(name)
        assert "no such file in" in message(write(f"include {name!r}\n"))
    assert "run.gin" not in message("x" * 5000) and len(message("x" * 5000)) < 1000
    assert "too long" in message(write("#" * MAX_CHARACTERS + "\n"))
    if os.path.exists("/proc/self/mem"):
        assert "/proc/self/mem: cannot be read" in message("/proc/self/mem")


def test_deep_and_long_values_are_refused_soon(write):
    for depth in (12, 50, 400, 5000):
        nested = "[" * depth + "]" * depth
        assert "Nested more than 10 deep" in message(write(f"A = {nested}"))
    assert "strings in a row" in message(write("A = " + "'a' " * 100_000))
    assert len(message(write(RUN + f"GinRun.steps = '{'x' * 100_000}'"), make=GinRun)) < 500
    assert len(message(write(f"A = 1 {'x' * 100_000}"))) < 1000
    for value in ("{[]: 1}", "9" * 5000, "--1", "{'a': {}: 1}", "'\\N{no}'"):
        assert "run.gin:1: cannot read A" in message(write(f"A = {value}\n"))


def test_what_grows_without_end_is_refused_soon(write):
    for i in range(20):
        write(f"include '{i + 1}.gin'\n" * 2, f"{i}.gin")
    assert "more than 1,000 files and includes" in message(write("", "20.gin"), "0.gin")
    doubled = "".join(f"A{i} = (%A{i + 1}, %A{i + 1})\n" for i in range(30))
    macros = f"{RUN}GinRun.sizes = %A0\n{doubled}A30 = 1\n"
    assert "too many references" in message(write(macros), make=GinRun)
    chain = "".join(f"A{i} = %A{i + 1}\n" for i in range(500))
    macros = f"{RUN}GinRun.steps = %A0\n{chain}A500 = 1\n"
    assert "too many references" in message(write(macros), make=GinRun)
    assert "… and " in message(write("".join(f"GinRun.x{i} = 1\n" for i in range(200))))
    again = load([write(MODEL * 2_000)]).replaced_values
    assert again == (2,) * 1_999


def test_unknown_names_are_all_reported(write):
    text = (
        "GinRum.steps = 1\nGinRun.stepz = 2\nGinRun.model = @GinModl()\nGinRun.seed = %SEEDS\n"
        "SEED = 1\nGinRun.optimizer = @GinSgd\n"
    )
    lines = message(write(text), params=("GinRum.x=1",)).splitlines()
    assert lines[0] == "Configuration: 6 problems."
    assert lines[1].startswith(
        "  run.gin:1: GinRum.steps: no spec is named GinRum.  Did you mean GinRun?  Legal: "
    )
    assert "GinAdam, " in lines[1] and "GinModel, " in lines[1]
    assert lines[2:6] == [
        "  run.gin:2: GinRun.stepz: no such parameter.  Did you mean steps?  "
        "Legal: steps, model, name, seed, sizes, optimizer, others.",
        lines[3],
        "  run.gin:4: %SEEDS: no such macro.  Did you mean SEED?",
        "  run.gin:6: @GinSgd: legal: @GinSgd().",
    ]
    assert lines[3].startswith("  run.gin:3: @GinModl(): no spec is named GinModl.  Did you mean ")
    assert lines[6].startswith("  --gin_param: GinRum.x: no spec is named GinRum.")


def test_an_unknown_parameter_is_named_with_its_scope(write):
    said = message(write("a/b/GinRun.stepz = 2\n"))
    assert said.startswith("run.gin:1: a/b/GinRun.stepz: no such parameter.  Did you mean steps?")


@pytest.mark.parametrize("value", ["data:8", "/tmp/x", "toy", "'toy", "1 2", "it's"])
def test_a_param_with_a_forgotten_quote(value):
    right = "'it\\'s'" if value == "it's" else f"'{value.strip(chr(39))}'"
    assert message(params=(f"GinRun.name={value}",)) == (
        f"--gin_param: cannot read GinRun.name={value}\n"
        f'  A string needs quotes.  Legal: --gin_param="GinRun.name={right}"'
    )


def test_a_spec_without_its_sign_is_shown_with_it():
    said = message(params=("GinRun.model=GinModel",))
    assert "  A string needs quotes; for a spec, write @GinModel()." in said


def test_an_open_bracket_is_said(write):
    assert "  A bracket is not closed." in message(write("GinRun.sizes = (1,\n"))


def test_a_file_may_begin_with_a_byte_order_mark(write):
    """As an editor of Windows writes it."""
    assert load([write("\ufeff" + RUN)]).bound


@pytest.mark.parametrize(
    ("param", "legal"),
    [
        ("a/GinRun.seed=none", "a/GinRun.seed=None"),
        ("GinRun.name=", "GinRun.name=value"),
        ("GinRun.steps", "Name.parameter=value"),
        ("--steps=3", "Name.parameter=value"),
    ],
)
def test_malformed_param(param, legal):
    error = message(params=(param,))
    assert error.startswith(f"--gin_param: cannot read {param}\n  ")
    assert error.endswith(f'  Legal: --gin_param="{legal}"')


@pytest.mark.parametrize("param", ["GinRun.sizes=(1, 2", "GinRun.model=@"])
def test_unfinished_param(param):
    assert message(params=(param,)).startswith(f"--gin_param: cannot read {param}\n  ")


def test_a_param_without_a_spec_is_no_silent_macro(write):
    # A setting that no spec outside these tests has, whichever of them are imported.
    error = message(write(RUN), params=("sizes=3",))
    assert error == "--gin_param: sizes: nothing reads %sizes.  Did you mean GinRun.sizes?"


@pytest.mark.parametrize(
    "line",
    ["GinRun.name = toy", "GinRun.name 3", "= 3", "GinRun.sizes = (1,", "GinRun.x = $", "'abc",
     "GinRun:", "GinRun.seed = 1 2", "include x", "GinRun..x = 1", "a//GinRun.x = 1", "import",
     "@GinRun.x = 1", "GinRun.x = {1: }", "\x00", "  é = ", "GinRun.x = 0777"],
)  # fmt: skip
def test_bad_grammar_is_never_a_traceback(write, line):
    error = message(write(f"{RUN}\n{line}\n"), "gone.gin")
    assert error.startswith("Configuration: 2 problems.\n  run.gin:")
    assert ": cannot read " in error


def test_a_forgotten_quote_in_a_file(write):
    assert message(write("GinModel.layers = 2\nGinRun.name = toy\n")) == (
        "run.gin:2: cannot read GinRun.name = toy\n"
        "  A string needs quotes.  Legal: GinRun.name = 'toy'"
    )


def test_table(write):
    text = RUN + "s/GinModel.layers = 1\nGinRun.others = [@s/GinModel()]\n"
    rows = load([write(text)], ["GinRun.seed=3"]).table(GinRun)
    by_name = {row.name: (row.value, row.origin) for row in rows}
    assert len(by_name) == len(rows) == 7 + 3 + 1 + 1 + 3 + 1
    assert by_name["GinRun.steps"] == (10, "run.gin:2")
    assert by_name["GinRun.seed"] == (3, "--gin_param")
    assert by_name["GinRun.name"] == ("toy", "default")
    assert by_name["GinRun.optimizer"] == ("@GinAdam()", "default")
    assert by_name["GinAdam.decay"] == (0.125, "default")
    assert by_name["s/GinModel.layers"] == (1, "run.gin:4")
    assert by_name["s/GinModel.width"] == (8, "default")
    assert [row.name for row in rows if row.origin != "default"] == [
        "GinRun.steps",
        "GinRun.model",
        "GinModel.layers",
        "GinRun.seed",
        "GinRun.others",
        "s/GinModel.layers",
    ]


def test_unused(write):
    text = RUN + "GinSgd.decay = 0.75\nGinAdam.decay = %D\nD = 0.5\nE = 1\nx/GinModel.width = 4\n"
    config = load([write(text)])
    names = [binding.name for binding in config.unused(GinRun)]
    assert names == ["GinSgd.decay", "E", "x/GinModel.width"]
    assert [b.name for b in config.unused(GinRun, GinSgd)] == ["E", "x/GinModel.width"]


def test_what_later_values_replace_is_named_with_what_its_settings_name(write):
    text = RUN + "GinRun.model = @a/GinModel()\nGinModel.layers = %D\nD = 2\nE = 3\n"
    assert load([write(text)]).replaced() == {"GinModel", "D"}


def test_messages_name_settings_as_the_file_does() -> None:
    message = _renamed("Tsv.tag = 1: legal: a string.", "de/Tsv.tag")
    assert message == "de/Tsv.tag = 1: legal: a string."
