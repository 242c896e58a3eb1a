"""Runs `meshloom report`: plots the curves of one or several runs, as one page."""

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from configs.errors import UserError
from configs.json_reader import read_json
from configs.paths import absolute, path_of
from configs.write import values
from data.sources.text_files import identity, read_lines
from data.storage.files import atomic_write
from scripts.commands.common import STREAMS, open_output
from scripts.commands.planning.page import head, part_rows
from scripts.commands.training.flags import ReportFlags
from scripts.templates import columns, render
from scripts.terminal import print_note
from scripts.texts import with_unit
from trainer.checkpoints.interval import HOUR_S
from trainer.metrics.goodput import USES, spent_seconds
from trainer.metrics.jsonl import WALL_TIME
from trainer.metrics.plots import RunPlots, compared, curve
from trainer.metrics.profile import PARTS_FILE, PROFILE_FOLDER
from trainer.model_dir import ModelDir
from trainer.planning.breakdown import seconds_of
from trainer.planning.report import SCHEMA_VERSION
from trainer.run import Run

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Units of numbers, and titles and captions of pictures."""
SPLIT = ("tokens", "words", "lines", "bytes")
NOT_DRAWN = {"step", WALL_TIME, "parts", "examples", "bleu_sentences", *SPLIT,
             "perplexity_per_token", "perplexity_per_word"}  # fmt: skip
"""Fields of evaluations that a comparison does not plot; perplexities follow from the loss."""

HEADS = ("loss", "line", "run", "setting")
"""First columns of tables with a column for each run."""
YEAR_S = 365.25 * 24 * HOUR_S
MEAN_LINES = 10
"""Lines of metrics.jsonl to average the loss over: one line has the noise of its batches."""


def report(flags: ReportFlags) -> None:
    """Writes report.html and its pictures into the model directory, or a page of several runs."""
    folders = [*flags.runs, *([] if flags.model_dir is None else [str(flags.model_dir)])]
    if not folders or len(set(map(identity, folders))) < len(folders):
        raise UserError("report: give one run as --model_dir=DIR, or several, each once: DIR DIR.")
    if len(folders) > 1:
        output = flags.output or "report.html"
        runs = {f"./{name}" if name in HEADS else name: path_of(name) for name in folders}
        read = (str(folder / flags.samples) for folder in runs.values() if flags.samples)
        if identity(output) in map(identity, read):
            raise UserError(f"--output={output} is also an input.  Choose another file.")
        page = compare_page(runs, flags.losses or (), flags.samples)
        with open_output(output) as file:
            file.write(page)
        if output not in STREAMS:
            print_note(f"Wrote {output}.")
        return
    if flags.output is not None or flags.losses or flags.samples is not None:
        raise UserError("--output, --losses and --samples are for the page of several runs.")
    model_dir = path_of(folders[0])
    ModelDir(model_dir).check_config()
    written = write_report(model_dir, RunPlots(model_dir))
    click.echo("Wrote " + ", ".join(map(str, written)) + ".")


def compare_page(folders: Mapping[str, Path], losses: Sequence[float], samples: str | None) -> str:
    """Writes the page that compares several runs, given by name."""
    runs = {name: RunPlots(folder) for name, folder in folders.items()}
    if missing := [name for name, folder in folders.items() if not folder.exists()]:
        raise UserError(f"{', '.join(missing)}: no such folder.")
    if empty := [name for name, run in runs.items() if not run.train]:
        raise UserError(f"{', '.join(empty)}: no step in its metrics.jsonl.  Train first.")
    spent = {name: spent_seconds(folder) for name, folder in folders.items()}
    plans = {name: plan_of(folder / "plan.json") for name, folder in folders.items()}
    last = {name: last_row(run, spent[name], plans[name]) for name, run in runs.items()}
    files = {} if samples is None else {n: str(folder / samples) for n, folder in folders.items()}
    texts = {
        name: {str(number): line for number, line in enumerate(read_lines(file), 1)}
        for name, file in files.items()
    }
    lines = [line for run in runs.values() for line in run.checks]
    checked = dict.fromkeys(n for line in lines for n in line if n not in NOT_DRAWN)
    drawn = [("validation", name) for name in checked if curve(lines, name)[0]]
    return render(
        "commands/training/comparison.html",
        title="Comparison of runs",
        differ=settings_that_differ(folders),
        last=table_by_run("run", last),
        reached=table_by_run("loss", {n: tokens_until(run, losses) for n, run in runs.items()}),
        samples=table_by_run("line", texts),
        pictures={
            f"{split} {heading(name)}".capitalize(): compared(runs, split, name)
            for split, name in [("training", "loss"), *drawn]
        },
    )


def tokens_until(run: RunPlots, losses: Sequence[float]) -> dict[str, int | None]:
    """Returns a run's tokens until the mean loss of ten lines is at most each of these losses."""
    steps, values = curve(run.train, "loss")
    width = min(MEAN_LINES, len(values))
    means = np.convolve(values, np.full(width, 1 / width), "valid")
    tokens = run.total("tokens", steps[width - 1 :])
    reached = {loss: tokens[means <= loss] for loss in losses}
    return {f"{loss:.10g}": round(float(x[0])) if len(x) else None for loss, x in reached.items()}


def settings_that_differ(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Returns the rows of a table: settings that differ, and their values in each run, by name."""
    settings = dict[str, dict[str, str]]()
    for name, folder in folders.items():
        directory = ModelDir(folder)
        specs = [directory.load().make(Run)] if directory.has_run() else []
        layout = directory.layout  # the one given last
        of_run = values([*specs, *([] if layout is None else [layout])])
        settings[name] = {setting: str(value) for setting, value in of_run.items()}
    rows = table_by_run("setting", settings)
    return [row for row in rows if len({row[name] for name in folders}) > 1]


def last_row(run: RunPlots, spent: Mapping[str, float], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of the last step and of the last validation, and sums over all steps.

    If devices are cores, as on TPU v2 and v3, device-years are GShard's core-years.
    """
    all_s, devices = sum(spent.values()), plan.get("devices")
    line, steps = run.train[-1], [run.train[-1]["step"]]
    sums = {
        "all tokens": round(float(run.total("tokens", steps)[0])),
        "hours of steps": float(run.total("step_s", steps)[0]) / HOUR_S,
        **({"hours": all_s / HOUR_S, "goodput": spent.get("steps", 0) / all_s} if spent else {}),
        **({"device-years": devices * all_s / YEAR_S} if devices and spent else {}),
    }
    checks = {f"validation {n}": x for check in run.checks[-1:] for n, x in numbers(check).items()}
    return sums | numbers(line) | checks


def table_by_run(head: str, runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a table: a name in the column `head`, and its value in each run."""
    names = columns(runs.values())
    return [{head: name, **{run: of.get(name) for run, of in runs.items()}} for name in names]


def write_report(model_dir: Path, pictures: RunPlots) -> list[Path]:
    """Writes the page and its pictures; returns their paths."""
    if not pictures.names():
        raise UserError(f"{model_dir}: its metrics.jsonl has no step.  Train first.")
    file = model_dir / "report.html"
    try:
        drawn = pictures.save(model_dir, *pictures.names())
        text = run_page(model_dir, pictures, drawn)
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{model_dir}: metrics.jsonl or evaluations.jsonl is not what `meshloom train` wrote: "
            f"{type(error).__name__} {error}."
        ) from error
    atomic_write(file, text)
    return [file, *(model_dir / f"{name}.png" for name in drawn)]


def run_page(model_dir: Path, pictures: RunPlots, drawn: dict[str, bytes]) -> str:
    """Writes the page of a run."""
    checks = [numbers(line) for line in pictures.checks]
    first = checks[0] if checks else {}
    # Numbers of the split, which all evaluations share, are shown once.
    of_split = {
        name: first[name]
        for name in SPLIT
        if name in first and all(check.get(name) == first[name] for check in checks)
    }
    layers = pictures.with_experts[-1]["experts"] if pictures.with_experts else {}
    directory = ModelDir(model_dir)  # with the layout given last
    spent = spent_seconds(model_dir)
    all_s = sum(spent.values())
    files = {"Settings": directory.config_file, "Layout": directory.layout_file}
    plan = plan_of(model_dir / "plan.json")
    profile = plan_of(model_dir / PROFILE_FOLDER / PARTS_FILE)
    return render(
        "commands/training/report.html",
        title=absolute(model_dir).name,
        last=[{"number": n, "value": x} for n, x in numbers(pictures.train[-1]).items()],
        spent=[
            {"use": USES[use], "time": with_unit(s / HOUR_S, "hours"), "share": f"{s / all_s:.1%}"}
            for use, s in spent.items()
        ],
        checks=[{n: x for n, x in check.items() if n not in of_split} for check in checks],
        of_split=of_split,
        experts=[{"layer": name, **of_layer(layer)} for name, layer in layers.items()],
        parts=[{"part": name, **numbers(part)} for name, part in pictures.parts.items()],
        pictures=[(WORDS["pictures"][name], png) for name, png in drawn.items()],
        prediction=head(plan) if plan else [],
        profile=profile_rows(profile, plan),
        profiled=[profile.get(name) for name in ("first_step", "last_step")],
        files=[
            (title, file.name, file.read_bytes().decode("utf-8", "replace"))
            for title, file in files.items()
            if file.exists()
        ],
    )


def profile_rows(profile: Mapping[str, Any], plan: Mapping[str, Any]) -> list[dict[str, str]]:
    """Writes the time of profiled steps by part of the model, next to the planned time."""
    planned = {row["part"]: seconds_of(row) for row in plan.get("step_time_by_part", ())}
    total_s = sum(map(seconds_of, profile.get("step_time_by_part", ())))
    rows = part_rows({**profile, "step_time_s": total_s or 1.0})
    for row in rows if planned else ():
        row["planned"] = with_unit(planned.get(row["part of the model"]), "s")
    return rows


def plan_of(file: Path) -> dict[str, Any]:
    """Reads the figures of a run's plan or profile; empty if there are none of this version."""
    with contextlib.suppress(OSError, ValueError):
        figures = read_json(file.read_bytes(), dict[str, Any], file)
        if figures.get("schema_version") == SCHEMA_VERSION:
            return figures
    return {}


def heading(name: str, *, of_preferences: bool = False) -> str:
    """Returns the name of a number with its unit, which differs if steps learn preferences."""
    words, units = name.replace("_", " "), WORDS["units"]
    if of_preferences:
        words, units = words.replace("tokens", "preferences"), units | WORDS["preferences"]
    if unit := units.get(name):
        return f"{words} ({unit})"
    if name.endswith("_total_s"):
        return f"{words.removesuffix(' total s')} time since the last start (s)"
    is_time = name.endswith("_s") and not name.endswith("_per_s")
    return f"{words.removesuffix(' s')} time (s)" if is_time else words


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers in a line of metrics, by name and unit."""
    return {
        heading(name, of_preferences="preferences" in line): value
        for name, value in line.items()
        if isinstance(value, int | float) and name != WALL_TIME
    }


def of_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns what a table shows about a layer with experts."""
    load = layer["load"]
    dropped = {f"dropped choices {i} (share)": x for i, x in enumerate(layer["dropped"][:2], 1)}
    largest = {
        "largest load (x even share)": max(load) * len(load),
        "smallest load (x even share)": min(load) * len(load),
    }
    return numbers(layer) | largest | dropped
