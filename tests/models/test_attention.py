"""Attention against a numpy oracle, with its gradient, and its masks."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.attention import cross_context, dot_product_attention, packed_context
from tests.toys import WHOLE

SHAPES = {"q_BJQLK": (4, 2, 3, 6, 5), "k_BJMK": (4, 2, 6, 5), "v_BJMK": (4, 2, 6, 5)}
SEGMENTS_BL = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 0, 0], [1] * 6])


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    with jax.set_mesh(make_mesh(WHOLE)):
        yield


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return made | {"bias": rng.normal(size=(4, 2, 3, 6, 6))}


def mask_BLM() -> np.ndarray:
    same_BLM = SEGMENTS_BL[:, :, None] == SEGMENTS_BL[:, None, :]
    return same_BLM & np.tril(np.ones((6, 6), bool))


def reference(
    q_BJQLK: np.ndarray, k_BJMK: np.ndarray, v_BJMK: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Attention one query at a time.  Vaswani et al. 2017, equation 1."""
    y_BJQLK = np.zeros(q_BJQLK.shape)
    for b, j, q, i in np.ndindex(*q_BJQLK.shape[:4]):
        keys = np.flatnonzero(mask_BLM()[b, i])
        logits = k_BJMK[b, j, keys] @ q_BJQLK[b, j, q, i] + bias[b, j, q, i, keys]
        probs = np.exp(logits - logits.max())
        y_BJQLK[b, j, q, i] = probs / probs.sum() @ v_BJMK[b, j, keys]
    return y_BJQLK


def attend(q_BJQLK: jax.Array, k_BJMK: jax.Array, v_BJMK: jax.Array, bias: jax.Array) -> jax.Array:
    mask_B11LM = jnp.asarray(mask_BLM())[:, None, None]
    return dot_product_attention(WHOLE, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)


def test_attention_equals_the_oracle() -> None:
    given = arrays()
    y_BJQLK = jax.jit(attend)(**{k: v.astype(np.float32) for k, v in given.items()})
    np.testing.assert_allclose(y_BJQLK, reference(**given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["q_BJQLK", "k_BJMK", "v_BJMK", "bias"])
def test_the_gradient_equals_differences_of_the_oracle(name: str) -> None:
    """The gradient is written by hand; differences of the oracle know nothing of it."""
    given, rng = arrays(), np.random.default_rng(1)
    dy_BJQLK = rng.normal(size=given["q_BJQLK"].shape)
    step = rng.normal(size=given[name].shape)

    def objective(x: jax.Array) -> jax.Array:
        small = {k: v.astype(np.float32) for k, v in given.items()}
        return jnp.vdot(attend(**(small | {name: x})), dy_BJQLK.astype(np.float32))

    def moved(size: float) -> float:
        return float(np.vdot(reference(**(given | {name: given[name] + size * step})), dy_BJQLK))

    gradient = np.asarray(jax.jit(jax.grad(objective))(given[name].astype(np.float32)))
    wanted = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(np.vdot(gradient, step), wanted, rtol=1e-3, atol=1e-3)


def test_a_packed_token_sees_its_own_segment_up_to_itself() -> None:
    segments_BL = jnp.asarray(SEGMENTS_BL, jnp.int32)
    causal = packed_context(WHOLE, segments_BL, segments_BL)
    np.testing.assert_array_equal(causal.mask_BLM, mask_BLM())
    np.testing.assert_array_equal(causal.is_token_BL, SEGMENTS_BL > 0)
    np.testing.assert_array_equal(causal.relative_positions[4], [4, 3, 2, 1, 0, -1])
    both = packed_context(WHOLE, segments_BL, segments_BL, causal=False)
    np.testing.assert_array_equal(both.mask_BLM, mask_BLM() | np.swapaxes(mask_BLM(), 1, 2))


def test_a_target_sees_the_whole_source_of_its_segment() -> None:
    segments_BM = jnp.asarray([[1, 2, 2, 0], [1, 1, 1, 1], [3, 1, 0, 0], [2, 2, 2, 2]], jnp.int32)
    context = cross_context(WHOLE, jnp.asarray(SEGMENTS_BL, jnp.int32), segments_BM)
    np.testing.assert_array_equal(context.mask_BLM[0, 2], [False, True, True, False])
    np.testing.assert_array_equal(context.mask_BLM[2, 3], [True, False, False, False])
    assert not context.mask_BLM[3].any() and not context.causal
