"""Plain attention against a numpy oracle, with its gradient."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.attention.bias import Bias
from models.attention.plain import Operands, attend_in_chunks, dot_product_attention
from tests.toys import WHOLE

SHAPES = {"q_BJQLK": (4, 2, 3, 6, 5), "k_BJMK": (4, 2, 6, 5), "v_BJMK": (4, 2, 6, 5)}
BUCKETS = 9
BUCKETS_BLM = np.random.default_rng(2).integers(0, BUCKETS, (4, 6, 6))
SEGMENTS_BL = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 0, 0], [1] * 6])


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    with jax.set_mesh(make_mesh(WHOLE)):
        yield


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return made | {"table_RJQ": rng.normal(size=(BUCKETS, 2, 3))}


def mask_BLM() -> np.ndarray:
    same_BLM = SEGMENTS_BL[:, :, None] == SEGMENTS_BL[:, None, :]
    return same_BLM & np.tril(np.ones((6, 6), bool))


def reference(
    q_BJQLK: np.ndarray,
    k_BJMK: np.ndarray,
    v_BJMK: np.ndarray,
    table_RJQ: np.ndarray,
    logit_cap: float | None = None,
    sink_JQ: np.ndarray | None = None,
) -> np.ndarray:
    """Attention one query at a time.  Vaswani et al. 2017, equation 1."""
    y_BJQLK = np.zeros(q_BJQLK.shape)
    for b, j, q, i in np.ndindex(*q_BJQLK.shape[:4]):
        keys = np.flatnonzero(mask_BLM()[b, i])
        logits = k_BJMK[b, j, keys] @ q_BJQLK[b, j, q, i]
        if logit_cap is not None:
            logits = logit_cap * np.tanh(logits / logit_cap)
        logits = logits + table_RJQ[BUCKETS_BLM[b, i, keys], j, q]
        probs = np.exp(logits - logits.max())
        total = probs.sum() + (0 if sink_JQ is None else np.exp(sink_JQ[j, q] - logits.max()))
        y_BJQLK[b, j, q, i] = probs / total @ v_BJMK[b, j, keys]
    return y_BJQLK


def attend(
    q_BJQLK: jax.Array,
    k_BJMK: jax.Array,
    v_BJMK: jax.Array,
    table_RJQ: jax.Array,
    logit_cap: float | None = None,
    chunks: int = 1,
    sink_JQ: jax.Array | None = None,
) -> jax.Array:
    values_BJQLM = jnp.transpose(jax.lax.stop_gradient(table_RJQ)[BUCKETS_BLM], (0, 3, 4, 1, 2))
    bias = Bias(table_RJQ, jnp.asarray(BUCKETS_BLM), values_BJQLM)
    mask_B11LM = jnp.asarray(mask_BLM())[:, None, None]
    operands = Operands(q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM, sink_JQ)
    if logit_cap is None and sink_JQ is None:
        return dot_product_attention(WHOLE, operands)
    return attend_in_chunks(WHOLE, chunks, operands, logit_cap)


def test_attention_equals_the_oracle() -> None:
    given = arrays()
    y_BJQLK = jax.jit(attend)(**{k: v.astype(np.float32) for k, v in given.items()})
    np.testing.assert_allclose(y_BJQLK, reference(**given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [1, 4])
def test_bounded_logits_are_those_of_the_oracle(chunks: int) -> None:
    """Gemma Team 2024 (Gemma 2), section 2: cap * tanh(logits / cap), before any bias."""
    given = arrays()
    small = {k: v.astype(np.float32) for k, v in given.items()}
    y_BJQLK = jax.jit(functools.partial(attend, logit_cap=1.5, chunks=chunks))(**small)
    expected_BJQLK = reference(**given, logit_cap=1.5)
    np.testing.assert_allclose(y_BJQLK, expected_BJQLK, rtol=1e-4, atol=1e-5)
    assert np.abs(expected_BJQLK - reference(**given)).max() > 0.1


@pytest.mark.parametrize("sink", [-2.0, 2.0, 300.0])
@pytest.mark.parametrize("chunks", [1, 4])
def test_sinks_take_a_part_of_the_probability(chunks: int, sink: float) -> None:
    """Also where a sink is far above the logits."""
    given = arrays()
    sink_JQ = np.random.default_rng(3).normal(sink, 1, (2, 3))
    small = {k: v.astype(np.float32) for k, v in given.items()}
    run = jax.jit(functools.partial(attend, chunks=chunks))
    small["sink_JQ"] = sink_JQ.astype(np.float32)
    y_BJQLK = run(**small)
    gradient = jax.jit(jax.grad(lambda small: jnp.sum(run(**small))))(small)
    assert all(np.isfinite(array).all() for array in gradient.values())
    expected_BJQLK = reference(**given, sink_JQ=sink_JQ)
    np.testing.assert_allclose(y_BJQLK, expected_BJQLK, rtol=1e-4, atol=1e-5)
    assert np.abs(expected_BJQLK - reference(**given)).max() > 0.1


@pytest.mark.parametrize("name", ["q_BJQLK", "k_BJMK", "v_BJMK", "table_RJQ"])
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
    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(np.vdot(gradient, step), expected, rtol=1e-3, atol=1e-3)
