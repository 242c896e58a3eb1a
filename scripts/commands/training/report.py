"""Runs `meshloom report`: plots the curves of one or several runs, as one page."""

import contextlib
import html
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from configs.errors import UserError
from configs.json_reader import read_json
from configs.paths import path_of
from configs.write import values
from data.storage.files import atomic_write
from scripts.commands.planning.page import head
from scripts.commands.training.flags import ReportFlags
from scripts.html_page import cell, image, page, table
from trainer.metrics.goodput import HOUR_S, USES, spent_seconds
from trainer.metrics.jsonl import WALL_TIME
from trainer.metrics.plots import RunPlots, compared, curve
from trainer.model_dir import ModelDir
from trainer.planning.figures import SCHEMA_VERSION

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Units of numbers; titles and captions of pictures."""
SPLIT = ("tokens", "words", "lines", "bytes")
NOT_DRAWN = {"step", WALL_TIME, "parts", "examples", "bleu_sentences", *SPLIT,
             "perplexity_per_token", "perplexity_per_word"}  # fmt: skip
"""What evaluations have besides the curves of a comparison; perplexities follow from the loss."""


def report(flags: ReportFlags) -> None:
    """Writes report.html and its pictures into the model directory, or a page of several runs."""
    folders = [*flags.runs, *([] if flags.model_dir is None else [str(flags.model_dir)])]
    if not folders or len(set(folders)) < len(folders):
        raise UserError("report: name one run by --model_dir=DIR, or several, each once: DIR DIR.")
    if len(folders) > 1:
        file = path_of(flags.output or "report.html")
        atomic_write(file, comparison_page({name: path_of(name) for name in folders}))
        click.echo(f"Wrote {file}.")
        return
    if flags.output is not None:
        raise UserError("--output names the page of several runs; that of one is in its folder.")
    model_dir = path_of(folders[0])
    written = write_report(model_dir, RunPlots(model_dir))
    click.echo("Wrote " + ", ".join(map(str, written)) + ".")


def comparison_page(folders: Mapping[str, Path]) -> str:
    """Writes the page of several runs, by name."""
    runs = {name: RunPlots(folder) for name, folder in folders.items()}
    if empty := [name for name, run in runs.items() if not run.train]:
        raise UserError(f"{', '.join(empty)}: no step in its metrics.jsonl.  Train first.")
    differ = settings_that_differ(folders)
    parts = ["<h2>Settings that differ</h2>", table(differ) if differ else "<p>None.</p>"]
    spent = {name: spent_seconds(folder) for name, folder in folders.items()}
    last = [{"run": name, **last_numbers(run, spent[name])} for name, run in runs.items()]
    parts += ["<h2>Last numbers</h2>", table(transposed(last))]
    lines = [line for run in runs.values() for line in run.checks]
    checked = dict.fromkeys(n for line in lines for n in line if n not in NOT_DRAWN)
    drawn = [("validation", name) for name in checked if curve(lines, name)[0]]
    for split, name in [("training", "loss"), *drawn]:
        title = html.escape(f"{split} {heading(name)}".capitalize())
        parts += [f"<h2>{title}</h2>", image(compared(runs, split, name), title)]
    return page("Comparison of runs", parts)


def settings_that_differ(folders: Mapping[str, Path]) -> list[dict[str, str]]:
    """Returns the rows of a table: a setting, and its value in each of some runs, by name."""
    settings = dict[str, dict[str, Any]]()
    for name, folder in folders.items():
        directory = ModelDir(folder)
        specs = [directory.recorded_run()] if directory.has_run() else []
        layout = directory.layout  # the one that was given last
        settings[name] = values([*specs, *([] if layout is None else [layout])])
    rows = [
        {"setting": setting, **{name: str(run.get(setting, "")) for name, run in settings.items()}}
        for setting in dict.fromkeys(setting for run in settings.values() for setting in run)
    ]
    return [row for row in rows if len({row[name] for name in folders}) > 1]


def last_numbers(run: RunPlots, spent: Mapping[str, float]) -> dict[str, Any]:
    """Returns the numbers of the last step and of the last validation, and sums of all steps."""
    all_s = sum(spent.values())
    line, steps = run.train[-1], [run.train[-1]["step"]]
    sums = {
        "all tokens": round(float(run.total("tokens", steps)[0])),
        "hours of steps": float(run.total("step_s", steps)[0]) / HOUR_S,
        **({"hours": all_s / HOUR_S, "goodput": spent.get("steps", 0) / all_s} if spent else {}),
    }
    checks = {f"validation {n}": x for check in run.checks[-1:] for n, x in numbers(check).items()}
    return sums | numbers(line) | checks


def transposed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a table as its columns; the first value of each names it.

    >>> transposed([{"run": "a", "loss": 1.5}, {"run": "b", "step": 2}])
    [{'run': 'loss', 'a': 1.5, 'b': None}, {'run': 'step', 'a': None, 'b': 2}]
    """
    first, *names = dict.fromkeys(name for row in rows for name in row)
    return [{first: name, **{row[first]: row.get(name) for row in rows}} for name in names]


def write_report(model_dir: Path, pictures: RunPlots) -> list[Path]:
    """Writes the page and its pictures; returns their files."""
    if not pictures.names():
        raise UserError(f"{model_dir}: its metrics.jsonl has no step.  Train first.")
    file = model_dir / "report.html"
    try:
        drawn = pictures.save(model_dir, *pictures.names())
        text = run_page(model_dir, pictures, drawn)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{model_dir}: metrics.jsonl or evaluations.jsonl is not what `meshloom train` wrote: "
            f"{type(error).__name__} {error}."
        ) from error
    atomic_write(file, text)
    return [file, *(model_dir / f"{name}.png" for name in drawn)]


def run_page(model_dir: Path, pictures: RunPlots, drawn: dict[str, bytes]) -> str:
    """Writes the page of a run."""
    last = [{"number": n, "value": value} for n, value in numbers(pictures.train[-1]).items()]
    parts = ["<h2>Last step</h2>", table(last)]
    if seconds := spent_seconds(model_dir):
        total_s = sum(seconds.values())
        rows = [
            {"use": USES[use], "hours": spent_s / HOUR_S, "share": f"{spent_s / total_s:.1%}"}
            for use, spent_s in seconds.items()
        ]
        parts += ["<h2>Where the time went</h2>", table(rows)]
    if pictures.checks:
        checks = [numbers(line) for line in pictures.checks]
        # The numbers of the split, which are those of all evaluations, are in one line.
        of_split = [n for n in SPLIT if n in checks[0] and len({c.get(n) for c in checks}) == 1]
        rows = [{n: v for n, v in check.items() if n not in of_split} for check in checks]
        parts += ["<h2>Validation</h2>", table(rows)]
        if of_split:
            shown = ", ".join(f"{cell(checks[0][name])} {name}" for name in of_split)
            parts.append(f"<p>Of {shown}.</p>")
    if pictures.with_experts:
        layers = pictures.with_experts[-1]["experts"]
        rows = [{"layer": name, **of_layer(layer)} for name, layer in layers.items()]
        parts += ["<h2>Experts at the last step</h2>", table(rows)]
    if pictures.parts:
        rows = [{"part": name, **numbers(part)} for name, part in pictures.parts.items()]
        parts += ["<h2>Parts of the data at the last validation</h2>", table(rows)]
    for name, png in drawn.items():
        words = WORDS["pictures"][name]
        title, caption = html.escape(words["title"]), html.escape(words["caption"])
        parts.append(f"<h2>{title}</h2>{image(png, caption)}<p>{caption}</p>")
    with contextlib.suppress(OSError, ValueError):  # no prediction, or of another version
        file = model_dir / "plan.json"
        figures = read_json(file.read_bytes(), dict[str, Any], file)
        if figures.get("schema_version") == SCHEMA_VERSION:
            parts += ["<h2>Prediction for a step</h2>", head(figures)]
    directory = ModelDir(model_dir)  # the layout is the one that was given last
    for title, file in (("Settings", directory.config_file), ("Layout", directory.layout_file)):
        if file.exists():
            text = html.escape(file.read_bytes().decode("utf-8", "replace"))
            parts.append(
                f"<h2>{title}</h2><details><summary>{file.name}</summary><pre>{text}</pre></details>"
            )
    return page(model_dir.name, parts)


def heading(name: str) -> str:
    """Writes the name of a number with its unit.

    >>> heading("loss"), heading("step_s"), heading("tokens_per_s"), heading("evaluation_total_s")
    ('loss (nats per token)', 'step time (s)', 'tokens per s', 'evaluation total time (s)')
    """
    words = name.replace("_", " ")
    if unit := WORDS["units"].get(name):
        return f"{words} ({unit})"
    is_time = name.endswith("_s") and not name.endswith("_per_s")
    return f"{words.removesuffix(' s')} time (s)" if is_time else words


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a line of metrics, by name and unit."""
    return {heading(name): value for name, value in line.items()
            if isinstance(value, int | float) and name != WALL_TIME}  # fmt: skip


def of_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns what a table says of a layer with experts."""
    load = layer["load"]
    dropped = {
        f"dropped choices {i} (share)": share for i, share in enumerate(layer["dropped"][:2], 1)
    }
    largest = {
        "largest load (x even share)": max(load) * len(load),
        "smallest load (x even share)": min(load) * len(load),
    }
    return numbers(layer) | largest | dropped
