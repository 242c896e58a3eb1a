"""Adafactor against a numpy version written from the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.optimizers.updates import (
    LAYERS,
    STEPS,
    assert_same,
    transform_of,
    trees,
    updated,
)
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.schedules import Constant, InverseSqrt


def adafactor_of(name: str, x: np.ndarray, gradients: list[np.ndarray], cap: float) -> np.ndarray:
    """An expert is a weight of its own."""
    if "_E" not in name:
        return adafactor(x, gradients, 0.3, 4, cap)
    of_expert = ([gradient[i] for gradient in gradients] for i in range(len(x)))
    return np.stack([adafactor(x[i], ours, 0.3, 4, cap) for i, ours in enumerate(of_expert)])


def adafactor(
    x: np.ndarray, gradients: list[np.ndarray], peak: float, warmup: int, decay_cap: float
) -> np.ndarray:
    """Shazeer and Stern 2018: algorithms 4 and 5, sections 6 to 9; double precision."""
    a, b = np.argsort(x.shape)[-2:] if x.ndim > 1 else (0, 0)
    factored = x.ndim > 1 and min(x.shape[a], x.shape[b]) >= 8
    rows = columns = second = 0.0
    for t, gradient in enumerate(gradients, 1):
        beta2 = min(1 - t**-0.8, decay_cap)
        square = gradient**2 + 1e-30
        if factored:
            rows = beta2 * rows + (1 - beta2) * square.sum(axis=b, keepdims=True)
            columns = beta2 * columns + (1 - beta2) * square.sum(axis=a, keepdims=True)
            second = rows * columns / rows.sum(axis=a, keepdims=True)
        else:
            second = beta2 * second + (1 - beta2) * square
        update = gradient / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(update**2)))
        step_size = peak * min(t / warmup, (warmup / t) ** 0.5)
        step_size *= min(1.0, (STEPS - t + 1) / (STEPS / 10))
        x = x - step_size * max(1e-3, np.sqrt(np.mean(x**2))) * update
    return x


@pytest.mark.parametrize("decay_cap", [None, 0.5])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
def test_adafactor_is_the_papers_for_every_layer(decay_cap: float | None, stacked: bool) -> None:
    optimizer = Adafactor(
        schedule=InverseSqrt(peak=0.3, warmup_steps=4), factored_from=8, decay_cap=decay_cap
    )
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 11)]
    expected = [
        {
            name: adafactor_of(name, x, [g[i][name] for g in gradients], decay_cap or 1.0)
            for name, x in layer.items()
        }
        for i, layer in enumerate(layers)
    ]
    assert_same(updated(optimizer, layers, gradients, stacked), expected)


def test_adafactor_clips_the_update_where_it_is_large() -> None:
    """A gradient that grows makes an update beyond 1: the weight moves as far as clipping lets."""
    optimizer = Adafactor(schedule=Constant(peak=0.1), factored_from=128)
    layers, gradients = trees(0), [trees(1), [
        {name: 100 * x for name, x in layer.items()} for layer in trees(1)
    ]]  # fmt: skip
    before = updated(optimizer, layers, gradients[:1], True)[0]["embed_VD"]
    after = updated(optimizer, layers, gradients, True)[0]["embed_VD"]
    moved = np.sqrt(np.mean((after - before) ** 2)) / np.sqrt(np.mean(before**2))
    np.testing.assert_allclose(moved, 0.1, rtol=1e-4)


def test_adafactor_takes_weights_of_more_numbers_than_int32_has() -> None:
    tree = {"wi_EDF": jax.ShapeDtypeStruct((2048, 1024, 8192), jnp.float32)}  # GShard's 600B
    transform = transform_of(Adafactor(), tree)
    opt_state = jax.eval_shape(transform.init, tree)
    updates, _ = jax.eval_shape(transform.update, tree, opt_state, tree)
    assert updates["wi_EDF"].shape == tree["wi_EDF"].shape


def test_adafactor_keeps_rows_and_columns_in_place_of_the_square() -> None:
    """Of every layer and every expert apart: moments lie where the experts do."""
    layers = {"wi_DF": jnp.zeros((LAYERS, 10, 14)), "wo_EFD": jnp.zeros((LAYERS, 16, 14, 10))}
    params = {"layers_N": layers, "embed_VD": jnp.zeros((22, 9))}
    opt_state = jax.eval_shape(transform_of(Adafactor(factored_from=9), params).init, params)
    sizes = sorted(
        leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if "count" not in jax.tree_util.keystr(path) and leaf.shape[-1] > 1
    )
    assert sizes == [(3, 10), (3, 14), (3, 16, 10), (3, 16, 14), (9,), (22,)]
