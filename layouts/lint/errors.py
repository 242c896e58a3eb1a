"""Reports what makes a layout illegal for a model: spelling, conflicts and sizes.

After Shazeer et al. 2018 (Mesh-TensorFlow), section 8.5.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from configs.errors import did_you_mean
from configs.spec import SPECS
from layouts.axes import ABSENT, SYNONYMS
from layouts.layout import AxisAssignment, Layout, Rule, axis_assignments, pairs, parse_rules, parts
from layouts.lint.recorder import Record, Tensor
from layouts.padding import with_axes

FIELDS = ("rules", "param_rules")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describes one problem of a layout."""

    severity: Literal["error", "warning"]
    code: str
    """The kind of problem, such as "unknown-axis"."""
    message: str
    subject: str = ""
    """What it is about: weights, an einsum, a mesh axis.  Empty: the rule itself."""
    rule: str = ""
    """The rules that cause it, and where they are written."""
    fix: str = ""
    """What to do, in words."""

    def __str__(self) -> str:
        head = f"{self.subject or f'rule {self.rule}'}: {self.message}"
        rule = f"Rule {self.rule}." if self.subject and self.rule else ""
        lines = ["Warning: " * (self.severity == "warning") + head, rule, self.fix]
        return "\n    ".join(line for line in lines if line)


class SourcedRule(NamedTuple):
    """Holds a rule and the field of the layout that contains it."""

    field: str
    rule: Rule

    @property
    def softened(self) -> "SourcedRule":
        """Returns the rule with a "?"; such a rule cannot pad."""
        return self._replace(rule=self.rule._replace(firm=False, pads=False))


@dataclasses.dataclass(frozen=True)
class LintContext:
    """Holds a layout, its mesh and model, and where the layout's fields were set."""

    layout: Layout
    mesh: Mapping[str, int]
    record: Record
    origins: Mapping[str, str]

    @functools.cached_property
    def scoped_layout(self) -> Layout:
        """Returns the layout with the axes that the record declares."""
        return with_axes(self.layout, *self.record.declared_axes)

    def name(self, letter: str) -> str:
        return self.record.axes.by_letter[letter].name

    @property
    def rules(self) -> list[SourcedRule]:
        texts = [(field, getattr(self.layout, field)) for field in FIELDS]
        return [SourcedRule(field, rule) for field, text in texts for rule in parse_rules(text)]

    @property
    def tensors(self) -> list[Tensor]:
        """Returns all tensors, variants that decoding shards differently, as it splits no length,
        and stacks of layers that are not stored as they run."""
        tensors = list(self.record.tensors)
        for tensor in self.record.tensors:
            axes = tensor.axes.replace("L", "l").replace("M", "m")
            if self.scoped_layout.place(axes) != self.scoped_layout.place(tensor.axes):
                tensors.append(tensor._replace(name=f"{tensor.name} in decoding", axes=axes))
        stored = parse_rules(self.layout.param_rules)
        has_stacks = any(product.in_layers for product in self.record.products)
        if not has_stacks or all(rule.axis != "layers" for rule in stored):
            return tensors
        stacked = (weight for weight in self.record.weights if weight.axes.startswith("N"))
        return [*tensors, *(Tensor(w.path, "N", w.shape[:1], stored=False) for w in stacked)]

    def assignments(self, tensor: Tensor) -> list[tuple[SourcedRule, AxisAssignment]]:
        """Returns what each rule gets in this tensor, in the order in which rules choose."""
        param_rules = parse_rules(self.layout.param_rules) if tensor.stored else ()
        return [
            (SourcedRule("param_rules" if a.rule in param_rules else "rules", a.rule), a)
            for a in axis_assignments(self.scoped_layout, tensor.axes, tensor.stored)
        ]

    def with_rule(self, added: SourcedRule) -> "LintContext":
        """Adds one rule."""
        rules = [str(rule) for field, rule in self.rules if field == added.field]
        return self.replace(added.field, [*rules, str(added.rule)])

    def replace(self, field: str, rules: Iterable[str]) -> "LintContext":
        """Replaces the rules of a field."""
        changed: dict[str, Any] = {field: ";".join(rules)}
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, **changed))

    def cite(self, *rules: SourcedRule) -> str:
        """Names rules and where they are written."""
        if len({field for field, _ in rules}) == 1:
            return f"{' and '.join(str(rule) for _, rule in rules)} ({self.source(rules[0].field)})"
        return " and ".join(self.cite(rule) for rule in rules)

    def source(self, field: str) -> str:
        """Names a field and the line that set it."""
        name = f"Layout.{field}"
        return f"{name}, {self.origins[name]}" if name in self.origins else name


def join_or(options: Iterable[object]) -> str:
    """Joins options: "1, 2 or 4"."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def first_names(names: Iterable[str]) -> str:
    """Joins the first two of these names, and says how many more there are."""
    unique = list(dict.fromkeys(names))
    if len(unique) > 2:
        return f"{', '.join(unique[:2])} and {len(unique) - 2} more"
    return " and ".join(unique)


def check_spelling(context: LintContext) -> tuple[list[Problem], LintContext]:
    """Reports rules that are wrong by themselves, and returns the context without them."""
    problems = []
    for field in FIELDS:
        good: list[str] = []
        for part in parts(getattr(context.layout, field)):
            problem = _spelling_problem(context, part, good)
            if problem is None:
                good.append(part)
            else:
                rule = f"{part} ({context.source(field)})"
                problems.append(dataclasses.replace(problem, rule=rule))
        context = context.replace(field, good)
    return problems, context


def _spelling_problem(context: LintContext, part: str, before: list[str]) -> Problem | None:
    try:
        pairs(part)
        (rule,) = parse_rules(part)
    except ValueError:
        fix = 'Legal: axis:mesh_axis, as in "batch:data", with one "?" or one "+" after it.'
        return Problem("error", "malformed-rule", "not a rule.", fix=fix)
    if rule.axis in ABSENT:
        reason = f"no tensor has Mesh-TensorFlow's axis {rule.axis}, {ABSENT[rule.axis]}."
        fix = "Without this rule the result is the same."
        return Problem("warning", "absent-axis", reason, fix=fix)
    # This model may have no part that declares the axis.
    declared = {axis.name: axis for spec in SPECS.values() for axis in getattr(spec, "axes", ())}
    known = context.record.axes
    axis = known.by_name.get(rule.axis) or declared.get(rule.axis)
    if axis is None:
        letters = {letter for tensor in context.record.tensors for letter in tensor.axes}
        letters |= {"H"} if "J" in letters else set()  # a rule for heads applies to kv_heads
        axes = [a.name for letter, a in known.by_letter.items() if letter in letters]
        near = did_you_mean(rule.axis, [*known.by_name, *SYNONYMS]).strip()
        fix = f"{near}  This model's axes: {', '.join(axes)}.".strip()
        return Problem("error", "unknown-axis", "no such axis.", fix=fix)
    if rule.mesh_axis not in context.mesh:
        near = did_you_mean(rule.mesh_axis, context.mesh).strip()
        fix = f"{near}  The mesh has {', '.join(context.mesh)} ({context.source('mesh')}).".strip()
        return Problem("error", "unknown-mesh-axis", "no such mesh axis.", fix=fix)
    if rule.pads and not (rule.firm and axis.pads):
        paddable = join_or(axis.name for axis in known.by_letter.values() if axis.pads)
        fix = f'Legal with a "+": {paddable}, and no "?" with it.'
        why = "" if axis.pads else ": norms, rotations or loops along it would count the padding"
        return Problem("error", "unpaddable-axis", f"cannot be padded{why}.", fix=fix)
    if rule[:2] in [other[:2] for other in parse_rules(";".join(before))]:
        return Problem("error", "duplicate-rule", "appears twice.", fix="Remove one of them.")
    return None


class SplitCause(NamedTuple):
    """Holds an axis of some size, and the rules that split it."""

    letter: str
    size: int
    rules: tuple[SourcedRule, ...]
    shards: int
    repeats: int = 1
    """Groups into which each shard is cut, as for the layers of a stage."""
    pattern: int = 1
    """Layers of one repeat, if the axis counts repeats of a pattern."""
    first: int = 0
    """Layers before the repeats."""

    @property
    def padded_size(self) -> int:
        return -(-self.size // self.shards) * self.shards


class Conflicts(NamedTuple):
    """Lists the names of the tensors that each cause affects."""

    shared: dict[tuple[SourcedRule, SourcedRule], list[str]]
    """By the two rules that want the same mesh axis, in the layout's order."""
    indivisible: dict[SplitCause, list[str]]
    padded: dict[SplitCause, list[str]]

    def involve(self, rule: SourcedRule) -> bool:
        """Returns whether this rule is part of any error."""
        causes = [*self.shared, *(cause.rules for cause in self.indivisible)]
        return any(rule in rules for rules in causes)


def find_conflicts(context: LintContext) -> Conflicts:
    """Finds axes that want the same mesh axis, and sizes that do not divide."""
    conflicts, order = Conflicts({}, {}, {}), context.rules
    stage_axes = context.layout.stage_axes
    for tensor in context.tensors:
        winners: dict[str, tuple[SourcedRule, AxisAssignment]] = {}
        split: dict[int, tuple[SourcedRule, ...]] = {}
        for sourced, assigned in context.assignments(tensor):
            mesh_axis, is_won = assigned.rule.mesh_axis, assigned.lost_to is None
            # Stages have complete layers, even if another axis splits the stored weights.
            in_stages = tensor.axes[assigned.position] == "N" and mesh_axis in stage_axes
            if is_won or in_stages:
                split[assigned.position] = (*split.get(assigned.position, ()), sourced)
            if is_won:
                winners[mesh_axis] = (sourced, assigned)
                continue
            winner, won = winners[mesh_axis]
            meets = context.record.axes.by_letter[tensor.axes[assigned.position]].meets
            if assigned.rule.firm and won.rule.firm and tensor.axes[won.position] not in meets:
                first, second = sorted((winner, sourced), key=order.index)
                conflicts.shared.setdefault((first, second), []).append(tensor.name)
        for index, rules in split.items():
            letter, size = tensor.axes[index], tensor.shape[index]
            names = tuple(sourced.rule.mesh_axis for sourced in rules)
            cause = SplitCause(letter, size, rules, math.prod(context.mesh[name] for name in names))
            if letter == "N" and "layers_N" not in tensor.name:
                continue  # it is a part of a weight, which is reported by its path
            if letter == "N":
                first_blocks, pattern = blocks_of_stack(context.record, tensor.name)
                cause = cause._replace(first=first_blocks, pattern=pattern)
                if names == stage_axes and cause.shards > 1:
                    cause = cause._replace(repeats=context.layout.pipeline_repeats)
            if size % (cause.shards * cause.repeats):
                pads = context.scoped_layout.pads(letter)
                causes = conflicts.padded if pads else conflicts.indivisible
                causes.setdefault(cause, []).append(tensor.name)
    return conflicts


def blocks_of_stack(record: Record, path: str) -> tuple[int, int]:
    """Returns the number of first blocks in a weight's stack, and of blocks in each repeat."""
    stack = path.partition("layers_N/")[0]
    matches = [re.match(rf"{stack}(first|layers_N)/(block\d+)/", w.path) for w in record.weights]
    blocks = {match.groups() for match in matches if match}
    first = sum(part == "first" for part, _ in blocks)
    return first, len(blocks) - first or 1


def check_conflicts(context: LintContext) -> list[Problem]:
    """Reports each cause once, however many tensors it affects; padded sizes are warnings."""
    conflicts = find_conflicts(context)
    shared = [_shared(context, *rules, names) for rules, names in conflicts.shared.items()]
    indivisible = [_indivisible(context, *item) for item in conflicts.indivisible.items()]
    return shared + indivisible + [_padded(context, *item) for item in conflicts.padded.items()]


def _weights(context: LintContext, names: list[str]) -> list[str]:
    """Returns the weights among these tensors."""
    paths = {weight.path for weight in context.record.weights}
    return [name for name in names if name in paths]


def _shared(
    context: LintContext, first: SourcedRule, second: SourcedRule, names: list[str]
) -> Problem:
    mesh_axis, axes = first.rule.mesh_axis, f"{first.rule.axis} and {second.rule.axis}"
    return Problem(
        "error",
        "conflict",
        f"{axes} both want the mesh axis {mesh_axis}.",
        first_names(_weights(context, names) or names),
        context.cite(first, second),
        f'Remove one rule, or let one give way: "{second.softened.rule}".',
    )


def _indivisible(context: LintContext, cause: SplitCause, names: list[str]) -> Problem:
    name, weights = context.name(cause.letter), _weights(context, names)
    from_data = name in context.origins and len(weights) < len(names)
    setter = f" ({context.origins[name]})" if from_data else ""
    size = str(cause.size)
    if cause.first or cause.pattern > 1:  # the settings have layers, not repeats of their pattern
        after = f" after {cause.first} first_blocks" * bool(cause.first)
        layers = cause.first + cause.size * cause.pattern
        size = f"{layers} ({size} repeats of a pattern of {cause.pattern}{after})"
    return Problem(
        "error",
        "indivisible",
        f"{name} = {size}{setter} does not divide over {_mesh_axes(context, cause)}.",
        first_names(weights or names),
        context.cite(*cause.rules),
        f"Legal: {_sizes_that_divide(context, cause)}.  {_alternative(context, cause)}",
    )


def _padded(context: LintContext, cause: SplitCause, names: list[str]) -> Problem:
    padded_size = cause.padded_size
    return Problem(
        "warning",
        "padded",
        f"{context.name(cause.letter)} = {cause.size} is padded to {padded_size} over "
        f"{_mesh_axes(context, cause)}: {100 * (1 - cause.size / padded_size):.2g}% is padding.",
        first_names(_weights(context, names) or names),
        context.cite(*cause.rules),
        f"Without padding: {_sizes_that_divide(context, cause)}."
        f"{_expert_mesh_axis(context, cause)}",
    )


def _mesh_axes(context: LintContext, cause: SplitCause) -> str:
    """Formats the mesh axes of a cause, their sizes and the repeats of a pipeline."""
    names = [sourced.rule.mesh_axis for sourced in cause.rules]
    sizes, repeats = [str(context.mesh[name]) for name in names], cause.repeats
    around = f" in {repeats} groups each (Layout.pipeline_repeats)" if repeats > 1 else ""
    return f"{' x '.join(names)} = {' x '.join(sizes)}{around}"


def _sizes_that_divide(context: LintContext, cause: SplitCause) -> str:
    """Lists the nearest sizes of the axis, and of the mesh axes, that divide."""
    shards, size, repeats = cause.shards, cause.size, cause.repeats
    unit = shards * repeats
    below = size // unit * unit
    divisors = [n for n in range(1, size + 1) if n == 1 or size % (n * repeats) == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - shards))[:6])
    names = " x ".join(sourced.rule.mesh_axis for sourced in cause.rules)
    sizes = [cause.first + n * cause.pattern for n in (below, below + unit) if n]
    legal = {context.name(cause.letter): sizes, names: near}
    if repeats > 1 and size % shards == 0:
        groups = size // shards
        legal["pipeline_repeats"] = [n for n in range(1, groups + 1) if groups % n == 0]
    return "; ".join(f"{name} {join_or(sizes)}" for name, sizes in legal.items())


def _alternative(context: LintContext, cause: SplitCause) -> str:
    """Suggests a fix that keeps the sizes."""
    field, rule = cause.rules[-1]
    if rule.axis == "heads":
        queries = rule._replace(axis="queries")
        rules = [str(other) for f, other in context.rules if f == field and other != rule]
        changed = find_conflicts(context.replace(field, [*rules, str(queries)]))
        if not changed.involve(SourcedRule(field, queries)):
            return f'Or split the queries of each: "{queries}" for "{rule}".'
    fix = f'Or remove "{rule}" to replicate {rule.axis}'
    if cause.letter == "G":
        fix += ", or set a smaller Moe.group_tokens or a larger Run.batch_sequences"
    pads = rule.firm and context.record.axes.by_name[rule.axis].pads
    if pads and cause.padded_size < 2 * cause.size:
        return f'{fix}, or pad it: "{rule}+".'
    return f"{fix}.{_expert_mesh_axis(context, cause)}"


def _expert_mesh_axis(context: LintContext, cause: SplitCause) -> str:
    """Suggests a smaller mesh axis for the experts alone, if theirs does not divide them."""
    [sourced, *others] = cause.rules
    mesh_axis, size = sourced.rule.mesh_axis, context.mesh[sourced.rule.mesh_axis]
    split = math.gcd(cause.size, size)
    if cause.letter != "E" or others or split == 1:
        return ""
    return (
        f'  Or split {mesh_axis}:{size} into "{mesh_axis}:{size // split},expert:{split}", with '
        "the batch over both and the experts over the second: layouts/expert_mesh_axis.gin."
    )
