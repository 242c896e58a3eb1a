"""Reports every problem of a layout and a model at once, before anything is compiled.

For a legal layout, these are wasted rules, computation and memory.  After Shazeer et al. 2018
(Mesh-TensorFlow), section 8.4.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax

from configs.errors import UserError
from layouts.axes import alphabet
from layouts.cost.collectives import size_text
from layouts.device_order import Torus, describe_legal_orders, order_problems
from layouts.layout import Layout, Rule
from layouts.lint import errors
from layouts.lint.errors import LintContext, Problem, SourcedRule, find_conflicts, first_names
from layouts.lint.recorder import Product, Record, Tensor, Weight, error_of, find_statement
from layouts.mesh import slice_counts
from layouts.padding import with_axes
from layouts.shards import mesh_axes

MIN_SPLIT_SHARE = 0.5  # of the FLOPs that a mesh axis should split
MAX_REPLICATED_SHARE = 0.02  # of the parameter bytes
SMALL_BYTES = 1e8  # weights of this size and their optimizer state fit on every device
# Traces a program under a layout on a mesh of these sizes, allocating nothing.
Trace = Callable[[Layout, Mapping[str, int]], object]
ONE_DEVICE = Layout(mesh="one:1", rules="")


def check_idle_rules(context: LintContext) -> list[Problem]:
    """Reports rules that split nothing."""
    matched: set[SourcedRule] = set()
    effective: set[SourcedRule] = set()
    for tensor in context.tensors:
        assignments = context.assignments(tensor)
        matched |= {sourced for sourced, _ in assignments}
        effective |= {sourced for sourced, assigned in assignments if assigned.lost_to is None}
    idle = [sourced for sourced in context.rules if sourced not in effective]
    return [_idle_rule(context, sourced, sourced in matched) for sourced in idle]


def check_repeats(context: LintContext) -> list[Problem]:
    """Reports repeats of a pipeline if layers are not split into stages."""
    repeats, stages = context.layout.pipeline_repeats, context.layout.stage_axes
    if repeats == 1 or math.prod(context.mesh.get(name, 1) for name in stages) > 1:
        return []
    subject = f"pipeline_repeats = {repeats} ({context.source('pipeline_repeats')})"
    reason = "changes nothing: no rule splits layers into stages."
    fix = 'Add a rule such as "layers:pipe" for a mesh axis of several devices, or remove it.'
    return [Problem("warning", "unmatched-rule", reason, subject, fix=fix)]


def _idle_rule(context: LintContext, sourced: SourcedRule, matched: bool) -> Problem:
    axis, mesh_axis = sourced.rule[:2]
    rule, tensors = context.cite(sourced), context.record.tensors
    if matched:
        reason = f"never takes effect: another axis uses {mesh_axis} in every tensor with {axis}."
        return Problem("warning", "overruled-rule", reason, rule=rule)
    if axis == "heads" and any("J" in tensor.axes for tensor in tensors):
        reason = "kv_heads or queries have a rule of their own, which is used."
    else:
        things = "tensor" if sourced.field == "rules" else "weight"
        reason = f"no {things} of this model has the axis {axis}."
    if sourced.field == "param_rules" and sourced.rule.pads:  # it would pad activations alone
        reason = f"pads nothing: {reason}"
        return Problem("error", "unmatched-rule", reason, rule=rule, fix="Remove it.")
    return Problem("warning", "unmatched-rule", f"matches nothing: {reason}", rule=rule)


def check_mesh_axes(context: LintContext) -> list[Problem]:
    """Reports mesh axes along which devices repeat most products."""
    problems = []
    for mesh_axis, size in context.mesh.items():
        repeated = _repeated_products(context, mesh_axis)
        share = sum(product.flops for product in repeated) / max(context.record.flops, 1)
        if size == 1 or share <= 1 - MIN_SPLIT_SHARE:
            continue
        largest = sorted(repeated, key=lambda product: -product.flops)
        added, left = _splitting_rules(context, mesh_axis, share)
        fix = f'Adding "{";".join(added)}" to Layout.rules splits {_percent(1 - left)}.'
        fix = fix if added else "Give its devices to another mesh axis."
        reason = (
            f"splits {_percent(1 - share)} of the FLOPs; all {size} devices along it compute"
            f" the same {_percent(share)}: {first_names(product.name for product in largest)}."
        )
        subject = f"mesh axis {mesh_axis}:{size} ({context.source('mesh')})"
        problems.append(Problem("warning", "idle-mesh-axis", reason, subject, fix=fix))
    return problems


def _repeated_products(context: LintContext, mesh_axis: str) -> list[Product]:
    """Returns the products that the rules do not split over a mesh axis."""
    products = context.record.products
    return [product for product in products if mesh_axis not in _mesh_axes(context, product)]


def _mesh_axes(context: LintContext, product: Product) -> set[str]:
    """Returns the mesh axes that split a product, as if one tensor had all its letters.

    Stages split the products of layers.
    """
    inputs, out = product.equation.split("->")
    letters = "".join(dict.fromkeys("N" * product.in_layers + out + inputs.replace(",", "")))
    assignments = context.assignments(Tensor("", letters, (), False))
    return {assigned.rule.mesh_axis for _, assigned in assignments if assigned.lost_to is None}


def _splitting_rules(context: LintContext, mesh_axis: str, share: float) -> tuple[list[str], float]:
    """Returns legal rules that split more over a mesh axis, and the share left unsplit."""
    ruled = {sourced.rule.axis for sourced in context.rules}
    axes = ["heads", "d_ff", "vocab", "experts", "d_model"]
    axes.insert(len(axes) if "batch" in ruled else 0, "batch")
    added: list[str] = []
    for axis in axes:
        sourced = SourcedRule("rules", Rule(axis, mesh_axis))
        candidate = context.with_rule(sourced)
        flops = sum(product.flops for product in _repeated_products(candidate, mesh_axis))
        left = flops / context.record.flops
        if left < share - MAX_REPLICATED_SHARE and not find_conflicts(candidate).involve(sourced):
            context, share = candidate, left
            added.append(str(sourced.rule))
    return added, share


def check_replicated_weights(context: LintContext) -> list[Problem]:
    """Reports the weights that every device holds, if they are large and make up a large share."""
    devices = math.prod(context.mesh.values())
    replicated = _replicated(context)
    total = max(_bytes(context.record.weights), 1)
    if devices == 1 or _bytes(replicated) <= max(MAX_REPLICATED_SHARE * total, SMALL_BYTES):
        return []
    largest = sorted(replicated, key=lambda weight: -weight.bytes)
    names = first_names(f"{weight.path} ({size_text(weight.bytes)})" for weight in largest)
    share = _percent(_bytes(replicated) / total)
    rule, left = _rule_that_shards(context)
    amount = f"all but {_percent(left / total)}" if left else "all"
    fix = f'Adding "{rule}" to Layout.param_rules splits {amount}.'
    if not rule:
        fix = "No single rule can split them: their sizes do not divide over the mesh."
    reason = f"{share} of their bytes are replicated on {devices} devices: {names}."
    return [Problem("warning", "replicated-weights", reason, "weights", fix=fix)]


def _replicated(context: LintContext) -> list[Weight]:
    """Returns the weights that no mesh axis splits."""
    weights = zip(context.record.weights, context.record.tensors, strict=False)
    return [
        weight
        for weight, tensor in weights
        if all(context.mesh[a.rule.mesh_axis] == 1 for _, a in context.assignments(tensor))
    ]


def _bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.bytes for weight in weights)


def _rule_that_shards(context: LintContext) -> tuple[str, int]:
    """Returns the legal parameter rule, or "", that replicates the fewest bytes, and how many."""
    letters = dict.fromkeys(letter for weight in context.record.weights for letter in weight.axes)
    split = [mesh_axis for mesh_axis, size in context.mesh.items() if size > 1]
    best = ("", _bytes(_replicated(context)))
    for mesh_axis, letter in itertools.product(split, letters):
        sourced = SourcedRule("param_rules", Rule(context.name(letter), mesh_axis))
        candidate = context.with_rule(sourced)
        left = _bytes(_replicated(candidate))
        if left < best[1] and not find_conflicts(candidate).involve(sourced):
            best = (str(sourced.rule), left)
    return best


def _percent(share: float) -> str:
    """Formats a share, with decimals where it would round to 0% or 100%."""
    return f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"


def lint(
    layout: Layout,
    mesh_sizes: Mapping[str, int],
    record: Record,
    origins: Mapping[str, str],
    torus: Torus | None = None,
) -> list[Problem]:
    """Finds what is wrong (errors) and what is useless (warnings), errors first.

    `origins` maps settings to the lines that set them ("Layout.rules" to "layouts/mine.gin:3"), and
    axes of the data to the settings of their sizes ("batch" to "Run.batch_sequences").
    """
    problems, context = errors.check_spelling(LintContext(layout, mesh_sizes, record, origins))
    problems += check_devices(context, torus)
    has_all_rules = all(problem.severity == "warning" for problem in problems)
    problems += errors.check_conflicts(context) + check_idle_rules(context) + check_repeats(context)
    if has_all_rules:  # a misspelt rule may be what would make the layout efficient
        problems += check_mesh_axes(context) + check_replicated_weights(context)
    return sorted(problems, key=lambda problem: problem.severity)


def check_devices(context: LintContext, torus: Torus | None) -> list[Problem]:
    """Reports why devices cannot be in this order, or why slices do not divide the mesh axes."""
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
    """Holds the sharding and the size of a weight."""

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


def find_trace_problem(context: LintContext, trace: Trace) -> Problem | None:
    """Traces a program under the layout; explains the error if the layout causes it.

    The layout is not the cause if the same program also fails on one device.
    """
    error = error_of(trace, context.layout, context.mesh)
    if error is None or error_of(trace, ONE_DEVICE, {"one": 1}) is not None:
        return None
    statement = find_statement(error)
    nearest = nearest_layout(context, trace, statement.letters)
    changed = [sourced for sourced in context.rules if sourced not in nearest.rules]
    bindings = [
        f'Layout.{field} = "{getattr(nearest.layout, field)}"'
        for field in errors.FIELDS
        if getattr(nearest.layout, field) != getattr(context.layout, field)
    ]
    # The first sentence of the message is about types.
    reason = re.split(r"(?<=[^.\s]{2})\.\s", " ".join(str(error).split()), maxsplit=1)[0]
    return Problem(
        "error",
        "untraceable",
        f"JAX cannot shard this.  {statement.describe(context.scoped_layout)}"
        f"    {statement.text}\n    JAX says: {reason[:400]}",
        statement.line,
        context.cite(*changed) if changed else "",
        f"A layout that works: {', '.join(bindings)}.",
    )


def nearest_layout(context: LintContext, trace: Trace, letters: set[str]) -> LintContext:
    """Returns the nearest layout that can be traced: with one rule softened or dropped, or several.

    Rules of the tensors that the failing statement names are tried first.
    """

    def works(candidate: LintContext) -> bool:
        conflicts = find_conflicts(candidate)
        is_legal = not (conflicts.shared or conflicts.indivisible)
        return is_legal and error_of(trace, candidate.layout, candidate.mesh) is None

    names = {context.name(letter) for letter in letters & {*context.record.axes.by_letter}}
    rules = sorted(context.rules, key=lambda sourced: sourced.rule.axis not in names)
    for sourced in rules:
        for change in (sourced.softened, None):
            changed = (change if other == sourced else other for other in context.rules)
            kept = [str(r) for field, r in filter(None, changed) if field == sourced.field]
            candidate = context.replace(sourced.field, kept)
            if candidate.rules != context.rules and works(candidate):
                return candidate
    nearest = context.replace("rules", []).replace("param_rules", [])
    for sourced in context.rules:
        for change in (sourced, sourced.softened):
            if works(candidate := nearest.with_rule(change)):
                nearest = candidate
                break
    return nearest
