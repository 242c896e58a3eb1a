"""Reports what a legal layout wastes: rules, computation and memory.

After Shazeer et al. 2018 (Mesh-TensorFlow), section 8.4.
"""

import itertools
import math
from collections.abc import Iterable

from layouts.cost.collectives import size_text
from layouts.layout import Rule
from layouts.lint.errors import LintContext, Problem, SourcedRule, find_conflicts, first_names
from layouts.lint.recorder import Product, Tensor, Weight

MIN_SPLIT_SHARE = 0.5  # of the FLOPs that a mesh axis should split
MAX_REPLICATED_SHARE = 0.02  # of the parameter bytes


def check_idle_rules(context: LintContext) -> list[Problem]:
    """Reports rules that split nothing."""
    matched: set[SourcedRule] = set()
    effective: set[SourcedRule] = set()
    for tensor in context.tensors:
        assignments = context.assignments(tensor)
        matched |= {sourced for sourced, _ in assignments}
        effective |= {sourced for sourced, assigned in assignments if assigned.lost_to is None}
    return [
        _idle_rule(context, sourced, sourced in matched)
        for sourced in context.rules
        if sourced not in effective
    ]


def check_repeats(context: LintContext) -> list[Problem]:
    """Reports repeats of a pipeline where layers are not split into stages."""
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
        reason = f"never takes effect: another axis has {mesh_axis} in every tensor with {axis}."
        return Problem("warning", "overruled-rule", reason, rule=rule)
    if axis == "heads" and any("J" in tensor.axes for tensor in tensors):
        reason = "kv_heads or queries have a rule of their own, which is used."
    else:
        things = "tensor" if sourced.field == "rules" else "weight"
        reason = f"no {things} of this model has the axis {axis}."
    return Problem("warning", "unmatched-rule", f"matches nothing: {reason}", rule=rule)


def check_mesh_axes(context: LintContext) -> list[Problem]:
    """Reports mesh axes along which every device computes most products again."""
    problems = []
    for mesh_axis, size in context.mesh.items():
        repeated = _repeated_products(context, mesh_axis)
        share = sum(product.flops for product in repeated) / max(context.record.flops, 1)
        if size == 1 or share <= 1 - MIN_SPLIT_SHARE:
            continue
        largest = sorted(repeated, key=lambda product: -product.flops)
        added, left = _rules_that_split(context, mesh_axis, share)
        fix = f'Adding "{";".join(added)}" to Layout.rules splits {_percent(1 - left)}.'
        problems.append(
            Problem(
                "warning",
                "idle-mesh-axis",
                f"splits {_percent(1 - share)} of the FLOPs; all {size} devices along it compute"
                f" the same {_percent(share)}: {first_names(product.name for product in largest)}.",
                f"mesh axis {mesh_axis}:{size} ({context.source('mesh')})",
                fix=fix if added else "Give its devices to another mesh axis.",
                legal={"rules": tuple(added)} if added else {},
            )
        )
    return problems


def _repeated_products(context: LintContext, mesh_axis: str) -> list[Product]:
    """Returns the products that the rules do not split over a mesh axis."""
    products = context.record.products
    return [product for product in products if mesh_axis not in _mesh_axes(context, product)]


def _mesh_axes(context: LintContext, product: Product) -> set[str]:
    """Returns the mesh axes that split a product: those of all its letters, as one tensor.

    Stages split those of the layers.
    """
    inputs, out = product.equation.split("->")
    letters = "".join(dict.fromkeys("N" * product.in_layers + out + inputs.replace(",", "")))
    assignments = context.assignments(Tensor("", letters, (), False))
    return {assigned.rule.mesh_axis for _, assigned in assignments if assigned.lost_to is None}


def _rules_that_split(
    context: LintContext, mesh_axis: str, share: float
) -> tuple[list[str], float]:
    """Returns legal rules that split more over a mesh axis, and the share that none splits then."""
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
    """Reports the weights that every device holds, if they are a large part."""
    devices = math.prod(context.mesh.values())
    replicated = _replicated(context)
    total = max(_bytes(context.record.weights), 1)
    if devices == 1 or _bytes(replicated) <= MAX_REPLICATED_SHARE * total:
        return []
    largest = sorted(replicated, key=lambda weight: -weight.bytes)
    names = first_names(f"{weight.path} ({size_text(weight.bytes)})" for weight in largest)
    share = _percent(_bytes(replicated) / total)
    rule, left = _rule_that_shards(context)
    amount = f"all but {_percent(left / total)}" if left else "all"
    fix = f'Adding "{rule}" to Layout.param_rules splits {amount}.'
    none = "No single rule can split them: their sizes do not divide over the mesh."
    return [
        Problem(
            "warning",
            "replicated-weights",
            f"{share} of their bytes are replicated on {devices} devices: {names}.",
            "weights",
            fix=fix if rule else none,
            legal={"param_rules": (rule,)} if rule else {},
        )
    ]


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
    """Returns the legal parameter rule that replicates the fewest bytes, and how many; or ""."""
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
    """Formats a share, with decimals where it would round to 0% or 100%.

    >>> _percent(0.4), _percent(0.9999), _percent(1)
    ('40%', '99.99%', '100%')
    """
    return f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"
