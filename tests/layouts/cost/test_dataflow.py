"""Makers and users of values, what an equation runs inside, and its FLOPs."""

import jax
import jax.numpy as jnp

from layouts.cost.dataflow import Flow, bodies, executed_equations, line_of, total_flops

X, W = jnp.zeros((7, 2)), jnp.zeros((2, 3))


def jaxpr_of(function, *arguments):
    return jax.make_jaxpr(function)(*arguments).jaxpr


def test_loops_multiply_and_of_branches_the_dearest_counts() -> None:
    def step(x, w):
        def turn(x, _):
            y = jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((7, 3)))
            return x, y

        return jax.lax.scan(turn, x, None, length=5)

    jaxpr = jaxpr_of(step, X, W)
    assert total_flops(jaxpr) == 5 * 2 * 7 * 2 * 3
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert bodies(scan)[1] == 5
    times = {eqn.primitive.name: count for eqn, count in executed_equations(jaxpr)}
    assert times["scan"] == 1 and times["dot_general"] == 5


def test_views_are_followed_to_what_they_are_views_of() -> None:
    jaxpr = jaxpr_of(lambda x: jnp.sin(x.reshape(14)).reshape(2, 7), X)
    flow = Flow(jaxpr)
    sin = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sin")
    assert flow.root(sin.invars[0]) is jaxpr.invars[0]
    assert flow.root(jaxpr.outvars[0]) is sin.outvars[0]
    assert flow.user(jaxpr.invars[0]) is sin


def test_an_equation_knows_its_line() -> None:
    (eqn,) = jaxpr_of(lambda x: jax.lax.sin(x), X).eqns
    assert line_of(eqn).startswith("tests/layouts/cost/test_dataflow.py:")
