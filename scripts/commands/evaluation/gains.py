"""Runs `meshloom gains`: plots the gains of models over a baseline, for each part of a mixture."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt

from configs.errors import UserError
from configs.json_reader import read_json
from configs.paths import path_of
from data.storage import lookup
from data.storage.files import atomic_path, write_errors
from scripts.commands.common import write_json
from scripts.commands.evaluation.flags import GainsFlags
from scripts.terminal import print_note, print_table
from trainer.metrics.plots import import_pyplot

SPAN = 10  # values in the moving average, by data size, as in GShard's Figure 6

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Holds the scores of one part of a mixture, or of a task with a single part."""

    bleu: Annotated[float, Field(ge=0, lt=101)]  # rounding may exceed 100
    references_hash: str
    train_pairs: PositiveInt | None = None
    """Known only for the parts of a mixture."""


@dataclass(frozen=True)
class MixtureScores:
    """Holds what is read from an evaluation."""

    parts: Annotated[dict[Annotated[str, Field(min_length=1)], Part], Field(min_length=1)]


def gains(flags: GainsFlags) -> dict[str, Any]:
    """Reads the results of `meshloom evaluate --json`, prints a table and draws a picture.

    Lepikhin et al. 2020 (GShard), Figure 6.
    """
    baseline = parts_of(flags.baseline)
    models = {path: parts_of(path) for path in flags.evaluation}
    for path, parts in models.items():
        if differing := sorted(set(baseline) ^ set(parts)):
            raise UserError(
                f"{flags.baseline} and {path}: only one of them has {', '.join(differing)}."
            )
        for name, part in parts.items():
            if part.references_hash != baseline[name].references_hash:
                raise UserError(
                    f"{flags.baseline} and {path}: their references for {name} differ.  Evaluate "
                    "both on the same split, with the same --sentences."
                )
    all_parts = (baseline, *models.values())
    pairs_of = {name: max(parts[name].train_pairs or 0 for parts in all_parts) for name in baseline}
    names = sorted(baseline, key=lambda name: -pairs_of[name])
    gained = {
        path: [parts[name].bleu - baseline[name].bleu for name in names]
        for path, parts in models.items()
    }
    rows = []
    for i, name in enumerate(names):
        differences = (f"{of_model[i]:+.2f}" for of_model in gained.values())
        rows.append([name, f"{pairs_of[name]:,}", f"{baseline[name].bleu:.2f}", *differences])
    means = {path: statistics.fmean(part_gains) for path, part_gains in gained.items()}
    of_baseline = statistics.fmean(baseline[name].bleu for name in names)
    rows.append(["mean", "", f"{of_baseline:.2f}", *(f"{mean:+.2f}" for mean in means.values())])
    print_table(["part", "train pairs", f"BLEU of {flags.baseline}", *models], rows)
    draw(flags.output, names, [pairs_of[name] for name in names], gained)
    print_note(f"Wrote {flags.output}.")
    result = {
        "baseline": {"mean_bleu": of_baseline},
        "models": {
            path: {"mean_gain": means[path], "gains": dict(zip(names, part_gains, strict=True))}
            for path, part_gains in gained.items()
        },
    }
    write_json(flags.json_file, result)
    return result


def parts_of(path: str) -> Mapping[str, Part]:
    """Reads the parts of an evaluation, or a folder with an evaluation per part, by file name."""
    folder = path_of(path)
    if folder.is_dir():
        files = {file.stem: file for file in sorted(folder.glob("[!.]*.json"))}
        if not files:
            raise UserError(f"{path}: the folder has no evaluations, such as {path}/de.json.")
        return {name: read_scores(str(file), Part) for name, file in files.items()}
    return read_scores(path, MixtureScores).parts


def read_scores(path: str, kind: type[T]) -> T:
    """Reads an evaluation of a mixture, or of a task of one part."""
    content = lookup.read_bytes(path, path_of(path))
    try:
        return read_json(content, kind, "it")
    except UserError as error:
        what = "BLEU" if kind is Part else "BLEU by part"
        raise UserError(
            f"{path}: contains no {what} ({str(error).rstrip('.')}).  Evaluate one checkpoint: "
            "meshloom evaluate --split=test --json=FILE."
        ) from None


def draw(output: str, names: list[str], pairs: list[int], gained: dict[str, list[float]]) -> None:
    """Draws the gains of each part, from most data to least, and a moving average per model."""
    pyplot = import_pyplot()
    positions = range(len(names))
    width = min(max(5, 0.2 * len(names)), 30)
    figure, axes = pyplot.subplots(figsize=(width, 4.5), layout="constrained")
    for number, (path, part_gains) in enumerate(gained.items()):
        axes.scatter(positions, part_gains, s=14, color=f"C{number}", alpha=0.5)
        axes.plot(positions, moving_average(part_gains), color=f"C{number}", label=Path(path).stem)
    labels = [f"{name} {size:,}" for name, size in zip(names, pairs, strict=True)]
    axes.set_xticks(positions, labels, rotation="vertical", fontsize="x-small")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="pairs to train on", ylabel="BLEU over the baseline's")
    axes.grid(alpha=0.3)
    axes.legend()
    kind, legal = Path(output).suffix[1:].lower() or "png", figure.canvas.get_supported_filetypes()
    if kind not in legal:
        raise UserError(f"--output={output}: not an image format.  Legal: {', '.join(legal)}.")
    target = path_of(output)
    with write_errors(target, "give another file"), atomic_path(target) as file:
        figure.savefig(file, dpi=120, format=kind)
    pyplot.close(figure)


def moving_average(values: list[float]) -> list[float]:
    """Averages each value with its neighbours, of which there are fewer at the ends."""
    side = SPAN // 2
    return [statistics.fmean(values[max(i - side, 0) : i + side]) for i in range(len(values))]
