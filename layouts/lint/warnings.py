"""What a legal layout wastes: rules, computation and memory.

After Shazeer et al. 2018 (Mesh-TensorFlow), section 8.4.
"""

import itertools
import math
from collections.abc import Iterable, Mapping

from layouts.axes import BY_LETTER, BY_NAME
from layouts.layout import Layout, Rule
from layouts.lint.errors import Case, Problem, Written, misfits, several
from layouts.lint.recorder import Product, Record, Tensor, Weight

SPLIT_SHARE = 0.5  # of the FLOPs that a mesh axis should split at the least
WHOLE_SHARE = 0.02  # of the parameter bytes that may be whole on every device


def inefficient(case: Case) -> list[Problem]:
    """Mesh axes that split little of the computation, and weights that none splits."""
    return [*_idle_mesh_axes(case), *_whole_weights(case)]


def idle_rules(case: Case) -> list[Problem]:
    """Rules that split nothing."""
    wished: set[Written] = set()
    granted: set[Written] = set()
    for tensor in case.record.tensors:
        wishes = case.wishes(tensor)
        wished |= {written for written, _ in wishes}
        granted |= {written for written, claim in wishes if claim.lost_to is None}
    return [
        Problem("warning", _why_idle(case, written, written in wished), rule=case.cite(written))
        for written in case.written()
        if written not in granted
    ]


def _why_idle(case: Case, written: Written, wished: bool) -> str:
    axis, mesh_axis = written.rule[:2]
    if wished:
        return f"never takes effect: another axis has {mesh_axis} in every tensor with {axis}."
    if axis == "heads" and any(BY_NAME["kv_heads"].letter in t.axes for t in case.record.tensors):
        return "matches nothing: kv_heads or queries have a rule of their own, which is used."
    things = "tensor" if written.field == "rules" else "weight"
    return f"matches nothing: no {things} of this model has the axis {axis}."


def _idle_mesh_axes(case: Case) -> list[Problem]:
    """Mesh axes along which most products are computed again by every device."""
    problems = []
    for mesh_axis, size in case.mesh.items():
        alike = _alike(case, mesh_axis)
        share = sum(product.flops for product in alike) / max(case.record.flops, 1)
        if size == 1 or share <= 1 - SPLIT_SHARE:
            continue
        largest = sorted(alike, key=lambda product: -product.flops)
        problems.append(
            Problem(
                "warning",
                f"splits {_percent(1 - share)} of the FLOPs; all {size} devices along it compute"
                f" the same {_percent(share)}: {several(product.name for product in largest)}.",
                f"mesh axis {mesh_axis}:{size} ({case.source('mesh')})",
                fix=_rules_that_split(case, mesh_axis, share),
            )
        )
    return problems


def _alike(case: Case, mesh_axis: str) -> list[Product]:
    """Products that the rules do not split over a mesh axis."""
    return [product for product in case.record.products if mesh_axis not in _over(case, product)]


def executed_flops(layout: Layout, mesh: Mapping[str, int], record: Record) -> float:
    """FLOPs of the recorded products on one device."""
    case = Case(layout, mesh, record, {})
    return sum(
        product.flops / math.prod(mesh[name] for name in _over(case, product))
        for product in record.products
    )


def _over(case: Case, product: Product) -> set[str]:
    """The mesh axes that a product is split over: those of any of its letters, as one tensor."""
    inputs, out = product.equation.split("->")
    letters = "".join(dict.fromkeys(out + inputs.replace(",", "")))
    wishes = case.wishes(Tensor("", letters, (), False))
    return {claim.rule.mesh_axis for _, claim in wishes if claim.lost_to is None}


def _rules_that_split(case: Case, mesh_axis: str, share: float) -> str:
    """Rules that would make a mesh axis useful and are legal."""
    ruled = {written.rule.axis for written in case.written()}
    axes = ["heads", "d_ff", "vocab", "experts", "d_model"]
    axes.insert(len(axes) if "batch" in ruled else 0, "batch")
    added: list[str] = []
    best = case
    for axis in axes:
        rule = Written("rules", Rule(axis, mesh_axis))
        trial = best.with_rule(rule)
        left = sum(product.flops for product in _alike(trial, mesh_axis)) / case.record.flops
        if left < share - WHOLE_SHARE and not misfits(trial).blame(rule):
            best, share = trial, left
            added.append(str(rule.rule))
    if not added:
        return "Give its devices to another mesh axis."
    return f'Adding "{";".join(added)}" to Layout.rules splits {_percent(1 - share)}.'


def _whole_weights(case: Case) -> list[Problem]:
    """The weights that every device keeps, if they are a large part."""
    devices = math.prod(case.mesh.values())
    whole = _whole(case)
    total = max(_bytes(case.record.weights), 1)
    if devices == 1 or _bytes(whole) <= WHOLE_SHARE * total:
        return []
    largest = sorted(whole, key=lambda weight: -weight.bytes)
    names = several(f"{weight.path} ({size_text(weight.bytes)})" for weight in largest)
    share = _percent(_bytes(whole) / total)
    return [
        Problem(
            "warning",
            f"{share} of their bytes are whole on each of {devices} devices: {names}.",
            "weights",
            fix=_rule_that_shards(case, total),
        )
    ]


def _whole(case: Case) -> list[Weight]:
    """The weights that no mesh axis splits."""
    return [
        weight
        for weight, tensor in zip(case.record.weights, case.record.tensors, strict=False)
        if all(case.mesh[claim.rule.mesh_axis] == 1 for _, claim in case.wishes(tensor))
    ]


def _bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.bytes for weight in weights)


def _rule_that_shards(case: Case, total: int) -> str:
    """The one parameter rule that leaves the fewest bytes whole and is legal."""
    letters = dict.fromkeys(letter for weight in case.record.weights for letter in weight.axes)
    mesh_axes = [mesh_axis for mesh_axis, size in case.mesh.items() if size > 1]
    best = (_bytes(_whole(case)), "")
    for mesh_axis, letter in itertools.product(mesh_axes, letters):
        rule = Written("param_rules", Rule(BY_LETTER[letter].name, mesh_axis))
        trial = case.with_rule(rule)
        left = _bytes(_whole(trial))
        if left < best[0] and not misfits(trial).blame(rule):
            best = (left, str(rule.rule))
    left, found = best
    if not found:
        return "No single rule can split them: their sizes do not divide over the mesh."
    amount = f"all but {_percent(left / total)}" if left else "all"
    return f'Adding "{found}" to Layout.param_rules splits {amount}.'


def _percent(share: float) -> str:
    return f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"


def size_text(size_bytes: float) -> str:
    """Bytes for people.

    >>> size_text(640), size_text(2_621_440)
    ('640 B', '2.62 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"
