"""What JAX cannot shard is explained: where, which tensors, which rule, and a layout that works."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest

from configs.errors import UserError
from layouts.layout import Layout
from layouts.lint.errors import LintContext, Problem
from layouts.lint.recorder import record
from layouts.lint.report import find_trace_problem
from layouts.mesh import abstract_mesh, use_mesh

SIZES = {"x": 2, "y": 4}
WHERE = {"Layout.rules": "layouts/mine.gin:3"}


def running_sums(layout: Layout) -> dict[str, jax.Array]:
    """Sums along an axis that a rule may split, which JAX cannot do."""
    x_BL = layout.iota("BL", (8, 24), "L")
    sums_BL = jnp.cumsum(x_BL, axis=1)
    return {"sums_BL": sums_BL}


def gradient_of_sums(layout: Layout) -> dict[str, jax.Array]:
    """Fails in the backward pass only."""

    @jax.custom_vjp
    def f(x_BL: jax.Array) -> jax.Array:
        return x_BL

    def backward(_: None, dx_BL: jax.Array) -> tuple[jax.Array]:
        return (jax.sharding.reshard(dx_BL, jax.P()),)

    f.defvjp(lambda x_BL: (x_BL, None), backward)

    def total(x_BL: jax.Array) -> jax.Array:
        same_BL = f(x_BL)
        return jnp.sum(same_BL)

    rows = layout.iota("BL", (8, 24), "L").astype(jnp.float32)
    gradient = jax.grad(total)(rows)
    return {"dx_BL": gradient}


def problem(function, rules: str) -> Problem | None:
    def trace(layout: Layout, sizes: Mapping[str, int]) -> object:
        with use_mesh(abstract_mesh(dict(sizes))):
            return jax.eval_shape(lambda: function(layout))

    layout = Layout(mesh="x:2,y:4", rules=rules)
    return find_trace_problem(LintContext(layout, SIZES, record(function), WHERE), trace)


def test_a_layout_that_can_be_traced_is_no_problem() -> None:
    assert problem(running_sums, "batch:x") is None


def test_a_problem_names_line_tensors_rule_and_a_layout_that_works() -> None:
    computed = problem(running_sums, "batch:x;length:y")
    assert computed is not None
    assert (computed.severity, computed.code) == ("error", "untraceable")
    assert computed.subject.startswith("tests/layouts/lint/test_tracing.py:")
    assert "sums_BL has batch over x, length over y; x_BL has batch over x" in computed.message
    assert "sums_BL = jnp.cumsum(x_BL, axis=1)" in computed.message
    assert computed.rule == "length:y (Layout.rules, layouts/mine.gin:3)"
    assert computed.fix == 'A layout that works: Layout.rules = "batch:x".'
    assert problem(running_sums, "batch:x") is None


def test_a_rule_is_softened_where_that_is_enough() -> None:
    """With another axis on the same mesh axis, a soft rule gives way."""
    computed = problem(running_sums, "length:y;batch:y?")
    assert computed is not None and '"length:y?;batch:y?"' in computed.fix


def test_several_rules_are_dropped_where_one_is_not_enough() -> None:
    computed = problem(running_sums, "length:x;batch:y;length:y?")
    assert computed is not None and '"batch:y;length:y?"' in computed.fix
    both = problem(running_sums, "length:x;length:y")
    assert both is not None and 'Layout.rules = "".' in both.fix


def test_the_backward_pass_is_explained_by_the_forward_pass() -> None:
    computed = problem(gradient_of_sums, "batch:x")
    assert computed is not None and "same_BL = f(x_BL)" in computed.message
    assert computed.fix == 'A layout that works: Layout.rules = "".'


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_what_fails_on_one_device_too_is_no_problem_of_the_layout(error: type) -> None:
    def trace(layout: Layout, sizes: Mapping[str, int]) -> None:
        raise error("a bug")

    context = LintContext(Layout(rules="batch:x"), SIZES, record(running_sums), WHERE)
    assert find_trace_problem(context, trace) is None


def test_mistakes_that_have_a_message_keep_it() -> None:
    def trace(layout: Layout, sizes: Mapping[str, int]) -> None:
        raise UserError("rows do not divide")

    context = LintContext(Layout(rules="batch:x"), SIZES, record(running_sums), WHERE)
    with pytest.raises(UserError, match="rows do not divide"):
        find_trace_problem(context, trace)
