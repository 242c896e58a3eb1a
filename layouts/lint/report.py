"""Reports every problem of a layout and a model at once, before anything is compiled."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from configs.errors import UserError
from layouts.axes import alphabet
from layouts.device_order import Torus, describe_legal_orders, order_problems
from layouts.layout import Layout
from layouts.lint.errors import LintContext, Problem, check_conflicts, check_spelling
from layouts.lint.recorder import Record, Weight
from layouts.lint.warnings import (
    check_idle_rules,
    check_mesh_axes,
    check_repeats,
    check_replicated_weights,
)
from layouts.padding import with_axes
from layouts.shards import mesh_axes
from layouts.slices import slice_counts


def lint(
    layout: Layout,
    mesh_sizes: Mapping[str, int],
    record: Record,
    origins: Mapping[str, str],
    torus: Torus | None = None,
) -> list[Problem]:
    """Finds what is wrong (errors) and what is useless (warnings), errors first.

    `origins` maps settings to the lines that set them, "Layout.rules" to "layouts/mine.gin:3", and
    axes of the data to the settings of their sizes, "batch" to "Run.batch_sequences".
    """
    problems, context = check_spelling(LintContext(layout, mesh_sizes, record, origins))
    problems += check_devices(context, torus)
    has_all_rules = all(problem.severity == "warning" for problem in problems)
    problems += check_conflicts(context) + check_idle_rules(context) + check_repeats(context)
    if has_all_rules:  # a misspelt rule may be what would make the layout efficient
        problems += check_mesh_axes(context) + check_replicated_weights(context)
    return sorted(problems, key=lambda problem: problem.severity)


def check_devices(context: LintContext, torus: Torus | None) -> list[Problem]:
    """Reports why devices have no such order, or why slices do not divide the mesh axes."""
    order, slices, problems = context.layout.order, context.layout.slices, []
    if order is not None and (wrong := order_problems(order, context.mesh, torus)):
        subject = f"order {order!r} ({context.source('order')})"
        fix = describe_legal_orders(context.mesh, torus)
        problems.append(Problem("error", "device-order", "  ".join(wrong), subject, fix=fix))
    try:
        if slices is not None:
            slice_counts(slices, context.mesh)
    except UserError as error:
        subject = f"slices {slices!r} ({context.source('slices')})"
        problems.append(Problem("error", "slices", str(error).partition(": ")[2], subject))
    return problems


def report(name: str, problems: list[Problem]) -> str:
    """Formats all problems as one text."""
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
    lines = "\n".join(str(problem) for problem in problems).splitlines()
    return "\n".join([f"Layout {name!r}: {count}.", *(f"  {line}" for line in lines)])


def check(name: str, problems: list[Problem]) -> list[Problem]:
    """Raises all problems together if one is an error; otherwise returns the warnings."""
    if any(problem.severity == "error" for problem in problems):
        raise UserError(report(name, problems))
    return problems


class WeightSharding(NamedTuple):
    """Holds sharding and size of one weight."""

    path: str
    axes: str
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    place: jax.P
    bytes: int
    bytes_per_device: int


def table(
    weights: tuple[Weight, ...], layout: Layout, mesh_sizes: Mapping[str, int]
) -> list[WeightSharding]:
    """Returns the sharding and size of each weight under a layout."""
    rows = []
    for weight in weights:
        place = with_axes(layout, *weight.declared_axes).place(weight.axes, stored=True)
        shards = [math.prod(mesh_sizes[name] for name in mesh_axes(entry)) for entry in place]
        count = math.prod(-(-n // k) for n, k in zip(weight.shape, shards, strict=True))
        shard_bytes = count * weight.dtype.itemsize
        by_letter = alphabet(weight.declared_axes).by_letter
        names = tuple(by_letter[letter].name for letter in weight.axes)
        rows.append(WeightSharding(*weight[:3], names, place, weight.bytes, shard_bytes))
    return rows
