"""Dropout: the share that it zeroes, and bits that no layout changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.dropout import dropout


def dropped(layout: Layout, rate: float, shape: tuple[int, ...]) -> np.ndarray:
    with jax.set_mesh(make_mesh(layout)):
        x_BLF = layout.reshard(jnp.ones(shape), "BLF")
        return np.asarray(
            jax.jit(lambda x: dropout(layout, jax.random.key(7), rate, x, "BLF"))(x_BLF)
        )


@pytest.mark.parametrize("width", [32, 24, 12, 10])  # a part of a row is, or is no whole of words
@pytest.mark.parametrize("rules", ["d_ff:model", "batch:data;d_ff:model", "length:data"])
def test_a_layout_changes_no_bit(rules, width):
    split = Layout(mesh="data:4,model:2", rules=rules)
    whole = Layout(mesh="data:1", rules="")
    shape = (4, 8, width)
    np.testing.assert_array_equal(dropped(split, 0.3, shape), dropped(whole, 0.3, shape))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
def test_the_share_is_the_rate_and_the_mean_stays(rate):
    x = dropped(Layout(mesh="data:1", rules=""), rate, (64, 64, 64))
    share = min(max(round(rate * 256), 1), 255) / 256
    assert abs(share - rate) < 1 / 256
    deviation = (share * (1 - share) / x.size) ** 0.5
    assert abs(np.mean(x == 0) - share) < 4 * deviation
    assert abs(np.mean(x) - 1) < 4 * deviation / (1 - share)
    places = np.mean(x == 0, axis=(0, 1))  # no place in a number is favoured
    assert np.max(np.abs(places - share)) < 5 * (share * (1 - share) / 64**2) ** 0.5


def test_no_rate_and_no_key_change_nothing():
    layout, x_BLF = Layout(), jnp.ones((2, 3, 4))
    assert dropout(layout, None, 0.5, x_BLF, "BLF") is x_BLF
    assert dropout(layout, jax.random.key(0), 0.0, x_BLF, "BLF") is x_BLF
