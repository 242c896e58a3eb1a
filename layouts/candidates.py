"""Enumerates layouts for a model and a number of devices: legal mesh shapes and rules."""

import itertools
from collections.abc import Iterator, Mapping

from layouts.cost.collectives import format_mesh
from layouts.layout import Layout
from layouts.lint.recorder import Record
from layouts.lint.report import lint
from layouts.mesh import mesh_sizes

MODEL = "heads:model;d_ff:model;vocab:model"
IMAGES = "height:model+"
# Activations between the large products, over the model parallel devices: replicated, split by
# position, or by width (the Giant Models guide, section 2.3).
ACTIVATIONS = ("", "length:model?", "d_model:model?")
# Weights over the data parallel devices: replicated, or split, where experts come first.
WEIGHTS = ("", "d_model:{rows}", "d_model:{rows}?")
# Rules and parameter rules of layouts that everyone knows.
DATA_PARALLEL = ("batch:data", "")
FSDP = ("batch:data", "d_model:data")
FSDP_AND_MODEL = (f"batch:data;{MODEL}", "d_model:data")
EXPERTS = "experts:{rows}"
EVERYWHERE = "experts:{rows};experts:model"  # then d_ff gives way to them


def candidates(record: Record, devices: int, rows: int = 0) -> Iterator[Layout]:
    """Yields every legal layout on one or two mesh axes that divides `rows`; 0 divides by any."""
    for data, model in shapes(devices):
        if rows % data == 0:
            yield from legal_layouts_on(record, {"data": data, "model": model})


def with_shard_axis(record: Record, layout: Layout) -> Iterator[Layout]:
    """Yields layouts of the same shape that split weights and experts over fewer devices."""
    sizes = mesh_sizes(layout.mesh, None)
    data, model = sizes.get("data", 1), sizes.get("model", 1)
    for shard in range(2, data):
        if data % shard == 0:
            mesh = {"data": data // shard, "shard": shard, "model": model}
            yield from legal_layouts_on(record, mesh)


def legal_layouts_on(record: Record, mesh: Mapping[str, int]) -> Iterator[Layout]:
    """Yields every legal layout on these mesh axes."""
    sizes = {name: size for name, size in mesh.items() if size > 1} or {"data": 1}
    for rules, param_rules in rule_sets(record, sizes):
        layout = Layout(mesh=format_mesh(sizes), rules=rules, param_rules=param_rules)
        problems = lint(layout, sizes, record, {})
        if not any(problem.severity == "error" for problem in problems):
            yield layout


def shapes(devices: int) -> list[tuple[int, int]]:
    """Returns the shapes of meshes: data parallel x model parallel devices.

    >>> shapes(8)
    [(8, 1), (4, 2), (2, 4), (1, 8)]
    """
    return [(devices // n, n) for n in range(1, devices + 1) if devices % n == 0]


def rule_sets(record: Record, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields rules and parameter rules for a mesh of these sizes."""
    rows = next((name for name in ("shard", "data") if name in sizes), None)
    has_experts = any("E" in weight.axes for weight in record.weights)
    has_images = any("Y" in tensor.axes for tensor in record.tensors)
    batch = [f"batch:{name}" for name in ("data", "shard") if name in sizes]
    over_model = [("", "")]
    if "model" in sizes:
        over_model = [(MODEL, activation) for activation in ACTIVATIONS]
        over_model += [(IMAGES, "")] if has_images else []
    weights = [rule for rule in WEIGHTS if rows or not rule]
    experts = [""]
    if has_experts and rows:
        experts += [EXPERTS, EVERYWHERE] if "model" in sizes else [EXPERTS]
    for (model, activation), weight, expert in itertools.product(over_model, weights, experts):
        if weight.endswith("?") and not expert:
            continue  # the same as without
        if "shard" in sizes and not weight and not expert:
            continue  # the same as without that mesh axis
        if expert == EVERYWHERE:
            model = model.replace("d_ff:model", "d_ff:model?")
        rules = [*batch, model, activation, expert.format(rows=rows)]
        yield ";".join(rule for rule in rules if rule), weight.format(rows=rows)
