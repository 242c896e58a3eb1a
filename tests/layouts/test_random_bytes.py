"""Random bytes are the same under every layout, and evenly distributed."""

import jax
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.random_bytes import random_bytes


def drawn(layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    with jax.set_mesh(make_mesh(layout)):
        draw = jax.jit(lambda key: layout.random(random_bytes, key, "BF", shape))
        return np.asarray(draw(jax.random.key(2)))


@pytest.mark.parametrize("width", [32, 20, 18, 2])  # of shards: whole numbers, parts, and both
def test_a_layout_changes_no_byte(width: int) -> None:
    whole = drawn(Layout(mesh="x:1", rules=""), (4, width))
    split = drawn(Layout(mesh="x:4,y:2", rules="batch:x;d_ff:y"), (4, width))
    np.testing.assert_array_equal(split, whole)
    assert whole.dtype == np.uint8


def test_each_byte_is_as_frequent() -> None:
    counts = np.bincount(drawn(Layout(mesh="x:1", rules=""), (64, 4096)).ravel(), minlength=256)
    expected = counts.sum() / 256
    assert np.abs(counts - expected).max() < 5 * expected**0.5
