"""Prints the figures of a plan, of training or of decoding, as tables."""

import math
from collections.abc import Sequence
from typing import Any

from layouts.cost.collectives import size_text
from layouts.cost.step_time import Timing
from scripts.terminal import print_table
from trainer.planning.report import by_line

MAX_COLLECTIVES = 12  # in a table


def print_memory(figures: dict[str, Any]) -> None:
    rows = [*figures["bytes_by_cause"].items(), ("all", figures["bytes_per_device"])]
    if figures["memory_bytes"] is not None:
        rows.append(("available", figures["memory_bytes"]))
    print_table(["memory per device", "bytes"], [(cause, size_text(size)) for cause, size in rows])


def print_weights(figures: dict[str, Any]) -> None:
    print_table(
        ["largest weights", "axes", "bytes", "per device"],
        [
            (row["path"], row["axes"], size_text(row["bytes"]), size_text(row["bytes_per_device"]))
            for row in figures["weights"]
        ],
    )


def print_collectives(rows: Sequence[dict[str, Any]], unit: str) -> None:
    """Prints the collectives of each line of the model, as often as in one unit: step or token."""
    print_table(
        ["collective", "over", "times", f"received a {unit}", f"s a {unit}", "for"],
        [
            (row["kind"], ",".join(row["mesh_axes"]), row["count"],
             size_text(row["received_bytes"]), f"{row['seconds']:.3g}" if row["seconds"] else "",
             row["source"])
            for row in by_line(rows)[:MAX_COLLECTIVES]
        ],
    )  # fmt: skip


def print_times(what: str, timing: Timing) -> None:
    rows = [(name, f"{s:.4g}", f"{s / timing.step_s:.1%}") for name, s in timing.parts.items()]
    print_table([f"time of a {what}", "s", "share"], rows)


def print_unexpected(figures: dict[str, Any]) -> None:
    """Prints what the compiled program does beyond the trace: FLOPs, then traffic."""
    if figures["excess_flops"] is not None:
        print(f"The compiled program {figures['excess_flops']}.")
    for text in figures["unexpected_collectives"]:
        print(f"The compiled program differs from the layout: {text}.")


def summary_line(figures: dict[str, Any], parts: Sequence[str]) -> str:
    """Joins whether a plan fits, its other figures and its compile time."""
    fits = {True: "fits", False: "does not fit", None: "memory"}[figures["fits"]]
    parts = [f"{fits}: {size_text(figures['bytes_per_device'])} per device", *parts]
    if figures["compile_s"] is not None:
        parts.append(f"compiled in {figures['compile_s']:.0f} s")
    return "; ".join(parts) + "."


def sort_key(figures: dict[str, Any], time: str) -> tuple[bool, float]:
    """Orders plans by a time, after those that fit, or may, the others."""
    time_s = figures[time]
    return figures["fits"] is False, math.inf if time_s is None else time_s
