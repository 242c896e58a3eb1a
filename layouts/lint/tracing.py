"""Explains what JAX refuses to trace because of a layout, whatever the other checks overlook."""

import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from configs.errors import UserError
from layouts.axes import BY_LETTER
from layouts.cost.collectives import checkout_file
from layouts.layout import Layout, mesh_axes
from layouts.lint.errors import LintContext, Problem, SourcedRule, find_conflicts

# Traces a program under a layout on a mesh of these sizes, allocating nothing.
Trace = Callable[[Layout, Mapping[str, int]], object]
ONE_DEVICE = Layout(mesh="one:1", rules="")


def find_trace_problem(context: LintContext, trace: Trace) -> Problem | None:
    """Traces a program under the layout; explains the error, if the layout is its reason.

    It is not where the same program fails on one device.
    """
    error = error_of(trace, context.layout, context.mesh)
    if error is None or error_of(trace, ONE_DEVICE, {"one": 1}) is not None:
        return None
    statement = find_statement(error)
    nearest = nearest_layout(context, trace, statement.letters)
    changed = [sourced for sourced in context.rules if sourced not in nearest.rules]
    legal = {
        field: (getattr(nearest.layout, field),)
        for field in ("rules", "param_rules")
        if getattr(nearest.layout, field) != getattr(context.layout, field)
    }
    bindings = (f'Layout.{field} = "{value}"' for field, (value,) in legal.items())
    return Problem(
        "error",
        "untraceable",
        f"JAX cannot shard this.  {statement.describe(context)}"
        f"    {statement.text}\n    JAX says: {first_sentence(error)}",
        statement.line,
        context.cite(*changed) if changed else "",
        f"A layout that works: {', '.join(bindings)}.",
        legal,
    )


def error_of(trace: Trace, layout: Layout, sizes: Mapping[str, int]) -> Exception | None:
    """Returns what a trace raises, but for mistakes that already have a message of their own."""
    try:
        trace(layout, sizes)
    except UserError:
        raise
    except Exception as error:  # JAX has no common type for what it cannot shard
        return error
    return None


class Statement(NamedTuple):
    """A statement of the model, and the tensors that it names with their letters."""

    line: str
    text: str
    tensors: tuple[str, ...]

    @property
    def letters(self) -> set[str]:
        return {letter for name in self.tensors for letter in name.rpartition("_")[2]}

    def describe(self, context: LintContext) -> str:
        """Says which axes of the tensors are split: "x_BLD: batch over data"."""
        lines = []
        for name in self.tensors:
            axes = [axis for axis in name.rpartition("_")[2] if axis.upper() in BY_LETTER]
            placed = zip(axes, context.layout.place("".join(axes)), strict=True)
            split = [
                f"{BY_LETTER[axis].name} over {' and '.join(mesh_axes(entry))}"
                for axis, entry in placed
                if entry
            ]
            if split:
                lines.append(f"{name} has {', '.join(split)}")
        return f"{'; '.join(lines)}.\n" if lines else "\n"


def find_statement(error: BaseException) -> Statement:
    """Finds the innermost statement of this checkout that names tensors by their letters.

    What fails in a backward pass is looked for in the forward pass, which is the error's cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        found = [s for s in statements(cause) if s.tensors]
        if found:
            return found[-1]
        cause = cause.__cause__
    return next(reversed(list(statements(error))), Statement("the model", "", ()))


def statements(error: BaseException) -> Iterator[Statement]:
    """Yields the statements of this checkout, layouts left out, that led to an error."""
    for frame in traceback.extract_tb(error.__traceback__):
        if (file := checkout_file(frame.filename)) and frame.lineno is not None:
            lines = range(frame.lineno, (frame.end_lineno or frame.lineno) + 1)
            text = " ".join(linecache.getline(frame.filename, n).strip() for n in lines)
            yield Statement(f"{file}:{frame.lineno}", text, named_tensors(text))


def named_tensors(text: str) -> tuple[str, ...]:
    """Returns the names in a line of code that end in axis letters.

    >>> named_tensors("y_BLF = einsum('BLD,DF->BLF', x_BLD, self.wi_DF[...])  # take_along_axis")
    ('y_BLF', 'x_BLD', 'wi_DF')
    """
    names = re.findall(r"\b\w+_[A-Za-z1]+\b", text)
    suffixes = {name: name.rpartition("_")[2] for name in names}
    return tuple(
        name
        for name, axes in suffixes.items()
        if not axes.islower() and all(axis.upper() in (*BY_LETTER, "1") for axis in axes)
    )


def first_sentence(error: Exception) -> str:
    """Returns the first sentence of a message, which is about types."""
    text = " ".join(str(error).split())
    return re.split(r"(?<=[^.\s]{2})\.\s", text, maxsplit=1)[0][:400]


def nearest_layout(context: LintContext, trace: Trace, letters: set[str]) -> LintContext:
    """Returns the nearest layout that can be traced: with one rule softened or dropped, or several.

    Rules of the tensors that the failing statement names are tried first.
    """

    def works(candidate: LintContext) -> bool:
        conflicts = find_conflicts(candidate)
        is_legal = not (conflicts.shared or conflicts.indivisible)
        return is_legal and error_of(trace, candidate.layout, candidate.mesh) is None

    by_name = {BY_LETTER[letter].name for letter in letters if letter in BY_LETTER}
    rules = sorted(context.rules, key=lambda sourced: sourced.rule.axis not in by_name)
    for sourced in rules:
        for change in (sourced.softened, None):
            candidate = with_change(context, sourced, change)
            if candidate.rules != context.rules and works(candidate):
                return candidate
    nearest = context.replace("rules", []).replace("param_rules", [])
    for sourced in context.rules:
        for change in (sourced, sourced.softened):
            if works(candidate := nearest.with_rule(change)):
                nearest = candidate
                break
    return nearest


def with_change(
    context: LintContext, sourced: SourcedRule, change: SourcedRule | None
) -> LintContext:
    """Replaces a rule by another, or drops it."""
    rules = [change if other == sourced else other for other in context.rules]
    kept = [str(rule) for field, rule in filter(None, rules) if field == sourced.field]
    return context.replace(sourced.field, kept)
