"""The loss and its hand-written gradient against a numpy oracle."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.loss import Criterion, LogitOperands, LossSums, divergence, softmax_loss, token_losses
from tests.toys import WHOLE

COUNTED_BL = np.array([[1, 1, 1, 0, 1, 1], [1] * 6, [0] * 6, [1, 0, 1, 0, 1, 0]], bool)
CRITERIA = {
    "plain": Criterion(),
    "smoothed": Criterion(label_smoothing=0.1),
    "z-loss, scaled": Criterion(z_loss=0.01, logit_scale=0.5),
    "bounded": Criterion(label_smoothing=0.1, z_loss=0.01, logit_scale=0.5, logit_cap=3.0),
    "taught": Criterion(label_smoothing=0.1, z_loss=0.01, logit_cap=3.0, teacher_weight=0.3,
                        temperature=2.0, teacher_cap=2.5),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    with jax.set_mesh(make_mesh(WHOLE)):
        yield


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(4, 6, 10)), rng.normal(size=(22, 10)), rng.integers(0, 22, (4, 6))


def teacher_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Of a narrower model with the same vocabulary."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(4, 6, 7)), rng.normal(size=(22, 7))


def reference(
    criterion: Criterion, x_BLD: np.ndarray, softmax_VD: np.ndarray, targets_BL: np.ndarray
) -> LossSums:
    """The sums, one token at a time."""
    objective, loss, correct, smooth = 0.0, 0.0, 0, criterion.label_smoothing
    for b, i in np.argwhere(COUNTED_BL):
        logits_V, cap = softmax_VD @ x_BLD[b, i], criterion.logit_cap
        logits_V = criterion.logit_scale * (cap * np.tanh(logits_V / cap) if cap else logits_V)
        log_z = np.log(np.exp(logits_V).sum())
        target_V = smooth / 22 + (1 - smooth) * (np.arange(22) == targets_BL[b, i])
        hard = target_V @ (log_z - logits_V) + criterion.z_loss * log_z**2
        soft, weight, temperature = 0.0, criterion.teacher_weight, criterion.temperature
        if weight and criterion.teacher_cap:
            x, softmax = teacher_arrays()
            taught_V = criterion.teacher_cap * np.tanh(softmax @ x[b, i] / criterion.teacher_cap)
            probs_V, expected_V = (
                np.exp(y / temperature) / np.exp(y / temperature).sum()
                for y in (logits_V, taught_V)
            )
            soft = temperature**2 * expected_V @ np.log(expected_V / probs_V)
        objective += (1 - weight) * hard + weight * soft
        loss += log_z - logits_V[targets_BL[b, i]]
        correct += int(logits_V.argmax() == targets_BL[b, i])
    return LossSums(objective, loss, correct, COUNTED_BL.sum())


def sums(
    criterion: Criterion,
    chunks: int,
    x_BLD: jax.Array,
    softmax_VD: jax.Array,
    targets_BL: jax.Array,
) -> LossSums:
    counted_BL = jnp.asarray(COUNTED_BL)
    output = LogitOperands(x_BLD, softmax_VD)
    return softmax_loss(WHOLE, criterion, chunks, output, targets_BL, counted_BL)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", CRITERIA)
def test_sums_and_gradients_equal_the_oracle(name: str, chunks: int) -> None:
    criterion, (x_BLD, softmax_VD, targets_BL) = CRITERIA[name], arrays()
    given = x_BLD.astype(np.float32), softmax_VD.astype(np.float32), targets_BL.astype(np.int32)

    known = [jnp.asarray(x, jnp.float32) for x in teacher_arrays()]
    teacher = LogitOperands(*known) if criterion.teacher_weight else None

    def objective(x_BLD: jax.Array, softmax_VD: jax.Array) -> tuple[jax.Array, LossSums]:
        counted_BL = jnp.asarray(COUNTED_BL)
        output = LogitOperands(x_BLD, softmax_VD)
        computed = softmax_loss(WHOLE, criterion, chunks, output, given[2], counted_BL, teacher)
        return computed.objective, computed

    run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    (_, computed), gradients = run(*given[:2])
    expected = reference(criterion, x_BLD, softmax_VD, targets_BL)
    for field in ("objective", "loss", "correct", "tokens"):
        actual = getattr(computed, field)
        np.testing.assert_allclose(actual, getattr(expected, field), rtol=1e-5, err_msg=field)

    rng = np.random.default_rng(1)
    for argument, gradient in enumerate(gradients):
        step = rng.normal(size=gradient.shape)

        def moved(size: float, argument: int = argument, step: np.ndarray = step) -> float:
            values = [x_BLD, softmax_VD]
            values[argument] = values[argument] + size * step
            return float(reference(criterion, *values, targets_BL).objective)

        expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.vdot(gradient, step), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunks", [1, 3])
def test_divergence_and_its_gradients_equal_the_oracle(chunks: int) -> None:
    first_BLD, softmax_VD, _ = arrays()
    second_BLD = first_BLD + np.random.default_rng(2).normal(size=first_BLD.shape) / 3
    values, counted_BL = [first_BLD, second_BLD, softmax_VD], jnp.asarray(COUNTED_BL)

    def oracle(values: list[np.ndarray]) -> float:
        """Both divergences of the distributions, one token at a time."""
        total = 0.0
        for b, i in np.argwhere(COUNTED_BL):
            first_V, second_V = (0.5 * values[2] @ x_BLD[b, i] for x_BLD in values[:2])
            first_V, second_V = (x - np.log(np.exp(x).sum()) for x in (first_V, second_V))
            total += np.exp(first_V) @ (first_V - second_V) / 2
            total += np.exp(second_V) @ (second_V - first_V) / 2
        return float(total)

    def summed(first: jax.Array, second: jax.Array, softmax: jax.Array) -> jax.Array:
        output = LogitOperands(first, softmax)
        return divergence(WHOLE, Criterion(logit_scale=0.5), chunks, output, second, counted_BL)

    given = [value.astype(np.float32) for value in values]
    computed, gradients = jax.jit(jax.value_and_grad(summed, argnums=(0, 1, 2)))(*given)
    np.testing.assert_allclose(computed, oracle(values), rtol=1e-5)
    rng = np.random.default_rng(1)
    for argument, gradient in enumerate(gradients):
        step = rng.normal(size=gradient.shape)

        def moved(size: float, argument: int = argument, step: np.ndarray = step) -> float:
            changed = values.copy()
            changed[argument] = changed[argument] + size * step
            return oracle(changed)

        expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.vdot(gradient, step), expected, rtol=1e-3, atol=1e-3)


def test_token_losses_sum_to_the_loss_and_are_zero_elsewhere() -> None:
    x_BLD, softmax_VD, targets_BL = arrays()
    given = x_BLD.astype(np.float32), softmax_VD.astype(np.float32), targets_BL.astype(np.int32)
    losses = token_losses(WHOLE, LogitOperands(*given[:2]), given[2], jnp.asarray(COUNTED_BL))
    losses_BL, is_likeliest_BL = map(np.asarray, losses)
    assert not losses_BL[~COUNTED_BL].any() and (losses_BL[COUNTED_BL] > 0).all()
    expected = reference(Criterion(), x_BLD, softmax_VD, targets_BL)
    np.testing.assert_allclose(losses_BL.sum(), expected.loss, rtol=1e-5)
    greedy_BL = np.argmax(x_BLD @ softmax_VD.T, axis=-1)
    assert 0 < is_likeliest_BL.sum() < COUNTED_BL.sum()
    np.testing.assert_array_equal(is_likeliest_BL, (greedy_BL == targets_BL) & COUNTED_BL)


def test_a_bias_of_logits_is_a_column_whose_input_is_one() -> None:
    x_BLD, softmax_VD, targets_BL = arrays()
    other_BLD, other_VD = teacher_arrays()
    bias_V, other_bias_V = np.random.default_rng(4).normal(size=(2, 22))
    criterion, targets = CRITERIA["taught"], jnp.asarray(targets_BL, jnp.int32)
    counted_BL = jnp.asarray(COUNTED_BL)

    def wide(x: np.ndarray, ones: np.ndarray | float) -> jax.Array:
        column = np.broadcast_to(np.asarray(ones)[..., None], (*x.shape[:-1], 1))
        return jnp.asarray(np.concatenate([x, column], -1), jnp.float32)

    def computed(
        x: jax.Array, softmax: jax.Array, taught: LogitOperands, bias: jax.Array | None
    ) -> object:
        output = LogitOperands(x, softmax, bias)
        moved = x * 1.1 if bias is not None else x.at[..., :10].multiply(1.1)
        return (
            softmax_loss(WHOLE, criterion, 3, output, targets, counted_BL, taught),
            divergence(WHOLE, criterion, 3, output, moved, counted_BL),
            token_losses(WHOLE, output, targets, counted_BL, criterion.logit_cap),
        )

    plain, taught, bias, other = (
        jnp.asarray(x, jnp.float32) for x in (x_BLD, softmax_VD, bias_V, other_bias_V)
    )
    teacher = LogitOperands(*(jnp.asarray(x, jnp.float32) for x in (other_BLD, other_VD)), other)
    widened = LogitOperands(wide(other_BLD, 1.0), wide(other_VD, other_bias_V))
    biased = computed(plain, taught, teacher, bias)
    columns = computed(wide(x_BLD, 1.0), wide(softmax_VD, bias_V), widened, None)
    for one, same in zip(jax.tree.leaves(biased), jax.tree.leaves(columns), strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-5, atol=1e-5)
