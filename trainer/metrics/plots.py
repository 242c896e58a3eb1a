"""Draws a run's numbers over its steps: loss, BLEU, and the load of experts."""

import io
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.errors import extra_required
from data.storage.files import atomic_write
from trainer.metrics.jsonl import EVALUATIONS, METRICS, Line, is_number, read_lines

SCALE = 14.0  # of smoothing, in steps


class RunPlots:
    """Draws the plots for which metrics.jsonl and evaluations.jsonl have data."""

    def __init__(self, model_dir: Path):
        self.train = read_lines(model_dir / METRICS, "loss")
        for line in self.train:
            if is_number(rate := line.get("model_flops_per_s")) and is_number(line.get("step_s")):
                line["model_flops"] = rate * line["step_s"]
        self.checks = read_lines(model_dir / EVALUATIONS, "loss")
        self.with_experts = of_one_shape(self.train, "experts")
        self.parts: dict[str, Line] = next(
            (line["parts"] for line in reversed(of_one_shape(self.checks, "parts"))), {}
        )
        self.parts_with_experts = {
            name: part
            for name, part in self.parts.items()
            if isinstance(part, dict) and part.get("experts")
        }

    def total(self, name: str, steps: Sequence[float]) -> np.ndarray:
        """Sums a number per step, such as tokens, up to each of the given steps.

        A line of metrics counts for all steps since the previous line.
        """
        logged, each = curve(self.train, name)
        sums = np.cumsum([0.0, *np.array(each) * np.diff([0, *logged])])
        return np.interp(steps, [0, *logged], sums)

    def names(self) -> list[str]:
        """Returns the names of the available plots; none before the first step."""
        if not self.train:
            return []
        drawable = {
            "loss": True,
            "bleu": bool(curve(self.checks, "bleu")[0]),
            "load": bool(self.with_experts),
            "dropped": bool(self.with_experts),
            "experts_of_parts": bool(self.parts_with_experts),
        }
        return [name for name, can_draw in drawable.items() if can_draw]

    def save(self, folder: Path, *names: str) -> dict[str, bytes]:
        """Writes those of the named plots that are available as PNG files, and returns them."""
        drawn = {name: self.png(name) for name in self.names() if name in names}
        for name, png in drawn.items():
            atomic_write(folder / f"{name}.png", png)
        return drawn

    def png(self, name: str) -> bytes:
        """Returns a plot as a PNG file."""
        return png_of(getattr(self, f"_{name}"))

    def _loss(self, pyplot: Any) -> Any:
        """Plots the losses, and below them the learning rate."""
        figure, (axes, below) = pyplot.subplots(
            2, 1, figsize=(7, 5), layout="constrained", sharex=True, height_ratios=(4, 1)
        )
        steps, losses = curve(self.train, "loss")
        style = "-" if len(steps) > 1 else "o"
        thin: Any = {"linewidth": 0.8, "alpha": 0.35, "color": "tab:blue"}
        axes.plot(steps, losses, style, label="training, each step", **thin)
        label = "training, smoothed without lag"
        axes.plot(steps, smoothed(losses), style, color="tab:blue", label=label)
        of_preferences = "preferences" in self.train[-1]
        axes.set(ylabel=f"loss (nats per {'preference' if of_preferences else 'token'})")
        if self.checks:
            ticks = axes.twinx() if of_preferences else axes  # another unit, another scale
            label = "validation" + ", nats per token (right)" * of_preferences
            axes.plot([], [], "o-", color="tab:orange", label=label)
            ticks.plot(*curve(self.checks, "loss"), "o-", color="tab:orange")
        below.plot(*curve(self.train, "learning_rate"), style, color="tab:gray")
        below.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        below.xaxis.get_major_locator().set_params(integer=True)
        for panel in (axes, below):
            panel.grid(alpha=0.3)
        axes.legend()
        return figure

    def _bleu(self, pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(*curve(self.checks, "bleu"), "o-", color="tab:green")
        sentences = max(curve(self.checks, "bleu_sentences")[1], default=math.nan)
        axes.set(xlabel="step", ylabel=f"BLEU ({sentences:.0f} validation sentences)")
        axes.grid(alpha=0.3)
        return figure

    def _load(self, pyplot: Any) -> Any:
        """Plots the load of experts over steps, a panel per layer; 1 is an even load."""
        steps, _ = curve(self.with_experts, "loss")
        layers = list(self.with_experts[-1]["experts"])
        figure, panels = pyplot.subplots(
            len(layers), 1, figsize=(7, 1 + 1.8 * len(layers)), layout="constrained",
            squeeze=False, sharex=True,
        )  # fmt: skip
        last = steps[-1] + (steps[-1] - steps[0]) / max(len(steps) - 1, 1)
        for name, axes in zip(layers, panels[:, 0], strict=True):
            load_ES = np.array([line["experts"][name]["load"] for line in self.with_experts]).T
            extent = (steps[0], max(last, steps[0] + 1), len(load_ES) - 0.5, -0.5)
            drawn = draw_load(axes, load_ES * len(load_ES), extent=extent)
            axes.set(ylabel=f"{name}: expert")
        panels[-1, 0].set(xlabel="step")
        figure.colorbar(drawn, ax=panels, label="load over its even share", extend="max")
        return figure

    def _dropped(self, pyplot: Any) -> Any:
        """Plots the share of each layer's choices that was dropped."""
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        steps, _ = curve(self.with_experts, "loss")
        for number, name in enumerate(self.with_experts[-1]["experts"]):
            shares = np.array([line["experts"][name]["dropped"] for line in self.with_experts])
            for choice, share_S in enumerate(shares.T[:2]):
                style, label = "-:"[choice], f"{name}, choice {choice + 1}"
                axes.plot(steps, smoothed(list(share_S)), style, color=f"C{number}", label=label)
        axes.set(xlabel="step", ylabel="share of choices without a place", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        return figure

    def _experts_of_parts(self, pyplot: Any) -> Any:
        """Plots the load of experts by part, a panel per layer; 1 is an even load."""
        parts = self.parts_with_experts
        layers = list(next(iter(parts.values()))["experts"])
        size = (1 + 3 * len(layers), 1.5 + 0.16 * len(parts))
        figure, panels = pyplot.subplots(
            1, len(layers), figsize=size, layout="constrained", squeeze=False, sharey=True
        )
        for layer, axes in zip(layers, panels[0], strict=True):
            load_PE = np.array([part["experts"][layer]["load"] for part in parts.values()])
            drawn = draw_load(axes, load_PE * load_PE.shape[1])
            axes.set(title=layer, xlabel="expert")
        panels[0, 0].set_yticks(range(len(parts)), list(parts), fontsize="x-small")
        figure.colorbar(drawn, ax=panels, label="load over its even share", extend="max")
        return figure


def compared(runs: Mapping[str, RunPlots], split: str, name: str) -> bytes:
    """Plots a "training" or "validation" number of several runs, as a PNG file.  The x axes are
    steps, tokens, hours of steps and, if all runs have them, model FLOPs."""
    count = 3 + all(curve(run.train, "model_flops")[0] for run in runs.values())

    def draw(pyplot: Any) -> Any:
        size = (4 * count, 4 + len(runs) / 12)
        figure, panels = pyplot.subplots(1, count, figsize=size, layout="constrained", sharey=True)
        for number, (label, run) in enumerate(runs.items()):
            is_training, colour = split == "training", f"C{number % 10}"
            steps, values = curve(run.train if is_training else run.checks, name)
            values = smoothed(values) if is_training else values
            lines = ("-", "--", ":", "-.")[number // 10 % 4]  # after ten colours
            style = lines if is_training and len(values) > 1 else f"o{lines}"
            label = label if len(label) < 40 else f"{label[:19]}…{label[-19:]}"
            places = {
                "step": steps,
                "tokens": run.total("tokens", steps),
                "hours of steps": run.total("step_s", steps) / 3600,
                "model FLOPs": run.total("model_flops", steps),
            }
            for axes, (xlabel, x) in zip(panels, places.items(), strict=False):
                axes.plot(x, values, style, color=colour, label=label if steps else None)
                axes.set(xlabel=xlabel)
        for axes in panels:
            axes.grid(alpha=0.3)
            axes.locator_params(axis="x", nbins=4)  # so long numbers do not touch
        panels[0].set(ylabel=f"{split} {name.replace('_', ' ')}")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return figure

    return png_of(draw)


def draw_load(axes: Any, load: np.ndarray, **options: Any) -> Any:
    """Draws loads as colours; an even load is white."""
    style = {"aspect": "auto", "interpolation": "nearest", "cmap": "RdBu_r"}
    drawn = axes.imshow(load, vmin=0, vmax=2, **style, **options)
    axes.locator_params(integer=True)  # there is no half of an expert, nor of a step
    return drawn


def curve(lines: list[Line], name: str) -> tuple[list[float], list[float]]:
    """Returns the steps that have a number of this name, and the numbers."""
    lines = [line for line in lines if is_number(line.get(name))]
    return [line["step"] for line in lines], [line[name] for line in lines]


def of_one_shape(lines: list[Line], key: str) -> list[Line]:
    """Returns the lines whose value under a key has the most common structure."""
    lines = [line for line in lines if isinstance(line.get(key), dict)]
    shapes = [jax.tree.structure(line[key]) for line in lines]
    usual = [shape for shape, _ in Counter(shapes).most_common(1)]
    return [line for line, shape in zip(lines, shapes, strict=True) if [shape] == usual]


def smoothed(values: list[float]) -> list[float]:
    """Fits a parabola around each value, where a neighbour at distance k weighs exp(-k / scale).

    A mean of the previous values would lag behind a falling loss.  A centered mean lags at the
    ends, and a fitted line is above a bend.  A loss falls faster at the start, so fewer neighbours
    count there: the scale is a tenth of the value's number.  Infinite values and NaN, as in a run
    that diverged, leave a gap and have no weight.
    """
    value_S = np.asarray(values, np.float64)
    is_finite_S = np.isfinite(value_S)
    value_S, count = np.where(is_finite_S, value_S, 0.0), len(values)
    scale_S = np.minimum((np.arange(count) + 1) / 10, SCALE)
    moments_S33, sums_S3 = np.zeros((count, 3, 3)), np.zeros((count, 3))
    reach = min(math.ceil(SCALE * math.log(100)), count - 1)  # a neighbour there weighs 1 %
    for k in range(-reach, reach + 1):
        places = slice(max(0, -k), count - max(0, k))
        neighbours = slice(max(0, k), count + min(0, k))
        weight_S1 = (np.exp(-abs(k) / scale_S[places]) * is_finite_S[neighbours])[:, None]
        terms_3 = (k / SCALE) ** np.arange(3)
        moments_S33[places] += weight_S1[:, :, None] * np.outer(terms_3, terms_3)
        sums_S3[places] += weight_S1 * value_S[neighbours, None] * terms_3
    fit_S31 = np.linalg.pinv(moments_S33, hermitian=True) @ sums_S3[:, :, None]
    return [float(value) for value in np.where(is_finite_S, fit_S31[:, 0, 0], np.nan)]


def import_pyplot() -> Any:
    """Imports matplotlib only to draw a plot: the import is slow, and the package is an extra."""
    with extra_required("plot", "a plot"):
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    pyplot.rcParams["text.parse_math"] = False  # a name with $ is not a formula
    return pyplot


def png_of(draw: Callable[[Any], Any]) -> bytes:
    """Returns the figure that a function makes with pyplot, as a PNG file."""
    pyplot = import_pyplot()
    figure, file = draw(pyplot), io.BytesIO()
    with warnings.catch_warnings():  # a name may have characters that the font lacks
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
    return file.getvalue()
