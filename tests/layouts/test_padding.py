"""Padded axes: the numbers that are real are the same, and what is behind them is known."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import UserError
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.padding import pad_batch, with_axes, with_padding, without_padding
from layouts.random_bytes import random_bytes
from tests.toys import WHOLE

RULES = "batch:data+;heads:model+;vocab:model+;experts:data+"
PADDED = with_padding(Layout(mesh="data:4,model:2", rules=RULES), B=6, G=9, J=3, V=23, E=6, D=10)
MESH = make_mesh(PADDED)


def test_a_layout_without_plus_stays_what_it_is() -> None:
    layout = Layout(mesh="data:4,model:2", rules="batch:data;heads:model?")
    assert with_padding(layout, B=6) is layout and without_padding(layout) is layout
    assert not layout.pads("B") and PADDED.pads("B") and PADDED.pads("G") and PADDED.pads("J")
    assert without_padding(PADDED).place("BJV") == jax.P(None, None, None)


def test_an_axis_that_gave_way_to_a_padded_one_stays_as_it_is() -> None:
    """Its size may not divide: one query for each of three heads."""
    rules = "d_model:data;heads:model+"
    layout = Layout(mesh="data:4,model:2", rules=rules, param_rules="queries:model?")
    even = without_padding(with_padding(layout, J=3))
    assert even.place("DJQK", stored=True) == jax.P("data", None, None, None)
    assert not even.pads("J") and even.padded_shape("DJQK", (8, 3, 1, 4)) == (8, 3, 1, 4)


def test_uppercase_axes_are_padded_with_zeros_and_lowercase_ones_cut_again() -> None:
    x = np.arange(6 * 10 * 3.0).reshape(6, 10, 3)
    with jax.set_mesh(MESH):
        x_EDJ = PADDED.reshard(jnp.asarray(x), "EDJ")
        x_eDJ, x_eDj = PADDED.reshard(x_EDJ, "eDJ"), PADDED.reshard(x_EDJ, "eDj")
    assert x_EDJ.shape == (8, 10, 4) and x_EDJ.sharding.spec == jax.P("data", None, "model")
    assert x_EDJ.addressable_shards[0].data.shape == (2, 10, 2)
    np.testing.assert_array_equal(np.asarray(x_EDJ)[:6, :, :3], x)
    assert not np.asarray(x_EDJ)[6:].any() and not np.asarray(x_EDJ)[:, :, 3:].any()
    assert x_eDJ.shape == (6, 10, 4)
    np.testing.assert_array_equal(x_eDj, x)


TRUE = {"N": 2, "B": 6, "G": 9, "L": 5, "D": 10, "J": 3, "Q": 2, "M": 7, "E": 6, "C": 2, "S": 4,
        "K": 5, "V": 23, "F": 14}  # fmt: skip
PADDED_SIZES = TRUE | {"B": 8, "G": 12, "J": 4, "E": 8, "V": 24}
STORED, DROPPED = ("NDJQK", "VD"), ("BJQLM", "EGCF")


def drawn(layout: Layout, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Random weights, whose shapes have no padding, and bytes of these sizes."""
    key = jax.random.key(3)

    def draw() -> dict[str, jax.Array]:
        weights = {
            axes: layout.random(
                jax.random.uniform, key, axes, tuple(TRUE[x] for x in axes), stored=True
            )
            for axes in STORED
        }
        return weights | {
            axes: layout.random(random_bytes, key, axes, tuple(sizes[x] for x in axes))
            for axes in DROPPED
        }

    with jax.set_mesh(make_mesh(layout)):
        return jax.device_get(jax.jit(draw)())


def test_random_bits_are_those_without_padding() -> None:
    padded, whole = drawn(PADDED, PADDED_SIZES), drawn(WHOLE, TRUE)
    for axes, expected in whole.items():
        assert (
            padded[axes].shape == tuple(PADDED_SIZES[letter] for letter in axes) != expected.shape
        )
        real = tuple(slice(size) for size in expected.shape)
        np.testing.assert_array_equal(padded[axes][real], expected, err_msg=axes)
        assert np.count_nonzero(padded[axes]) == np.count_nonzero(expected), axes


def test_only_the_padding_of_the_named_axis_is_masked() -> None:
    with jax.set_mesh(MESH):
        x_BLV = PADDED.reshard(jnp.zeros((8, 5, 24)), "BLV")
        masked = np.asarray(jax.jit(lambda x: PADDED.mask_padding(x, "BLV", "V", 7.0))(x_BLV))
    assert (masked[:, :, 23:] == 7).all() and not masked[:, :, :23].any()


def test_a_part_that_pads_its_axis_says_its_size() -> None:
    """Else a lowercase axis, and what is masked, would have the padding, without a word."""
    paths = Axis("P", "paths", "ways through a layer", pads=True)
    unknown = with_axes(Layout(mesh="data:2,model:4", rules="paths:model+"), paths)
    known = with_padding(unknown, P=3)
    with jax.set_mesh(make_mesh(unknown)):
        x_DP = unknown.reshard(jnp.ones((10, 3)), "DP")
        assert x_DP.shape == (10, 4) and known.reshard(x_DP, "Dp").shape == (10, 3)
        for use in (
            lambda: unknown.reshard(x_DP, "Dp"),
            lambda: unknown.mask_padding(x_DP, "DP", "P", 0.0),
        ):
            with pytest.raises(UserError, match=r"'paths' pads it.*with_padding\(.*P=size\)"):
                use()
    whole = with_axes(Layout(mesh="data:8,model:1", rules="paths:model+"), paths)
    with jax.set_mesh(make_mesh(whole)):
        assert whole.reshard(jnp.ones((10, 3)), "Dp").shape == (10, 3)


def test_rows_are_padded_by_the_name_of_their_axis() -> None:
    """Here M is no axis of rows, whose keys have no letter."""
    mixtures = Axis("M", "mixtures", "of an output", pads=True)
    layout = with_axes(
        Layout(mesh="data:2,model:4", rules="mixtures:model+;length:model+"), mixtures
    )
    layout = with_padding(layout, M=5, L=100)
    with jax.set_mesh(make_mesh(layout)):
        padded, batch = pad_batch(layout, {"targets_BL": jnp.ones((3, 6))}, {})
        again, same = pad_batch(padded, batch, {})
    assert batch["targets_BL"].shape == same["targets_BL"].shape == (3, 8) and again == padded
    assert padded.unpadded_shape("BLM", (3, 8, 8)) == (3, 6, 5)
    alone = with_axes(Layout(mesh="data:2,model:4", rules="mixtures:model+"), mixtures)
    alone = with_padding(alone, M=5, L=100)
    with jax.set_mesh(make_mesh(alone)):
        assert pad_batch(alone, {"targets_BL": jnp.ones((3, 6))}, {})[0] == alone


@pytest.mark.parametrize(
    ("rows", "group_tokens", "padded_rows"),
    [(6, None, 8), (8, None, 8), (1, None, 4), (6, 8, 8), (6, 16, 8), (12, 32, 16), (9, 12, 12)],
)
def test_empty_rows_fill_up_devices_and_groups(
    rows: int, group_tokens: int | None, padded_rows: int
) -> None:
    """Rows of 8 tokens over 4 devices: groups of 12 are a row and a half."""
    batch = {"inputs_BL": jnp.ones((rows, 8)), "inputs_BM": jnp.ones((rows, 2))}
    groups = {} if group_tokens is None else {"inputs_BL": group_tokens}
    layout = with_padding(Layout(mesh=PADDED.mesh, rules=RULES), J=3)
    filled_up = functools.partial(pad_batch, layout, groups=groups)
    with jax.set_mesh(MESH):
        computed = jax.eval_shape(lambda batch: filled_up(batch)[1], batch)
    assert {x.shape for x in computed.values()} == {(padded_rows, 8), (padded_rows, 2)}
    tokens = 8 if group_tokens is None else math.gcd(rows * 8, group_tokens)
    assert padded_rows * 8 // tokens % 4 == 0 and padded_rows * 8 % tokens == 0
