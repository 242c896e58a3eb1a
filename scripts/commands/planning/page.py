"""Writes a plan as one HTML page that needs no other file."""

import html
from typing import Any

import click

from scripts.commands.common import open_output
from scripts.commands.training.report import STYLE, table

BARS = (
    ".bar{display:flex;height:2rem;margin:.5rem 0}.bar div{overflow:hidden;color:#fff;"
    "font-size:.75rem;line-height:2rem;padding-left:.3rem;white-space:nowrap}"
)
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
HEAD = ("fits", "bytes_per_device", "cache_bytes", "parameters", "model_flops", "executed_flops",
        "step_time_s", "start_latency_s", "token_latency_s", "output_latency_s", "tokens_per_s",
        "utilisation", "run_hours", "chip_hours", "compile_s")  # fmt: skip
TIMES = {
    "step_time_parts_s": "Time of a step",
    "start_parts_s": "Time before the first token",
    "token_parts_s": "Time of a token",
}


def write_page(file: str, title: str, figures: dict[str, Any]) -> None:
    """Writes the page of a plan, of training or of decoding, from its figures."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        f"<style>{STYLE}{BARS}</style><h1>{html.escape(title)}</h1>",
        table(
            [{"figure": name, "value": text_of(figures[name])} for name in HEAD if name in figures]
        ),
        "<h2>Memory per device</h2>",
        bar(figures["bytes_by_cause"], figures["memory_bytes"]),
        table([{"cause": c, "bytes": n} for c, n in figures["bytes_by_cause"].items()]),
    ]
    for name, heading in TIMES.items():
        times = {part: s for part, s in (figures.get(name) or {}).items() if s}
        if times:
            parts += [f"<h2>{heading}</h2>", bar(times, None)]
            parts.append(table([{"part": part, "s": s} for part, s in times.items()]))
    lists = [
        {**c, "mesh_axes": ", ".join(c["mesh_axes"]), "overlaps": text_of(c["overlaps"])}
        for c in figures["collectives"]
    ]
    parts += ["<h2>Collectives</h2>", table(lists)]
    unexpected = [*filter(None, [figures["excess_flops"]]), *figures["unexpected_collectives"]]
    if unexpected:
        items = "".join(f"<li>{html.escape(text)}" for text in unexpected)
        parts.append(f"<h2>Where the compiled program differs from the trace</h2><ul>{items}</ul>")
    if "weights" in figures:
        parts += ["<h2>Largest weights</h2>", table(figures["weights"])]
    with open_output(file) as page:
        page.write("\n".join(parts))
    click.echo(f"Wrote {file}.")


def text_of(value: object) -> object:
    """Writes yes, no, unknown or the value itself."""
    if value is None:
        return "unknown"
    return ("yes" if value else "no") if isinstance(value, bool) else value


def bar(sizes: dict[str, float], whole: float | None) -> str:
    """Draws parts beside each other; the rest of the whole stays empty."""
    total = max(sum(sizes.values()), whole or 0.0) or 1.0
    parts = "".join(
        f'<div style="width:{100 * size / total:.2f}%;background:{COLOURS[i % len(COLOURS)]}"'
        f' title="{html.escape(name)}">{html.escape(name)}</div>'
        for i, (name, size) in enumerate(sizes.items())
    )
    return f'<div class="bar">{parts}</div>'
