"""Formats numbers for people."""

from collections.abc import Sequence
from typing import Any

from layouts.cost.collectives import size_text
from trainer.checkpoints.interval import HOUR_S

SHORT_HOURS = 0.1  # shown in seconds


def shortened(items: Sequence[object], count: int) -> str:
    """Joins the first items, and adds how many more there are."""
    more = [f"{len(items) - count:,} more"] if len(items) > count else []
    return ", ".join([*map(str, items[:count]), *more])


def cell(value: object) -> str:
    """Formats a number in a table whose heading names its unit."""
    if value is None:
        return ""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def with_unit(value: Any, unit: str) -> str:
    """Formats a figure with its unit."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return " to ".join(with_unit(end, unit) for end in value)
    match unit:
        case "bytes":
            return size_text(value)
        case "s":
            return seconds_text(value)
        case "hours" if 0 < value < SHORT_HOURS:
            return seconds_text(HOUR_S * value)
        case "share":
            return f"{100 * value:.1f} %"
        case "FLOPs":
            return size_text(value, unit)
    if not isinstance(value, str):
        value = f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:.3g}"
    return f"{value} {unit}".strip()


def seconds_text(seconds: float) -> str:
    """Formats a time; short ones in smaller units."""
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    # Smaller values have three digits in the smaller unit.
    unit, size = next((u for u in units.items() if seconds >= 0.9995 * u[1]), ("ns", 1e-9))
    return f"{seconds / size:.{4 if unit == 's' else 3}g} {unit}"
