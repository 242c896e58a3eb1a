"""Rows go to the device that they are for, and back to where they were."""

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


@jax.jit
def exchanged(x_BD: jax.Array, destination_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what each device receives, and what comes back of ten times that."""

    def run(x_cd: jax.Array, destination_c: jax.Array) -> tuple[jax.Array, jax.Array]:
        exchange = Exchange.of(("x", "y"), destination_c)
        received_rd = exchange.send(x_cd, -1)
        return received_rd, exchange.send_back(10 * received_rd)

    spec = jax.P(("x", "y"))
    return jax.shard_map(run, in_specs=(spec, spec), out_specs=(spec, spec))(x_BD, destination_B)


@settings(max_examples=20, deadline=None)
@given(destinations)
def test_each_row_is_received_once_and_comes_back(destinations: list[int]) -> None:
    destination_bc = np.sort(np.reshape(destinations, (DEVICES, ROWS)), axis=1)
    x_bcd = np.arange(1.0, DEVICES * ROWS * WIDTH + 1, dtype=np.float32)
    x_bcd = x_bcd.reshape(DEVICES, ROWS, WIDTH)
    with jax.set_mesh(make_mesh(LAYOUT)):
        received, back = exchanged(
            LAYOUT.reshard(jnp.asarray(x_bcd.reshape(-1, WIDTH)), "BD"),
            LAYOUT.reshard(jnp.asarray(destination_bc.ravel()), "B"),
        )
    received_nbcd = np.asarray(received).reshape(DEVICES, DEVICES, ROWS, WIDTH)
    for to in range(DEVICES):
        for device in range(DEVICES):
            sent_cd = x_bcd[device][destination_bc[device] == to]
            expected_cd = np.full((ROWS, WIDTH), -1.0, np.float32)
            expected_cd[: len(sent_cd)] = sent_cd
            np.testing.assert_array_equal(received_nbcd[to, device], expected_cd)
    expected_bcd = np.where((destination_bc < DEVICES)[..., None], 10 * x_bcd, 0)
    np.testing.assert_array_equal(np.asarray(back).reshape(x_bcd.shape), expected_bcd)
