"""Every problem of a layout and a model at once, before anything is compiled."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from configs.errors import UserError
from layouts.device_order import Torus, legal, mistakes
from layouts.layout import Layout
from layouts.lint.errors import Case, Problem, illegal, misspelt
from layouts.lint.recorder import Record, Weight
from layouts.lint.warnings import idle_rules, inefficient


def lint(
    layout: Layout,
    mesh_sizes: Mapping[str, int],
    record: Record,
    where: Mapping[str, str],
    torus: Torus | None = None,
) -> list[Problem]:
    """Finds all that is wrong (errors) or useless (warnings), errors first.

    `where` tells where things were set: "Layout.rules" to "layouts/mine.gin:3".  With the name of
    an axis ("batch" to "Run.batch_sequences") it tells what sets its size in the data.
    """
    problems, case = misspelt(Case(layout, mesh_sizes, record, where))
    problems += misordered(case, torus)
    misses_rules = any(problem.severity == "error" for problem in problems)
    problems += illegal(case) + idle_rules(case)
    if not misses_rules:  # what is misspelt may be what would make the layout efficient
        problems += inefficient(case)
    return sorted(problems, key=lambda problem: problem.severity)


def misordered(case: Case, torus: Torus | None) -> list[Problem]:
    """Why the devices of a slice cannot be put into the order that the layout asks for."""
    order = case.layout.order
    found = [] if order is None else mistakes(order, case.mesh, torus)
    subject, fix = f"order {order!r} ({case.source('order')})", legal(case.mesh, torus)
    return [Problem("error", "  ".join(found), subject, fix=fix)] if found else []


def report(name: str, problems: list[Problem]) -> str:
    """All problems as one text."""
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
    lines = "\n".join(str(problem) for problem in problems).splitlines()
    return "\n".join([f"Layout {name!r}: {count}.", *(f"  {line}" for line in lines)])


def check(
    name: str,
    layout: Layout,
    mesh_sizes: Mapping[str, int],
    record: Record,
    where: Mapping[str, str],
    torus: Torus | None = None,
) -> list[Problem]:
    """Raises all problems together if one is an error; otherwise returns the warnings."""
    problems = lint(layout, mesh_sizes, record, where, torus)
    if any(problem.severity == "error" for problem in problems):
        raise UserError(report(name, problems))
    return problems


class Row(NamedTuple):
    """Where one weight lives and what it takes."""

    path: str
    axes: str
    shape: tuple[int, ...]
    place: jax.P
    bytes: int
    bytes_per_device: int


def table(weights: tuple[Weight, ...], layout: Layout, mesh_sizes: Mapping[str, int]) -> list[Row]:
    """Each weight under a layout."""
    rows = []
    for weight in weights:
        place = layout.place(weight.axes, stored=True)
        ways = [mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,) for mesh_axes in place]
        sizes = [math.prod(mesh_sizes[a] for a in axes if a is not None) for axes in ways]
        own = math.prod(-(-n // k) for n, k in zip(weight.shape, sizes, strict=True))
        own_bytes = own * weight.dtype.itemsize
        rows.append(Row(*weight[:3], place, weight.bytes, own_bytes))
    return rows
