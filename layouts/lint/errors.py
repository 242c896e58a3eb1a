"""What makes a layout illegal for a model: words, clashes and sizes.

After Shazeer et al. 2018 (Mesh-TensorFlow), section 8.5.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from configs.errors import did_you_mean
from layouts.axes import ABSENT, BY_LETTER, BY_NAME, SYNONYMS
from layouts.layout import Claim, Layout, Rule, claims, pairs, parse_rules, parts
from layouts.lint.recorder import Record, Tensor

FIELDS = ("rules", "param_rules")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that a user should know about a layout."""

    severity: Literal["error", "warning"]
    message: str
    subject: str = ""
    """What it is about: weights, an einsum, a mesh axis.  Empty: the rule itself."""
    rule: str = ""
    """The rules that cause it, and where they are written."""
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.subject or f'rule {self.rule}'}: {self.message}"
        rule = f"Rule {self.rule}." if self.subject and self.rule else ""
        lines = ["Warning: " * (self.severity == "warning") + head, rule, self.fix]
        return "\n    ".join(line for line in lines if line)


class Written(NamedTuple):
    """A rule and the field of the layout that it stands in."""

    field: str
    rule: Rule


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, the mesh and the model that it is for, and where its fields were set."""

    layout: Layout
    mesh: Mapping[str, int]
    record: Record
    where: Mapping[str, str]

    def written(self) -> list[Written]:
        return [
            Written(field, rule)
            for field in FIELDS
            for rule in parse_rules(getattr(self.layout, field))
        ]

    def wishes(self, tensor: Tensor) -> list[tuple[Written, Claim]]:
        """What the rules want of this tensor's axes, in the order in which they choose."""
        layout = self.layout
        own = parse_rules(layout.param_rules) if tensor.stored else ()
        return [
            (Written("param_rules" if claim.rule in own else "rules", claim.rule), claim)
            for claim in claims(layout.rules, layout.param_rules, tensor.axes, tensor.stored)
        ]

    def with_rule(self, written: Written) -> "Case":
        """The same with one more rule."""
        rules = [str(rule) for field, rule in self.written() if field == written.field]
        return self.changed(written.field, [*rules, str(written.rule)])

    def changed(self, field: str, rules: Iterable[str]) -> "Case":
        """The same with these rules in a field."""
        layout = dataclasses.replace(self.layout, **{field: ";".join(rules)})
        return dataclasses.replace(self, layout=layout)

    def cite(self, *rules: Written) -> str:
        """The rules and where they are written."""
        if len({field for field, _ in rules}) == 1:
            return f"{' and '.join(str(rule) for _, rule in rules)} ({self.source(rules[0].field)})"
        return " and ".join(self.cite(written) for written in rules)

    def source(self, field: str) -> str:
        """A field and the line that set it."""
        name = f"Layout.{field}"
        return f"{name}, {self.where[name]}" if name in self.where else name


def either(options: Iterable[object]) -> str:
    """Joins options: "1, 2 or 4"."""
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last


def several(names: Iterable[str], shown: int = 2) -> str:
    """The first of these names, and how many there are beside them."""
    unique = list(dict.fromkeys(names))
    if len(unique) > shown:
        return f"{', '.join(unique[:shown])} and {len(unique) - shown} more"
    return " and ".join(unique)


def misspelt(case: Case) -> tuple[list[Problem], Case]:
    """Problems of the rules' words alone, and the case with the rules that have none."""
    problems = []
    for field in FIELDS:
        good: list[str] = []
        for part in parts(getattr(case.layout, field)):
            found = _spelling(case, part, good)
            if found is None:
                good.append(part)
            else:
                rule = f"{part} ({case.source(field)})"
                problems.append(dataclasses.replace(found, rule=rule))
        case = case.changed(field, good)
    return problems, case


def _spelling(case: Case, part: str, before: list[str]) -> Problem | None:
    try:
        pairs(part)
        (rule,) = parse_rules(part)
    except ValueError:
        return Problem("error", "is no rule.", fix='Legal: axis:mesh_axis, as in "batch:data".')
    if rule.axis in ABSENT:
        reason = f"nothing here has Mesh-TensorFlow's axis {rule.axis}, {ABSENT[rule.axis]}."
        return Problem("warning", reason, fix="Without this rule the result is the same.")
    if rule.axis not in BY_NAME:
        here = {letter for tensor in case.record.tensors for letter in tensor.axes}
        here |= {"H"} if "J" in here else set()  # a rule for heads speaks of kv_heads
        axes = [axis.name for letter, axis in BY_LETTER.items() if letter in here]
        near = did_you_mean(rule.axis, [*BY_NAME, *SYNONYMS]).strip()
        legal = f"This model's axes: {', '.join(axes)}."
        return Problem("error", "no such axis.", fix=f"{near}  {legal}".strip())
    if rule.mesh_axis not in case.mesh:
        near = did_you_mean(rule.mesh_axis, case.mesh).strip()
        legal = f"The mesh has {', '.join(case.mesh)} ({case.source('mesh')})."
        return Problem("error", "no such mesh axis.", fix=f"{near}  {legal}".strip())
    if rule.pads and not (rule.firm and BY_NAME[rule.axis].pads):
        able = either(axis.name for axis in BY_LETTER.values() if axis.pads)
        fix = f'Legal with a "+": {able}, and no "?" beside it.'
        return Problem("error", "cannot be padded.", fix=fix)
    if rule[:2] in [other[:2] for other in parse_rules(";".join(before))]:
        return Problem("error", "is there twice.", fix="Remove one of them.")
    return None


class Misfits(NamedTuple):
    """The tensors of each cause."""

    clashes: dict[
        tuple[Written, Written], list[str]
    ]  # by the rule that wins and the one that loses
    uneven: dict[tuple[str, int, tuple[Written, ...]], list[str]]  # by letter, size and its rules
    padded: dict[tuple[str, int, tuple[Written, ...]], list[str]]  # the same, where a rule pads

    def blame(self, written: Written) -> bool:
        """Whether this rule is part of any cause."""
        return any(written in rules for rules in [*self.clashes, *(key[2] for key in self.uneven)])


def misfits(case: Case) -> Misfits:
    """Axes that clash over a mesh axis, and sizes that do not divide."""
    found, order = Misfits({}, {}, {}), case.written()
    for tensor in case.record.tensors:
        winners: dict[str, tuple[Written, Claim]] = {}
        split: dict[int, tuple[Written, ...]] = {}
        for written, claim in case.wishes(tensor):
            if claim.lost_to is None:
                winners[claim.rule.mesh_axis] = (written, claim)
                split[claim.position] = (*split.get(claim.position, ()), written)
                continue
            winner, won = winners[claim.rule.mesh_axis]
            meets = BY_LETTER[tensor.axes[claim.position]].meets
            if claim.rule.firm and won.rule.firm and tensor.axes[won.position] not in meets:
                first, second = sorted((winner, written), key=order.index)
                found.clashes.setdefault((first, second), []).append(tensor.name)
        for index, rules in split.items():
            size = tensor.shape[index]
            if size is not None and size % _ways(case, rules):
                letter = tensor.axes[index]
                causes = found.padded if case.layout.pads(letter) else found.uneven
                causes.setdefault((letter, size, rules), []).append(tensor.name)
    return found


def illegal(case: Case) -> list[Problem]:
    """Clashes and sizes that do not divide, each cause once however many tensors it spoils.

    Sizes that are padded are warnings.
    """
    found = misfits(case)
    clashes = [_clash(case, *pair, names) for pair, names in found.clashes.items()]
    uneven = [_uneven(case, *cause, names) for cause, names in found.uneven.items()]
    return clashes + uneven + [_padded(case, *own, names) for own, names in found.padded.items()]


def _ways(case: Case, rules: tuple[Written, ...]) -> int:
    return math.prod(case.mesh[written.rule.mesh_axis] for written in rules)


def _weights(case: Case, names: list[str]) -> list[str]:
    """The weights among these tensors."""
    paths = {weight.path for weight in case.record.weights}
    return [name for name in names if name in paths]


def _clash(case: Case, first: Written, second: Written, names: list[str]) -> Problem:
    mesh_axis, axes = first.rule.mesh_axis, f"{first.rule.axis} and {second.rule.axis}"
    return Problem(
        "error",
        f"{axes} both want the mesh axis {mesh_axis}.",
        several(_weights(case, names) or names),
        case.cite(first, second),
        f'Remove one rule, or let one give way: "{second.rule}?".',
    )


def _uneven(
    case: Case, letter: str, size: int, rules: tuple[Written, ...], names: list[str]
) -> Problem:
    name, weights = BY_LETTER[letter].name, _weights(case, names)
    from_data = name in case.where and len(weights) < len(names)
    setter = f" ({case.where[name]})" if from_data else ""
    return Problem(
        "error",
        f"{name} = {size}{setter} does not divide over {_over(case, rules)}.",
        several(weights or names),
        case.cite(*rules),
        f"{_that_divide(case, letter, size, rules)}  {_way_out(case, rules[-1])}",
    )


def _padded(
    case: Case, letter: str, size: int, rules: tuple[Written, ...], names: list[str]
) -> Problem:
    ways = _ways(case, rules)
    held = -(-size // ways) * ways
    return Problem(
        "warning",
        f"{BY_LETTER[letter].name} = {size} is held as {held} over {_over(case, rules)}: "
        f"{100 * (1 - size / held):.2g}% of it is padding.",
        several(_weights(case, names) or names),
        case.cite(*rules),
        _that_divide(case, letter, size, rules).replace("Legal", "Without any"),
    )


def _over(case: Case, rules: tuple[Written, ...]) -> str:
    """The mesh axes of these rules and their sizes."""
    mesh_axes = [written.rule.mesh_axis for written in rules]
    return f"{' x '.join(mesh_axes)} = {' x '.join(str(case.mesh[axis]) for axis in mesh_axes)}"


def _that_divide(case: Case, letter: str, size: int, rules: tuple[Written, ...]) -> str:
    """The nearest sizes of the axis, and of the mesh axes, that divide."""
    ways = _ways(case, rules)
    below = size // ways * ways
    sizes = [n for n in (below, below + ways) if n]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - ways))[:6])
    mesh_axes = " x ".join(written.rule.mesh_axis for written in rules)
    return f"Legal: {BY_LETTER[letter].name} {either(sizes)}; {mesh_axes} {either(near)}."


def _way_out(case: Case, written: Written) -> str:
    """What to do where the sizes must stay as they are."""
    rule = written.rule
    if rule.axis == "heads":
        queries = rule._replace(axis="queries")
        rules = [str(r) for field, r in case.written() if field == written.field and r != rule]
        changed = misfits(case.changed(written.field, [*rules, str(queries)]))
        if not changed.blame(Written(written.field, queries)):
            return f'Or split the queries of each: "{queries}" for "{rule}".'
    way = f'Or remove "{rule}" and hold {rule.axis} whole'
    pads = rule.firm and BY_NAME[rule.axis].pads
    return f'{way}, or pad it: "{rule}+".' if pads else f"{way}."
