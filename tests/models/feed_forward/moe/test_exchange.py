"""Rows go to the device that they are for, and back to where they were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.feed_forward.moe.exchange import Exchange

DEVICES, ROWS, WIDTH = 4, 6, 3
LAYOUT = Layout(mesh="x:2,y:2", rules="batch:x;batch:y")
destinations = st.lists(
    st.integers(0, DEVICES), min_size=DEVICES * ROWS, max_size=DEVICES * ROWS
)  # of each row; the last goes nowhere


@functools.partial(jax.jit, static_argnums=2)
def exchanged(
    x_BD: jax.Array, destination_B: jax.Array, places: int
) -> tuple[jax.Array, jax.Array]:
    """Returns what each device receives in all rounds, and what comes back of ten times that."""

    def run(x_cd: jax.Array, destination_c: jax.Array) -> tuple[jax.Array, jax.Array]:
        exchange = Exchange.of(("x", "y"), DEVICES, destination_c, places)
        back_cd, received = jnp.zeros_like(x_cd), []
        for first in range(0, DEVICES * ROWS, places):
            part = exchange.part(jnp.int32(first))
            received.append(part.send(x_cd, -1))
            back_cd = part.send_back(10 * received[-1], back_cd)
        return jnp.concatenate(received), back_cd

    spec = jax.P(("x", "y"))
    return jax.shard_map(run, in_specs=(spec, spec), out_specs=(spec, spec))(x_BD, destination_B)


@settings(max_examples=20, deadline=None)
@given(destinations, st.sampled_from([DEVICES * ROWS, 8]))
def test_each_row_is_received_once_and_comes_back(destinations: list[int], places: int) -> None:
    """At once, or in three rounds."""
    destination_bc = np.sort(np.reshape(destinations, (DEVICES, ROWS)), axis=1)
    x_bcd = np.arange(1.0, DEVICES * ROWS * WIDTH + 1, dtype=np.float32)
    x_bcd = x_bcd.reshape(DEVICES, ROWS, WIDTH)
    with jax.set_mesh(make_mesh(LAYOUT)):
        received, back = exchanged(
            LAYOUT.reshard(jnp.asarray(x_bcd.reshape(-1, WIDTH)), "BD"),
            LAYOUT.reshard(jnp.asarray(destination_bc.ravel()), "B"),
            places,
        )
    for to, received_rd in enumerate(np.asarray(received).reshape(DEVICES, -1, WIDTH)):
        sent_rd = x_bcd[destination_bc == to]  # in the order of the devices
        np.testing.assert_array_equal(received_rd[: len(sent_rd)], sent_rd)
        assert (received_rd[len(sent_rd) :] == -1).all()
    expected_bcd = np.where((destination_bc < DEVICES)[..., None], 10 * x_bcd, 0)
    np.testing.assert_array_equal(np.asarray(back).reshape(x_bcd.shape), expected_bcd)
