"""What the tokens of a packed row see."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.attention.context import cross_context, packed_context
from tests.toys import WHOLE

SEGMENTS_BL = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 0, 0], [1] * 6])


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    with jax.set_mesh(make_mesh(WHOLE)):
        yield


def mask_BLM() -> np.ndarray:
    same_BLM = SEGMENTS_BL[:, :, None] == SEGMENTS_BL[:, None, :]
    return same_BLM & np.tril(np.ones((6, 6), bool))


def test_a_packed_token_sees_its_own_segment_up_to_itself() -> None:
    segments_BL = jnp.asarray(SEGMENTS_BL, jnp.int32)
    causal = packed_context(WHOLE, segments_BL, segments_BL)
    np.testing.assert_array_equal(causal.mask_BLM, mask_BLM())
    np.testing.assert_array_equal(causal.segments_BL, SEGMENTS_BL)
    np.testing.assert_array_equal(causal.relative_positions[4], [4, 3, 2, 1, 0, -1])
    both = packed_context(WHOLE, segments_BL, segments_BL, causal=False)
    np.testing.assert_array_equal(both.mask_BLM, mask_BLM() | np.swapaxes(mask_BLM(), 1, 2))


def test_a_target_sees_the_whole_source_of_its_segment() -> None:
    segments_BM = jnp.asarray([[1, 2, 2, 0], [1, 1, 1, 1], [3, 1, 0, 0], [2, 2, 2, 2]], jnp.int32)
    context = cross_context(WHOLE, jnp.asarray(SEGMENTS_BL, jnp.int32), segments_BM)
    np.testing.assert_array_equal(context.mask_BLM[0, 2], [False, True, True, False])
    np.testing.assert_array_equal(context.mask_BLM[2, 3], [True, False, False, False])
    assert not context.mask_BLM[3].any() and not context.causal
