"""Runs `meshloom report`: plots the curves of a run as pictures and as one page."""

import base64
import html
from typing import Any

import click

from configs.errors import UserError
from data.storage import atomic_write
from scripts.commands.training.flags import ReportFlags
from scripts.html_page import page, table
from trainer.metrics.plots import RunPlots

CAPTIONS = {
    "loss": "Loss over steps.",
    "bleu": "BLEU over steps, of a subset of the validation split.",
    "load": "Load of each expert over steps: 1 is an even share, 0 an idle expert.",
    "dropped": "Share of the first and second choices that found no place.",
    "experts_of_parts": "Which part of the data, such as a language, uses which experts.",
}


def report(flags: ReportFlags) -> None:
    """Writes report.html and its pictures into the model directory."""
    model_dir = flags.model_dir
    pictures = RunPlots(model_dir)
    if not pictures.names():
        raise UserError(f"{model_dir}: its metrics.jsonl has no step.  Train first.")
    file = model_dir / "report.html"
    try:
        drawn = pictures.save(model_dir, *pictures.names())
        text = run_page(model_dir.name, pictures, drawn)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{model_dir}: metrics.jsonl or evaluations.jsonl is not what `meshloom train` wrote: "
            f"{type(error).__name__} {error}."
        ) from error
    atomic_write(file, text)
    written = [file, *(model_dir / f"{name}.png" for name in drawn)]
    click.echo("Wrote " + ", ".join(map(str, written)) + ".")


def run_page(title: str, pictures: RunPlots, drawn: dict[str, bytes]) -> str:
    """Writes the page of a run."""
    parts = ["<h2>Last step</h2>", table([numbers(pictures.train[-1])])]
    if pictures.checks:
        parts += ["<h2>Validation</h2>", table([numbers(line) for line in pictures.checks])]
    layers = pictures.train[-1].get("experts")
    if layers:
        rows = [{"layer": name, **of_layer(layer)} for name, layer in layers.items()]
        parts += ["<h2>Experts at the last step</h2>", table(rows)]
    parts_of_data = pictures.checks[-1].get("parts") if pictures.checks else None
    if parts_of_data:
        rows = [{"part": name, **numbers(part)} for name, part in parts_of_data.items()]
        parts += ["<h2>Parts of the data at the last validation</h2>", table(rows)]
    for name, png in drawn.items():
        image = base64.b64encode(png).decode()
        caption = html.escape(CAPTIONS[name])
        parts.append(
            f'<h2>{name}</h2><img alt="{caption}" src="data:image/png;base64,{image}">'
            f"<p>{caption}</p>"
        )
    return page(title, parts)


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def of_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns what a table says of a layer with experts."""
    load = layer["load"]
    dropped = {f"dropped {i}": share for i, share in enumerate(layer["dropped"][:2], 1)}
    largest = {"largest load": max(load) * len(load), "smallest load": min(load) * len(load)}
    return numbers(layer) | largest | dropped
