"""Explains what JAX refuses to trace because of a layout, whatever the other checks overlook."""

import re
from collections.abc import Callable, Mapping

from configs.errors import UserError
from layouts.layout import Layout
from layouts.lint.errors import LintContext, Problem, find_conflicts
from layouts.lint.recorder import find_statement

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
    # The first sentence of the message is about types.
    reason = re.split(r"(?<=[^.\s]{2})\.\s", " ".join(str(error).split()), maxsplit=1)[0]
    bindings = (f'Layout.{field} = "{value}"' for field, (value,) in legal.items())
    return Problem(
        "error",
        "untraceable",
        f"JAX cannot shard this.  {statement.describe(context.scoped_layout)}"
        f"    {statement.text}\n    JAX says: {reason[:400]}",
        statement.line,
        context.cite(*changed) if changed else "",
        f"A layout that works: {', '.join(bindings)}.",
        legal,
    )


def error_of(trace: Trace, layout: Layout, sizes: Mapping[str, int]) -> Exception | None:
    """Returns what a trace raises, except mistakes that already have a message of their own."""
    try:
        trace(layout, sizes)
    except UserError:
        raise
    except Exception as error:  # JAX has no common type for what it cannot shard
        return error
    return None


def nearest_layout(context: LintContext, trace: Trace, letters: set[str]) -> LintContext:
    """Returns the nearest layout that can be traced: with one rule softened or dropped, or several.

    Rules of the tensors that the failing statement names are tried first.
    """

    def works(candidate: LintContext) -> bool:
        conflicts = find_conflicts(candidate)
        is_legal = not (conflicts.shared or conflicts.indivisible)
        return is_legal and error_of(trace, candidate.layout, candidate.mesh) is None

    names = {context.name(letter) for letter in letters & {*context.axes.by_letter}}
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
