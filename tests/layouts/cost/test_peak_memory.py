"""Peak memory of small traces, counted by hand."""

import jax
import jax.numpy as jnp

from layouts.cost.dataflow import peak_bytes

X = jnp.zeros(100)  # of 400 bytes


def peak_of(function, *arguments):
    return peak_bytes(jax.make_jaxpr(function)(*arguments).jaxpr, {})


def test_a_value_lives_until_its_last_use() -> None:
    assert peak_of(jnp.sin, X) == 400
    assert peak_of(lambda x: jnp.cos(jnp.sin(jnp.exp(x))), X) == 800  # one in, one out

    def keeps_the_first(x):
        first = jnp.exp(x)
        return first + jnp.cos(jnp.sin(first))

    assert peak_of(keeps_the_first, X) == 1200


def test_a_loop_adds_the_peak_of_its_body() -> None:
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.cos(jnp.sin(c)), None), x, None, length=5)[0]

    assert peak_of(looped, X) == 400 + 800


def test_of_branches_for_platforms_the_last_counts() -> None:
    def by_platform(x):
        return jax.lax.platform_dependent(
            x, cpu=lambda x: jnp.sin(jnp.tile(x, 9))[:100], default=jnp.sin
        )

    assert peak_of(by_platform, X) == 4 + 400 + 400  # the platform, and the result in its branch
