"""Which layouts there are for a model on so many devices: legal mesh shapes and rules."""

import itertools
from collections.abc import Iterator

from layouts.layout import Layout
from layouts.lint import lint
from layouts.mesh import mesh_sizes
from layouts.record import Record
from layouts.traffic import mesh_of

BATCH = "batch:data"
MODEL = "heads:model;d_ff:model;vocab:model"
# What becomes of activations between the large products, over the devices that share them: whole,
# split by position, or by width (the Giant Models guide, section 2.3).
BETWEEN = ("", "length:model?", "d_model:model?")
STORED = ("", "d_model:data")  # weights whole over the devices that share the batch, or split
EXPERTS = ("experts:data", "experts:data;experts:model")


def candidates(record: Record, devices: int) -> Iterator[Layout]:
    """Every layout of these shapes that the lint has nothing against, errors or warnings."""
    for data, model in shapes(devices):
        for rules, param_rules in rule_sets(record, data, model):
            layout = Layout(mesh=mesh_of(shape(data, model)), rules=rules, param_rules=param_rules)
            problems = lint(layout, mesh_sizes(layout.mesh, devices), record, {})
            if not any(problem.severity == "error" for problem in problems):
                yield layout


def shapes(devices: int) -> list[tuple[int, int]]:
    """Devices that share the batch x devices that share the model.

    >>> shapes(8)
    [(8, 1), (4, 2), (2, 4), (1, 8)]
    """
    return [(devices // n, n) for n in range(1, devices + 1) if devices % n == 0]


def shape(data: int, model: int) -> dict[str, int]:
    """The mesh, without axes of one device."""
    sizes = {"data": data, "model": model}
    return {name: size for name, size in sizes.items() if size > 1} or {"data": 1}


def rule_sets(record: Record, data: int, model: int) -> Iterator[tuple[str, str]]:
    """Rules and parameter rules for a mesh of these sizes."""
    has_experts = any("E" in weight.axes for weight in record.weights)
    experts = EXPERTS if has_experts else ("",)
    for between, stored, own in itertools.product(BETWEEN, STORED, experts):
        if (between and model == 1) or (stored and data == 1):
            continue
        rules = [BATCH if data > 1 else "", MODEL if model > 1 else "", between, own]
        if "experts:model" in own and (data == 1 or model == 1):
            continue
        yield ";".join(rule for rule in rules if rule), stored


def as_gin(layout: Layout, comments: list[str]) -> str:
    """A layout file: what it is for, and its bindings."""
    lines = [f"# {comment}" if comment else "#" for comment in comments]
    lines += [
        f'Layout.mesh = "{layout.mesh}"',
        f'Layout.rules = "{layout.rules}"',
        f'Layout.param_rules = "{layout.param_rules}"',
    ]
    if layout.order is not None:
        lines.append(f'Layout.order = "{layout.order}"')
    return "\n".join(lines) + "\n"
