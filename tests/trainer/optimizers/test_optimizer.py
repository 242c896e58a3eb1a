"""Optimizers against numpy versions written from the papers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.chain import is_matrix
from trainer.optimizers.schedules import Constant, InverseSqrt

STEPS, LAYERS = 30, 3
# Some dozen float32 operations an update, ten updates.
ROUND_OFF = 1e-5
SHAPES = {
    "embed_VD": (22, 10),
    "wk_DJK": (10, 3, 8),
    "wi_EDF": (4, 10, 12),
    "scale_D": (10,),
    "tiny_D": (10,),
}


def trees(seed: int) -> list[dict[str, np.ndarray]]:
    """One tree of weights for each layer, unlike in size from layer to layer and among experts."""
    rng = np.random.default_rng(seed)
    experts = 3.0 ** np.arange(4).reshape(4, 1, 1)
    sizes = {"embed_VD": 1.0, "wk_DJK": 0.2, "wi_EDF": experts, "scale_D": 3.0, "tiny_D": 1e-5}
    return [
        {name: rng.normal(0, sizes[name] * 4.0**layer, shape) for name, shape in SHAPES.items()}
        for layer in range(LAYERS)
    ]


def updated(
    optimizer: Any, layers: list[dict[str, np.ndarray]], gradients: list[Any], stacked: bool
) -> list[dict[str, np.ndarray]]:
    """The weights after these gradients, by layer, where layers are stacked or kept apart."""

    def tree(layers: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        if stacked:
            joined = {name: np.stack([layer[name] for layer in layers]) for name in SHAPES}
            found: dict[str, Any] = {"layers_N": joined}
        else:
            found = {f"layer{i}": layer for i, layer in enumerate(layers)}
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)

    transform = optimizer.transform(STEPS)

    @jax.jit
    def update(gradients: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = transform.update(gradients, opt_state, params)
        return jax.tree.map(jnp.add, params, updates), opt_state

    params = tree(layers)
    opt_state = transform.init(params)
    for gradient in gradients:
        params, opt_state = update(tree(gradient), opt_state, params)
    if stacked:
        return [jax.tree.map(lambda x, i=i: np.asarray(x[i]), params["layers_N"])
                for i in range(LAYERS)]  # fmt: skip
    return [jax.tree.map(np.asarray, params[f"layer{i}"]) for i in range(LAYERS)]


def assert_same(found: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> None:
    for layer, (own, other) in enumerate(zip(found, wanted, strict=True)):
        for name, weight in other.items():
            scale = np.abs(weight).max()
            np.testing.assert_allclose(own[name] / scale, weight / scale, rtol=0, atol=ROUND_OFF,
                                       err_msg=f"{name} of layer {layer}")  # fmt: skip


def adafactor_of(name: str, x: np.ndarray, gradients: list[np.ndarray], cap: float) -> np.ndarray:
    """An expert is a weight of its own."""
    if "_E" not in name:
        return adafactor(x, gradients, 0.3, 4, cap)
    own = ([gradient[i] for gradient in gradients] for i in range(len(x)))
    return np.stack([adafactor(x[i], ours, 0.3, 4, cap) for i, ours in enumerate(own)])


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


def adamw(x: np.ndarray, gradients: list[np.ndarray], rate: float, decay: float) -> np.ndarray:
    """Loshchilov and Hutter 2019, algorithm 2; beta 0.9 and 0.98."""
    m = v = 0.0
    for t, gradient in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.98 * v + 0.02 * gradient**2
        unbiased = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.98**t)) + 1e-8)
        x = x - rate * (unbiased + decay * x)
    return x


@pytest.mark.parametrize("decay_cap", [None, 0.5])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
def test_adafactor_is_the_papers_for_every_layer(decay_cap: float | None, stacked: bool) -> None:
    optimizer = Adafactor(
        schedule=InverseSqrt(peak=0.3, warmup_steps=4), factored_from=8, decay_cap=decay_cap
    )
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 11)]
    wanted = [
        {
            name: adafactor_of(name, x, [g[i][name] for g in gradients], decay_cap or 1.0)
            for name, x in layer.items()
        }
        for i, layer in enumerate(layers)
    ]
    assert_same(updated(optimizer, layers, gradients, stacked), wanted)


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
    transform = Adafactor().transform(STEPS)
    tree = {"wi_EDF": jax.ShapeDtypeStruct((2048, 1024, 8192), jnp.float32)}  # GShard's 600B
    opt_state = jax.eval_shape(transform.init, tree)
    updates, _ = jax.eval_shape(transform.update, tree, opt_state, tree)
    assert updates["wi_EDF"].shape == tree["wi_EDF"].shape


def test_adafactor_keeps_rows_and_columns_in_place_of_the_square() -> None:
    """Of every layer and every expert apart: moments lie where the experts do."""
    layers = {"wi_DF": jnp.zeros((LAYERS, 10, 14)), "wo_EFD": jnp.zeros((LAYERS, 16, 14, 10))}
    params = {"layers_N": layers, "embed_VD": jnp.zeros((22, 9))}
    opt_state = jax.eval_shape(Adafactor(factored_from=9).transform(STEPS).init, params)
    sizes = sorted(
        leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if "count" not in jax.tree_util.keystr(path) and leaf.shape[-1] > 1
    )
    assert sizes == [(3, 10), (3, 14), (3, 16, 10), (3, 16, 14), (9,), (22,)]


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
def test_adamw_is_the_papers_and_decays_matrices_only(stacked: bool) -> None:
    optimizer = AdamW(schedule=Constant(peak=0.01), weight_decay=0.1, clip_global_norm=None)
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 11)]
    decays = {"embed_VD": 0.1, "wk_DJK": 0.1, "wi_EDF": 0.1, "scale_D": 0.0, "tiny_D": 0.0}
    wanted = [
        {
            name: adamw(x, [g[i][name] for g in gradients], 0.01, decays[name])
            for name, x in layer.items()
        }
        for i, layer in enumerate(layers)
    ]
    assert_same(updated(optimizer, layers, gradients, stacked), wanted)


@pytest.mark.parametrize(
    "optimizer",
    [AdamW(weight_decay=0.1), Adafactor(factored_from=8, momentum=0.9, weight_decay=0.1,
                                        clip_global_norm=2.0)],
    ids=["AdamW", "Adafactor"],
)  # fmt: skip
def test_the_result_does_not_depend_on_how_layers_are_stored(optimizer: Any) -> None:
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 6)]
    wanted = updated(optimizer, layers, gradients, False)
    assert_same(updated(optimizer, layers, gradients, True), wanted)


def test_one_global_norm_clips_all_weights_together() -> None:
    """Halving every gradient changes nothing once the norm is beyond the clip."""
    layers, large = trees(0), trees(1)
    half = [{name: x / 2 for name, x in layer.items()} for layer in large]
    optimizer = AdamW(clip_global_norm=1.0, epsilon=1.0)  # epsilon makes Adam's step see sizes
    assert_same(updated(optimizer, layers, [half], True), updated(optimizer, layers, [large], True))
    free = AdamW(clip_global_norm=None, epsilon=1.0)
    found, other = (updated(free, layers, [g], True)[0]["scale_D"] for g in (half, large))
    assert np.abs(found - other).max() > 1e-7


def test_weight_decay_reads_letters() -> None:
    names = {"embed_VD": True, "bias_RJQ": True, "scale_D": False, "plain": False}
    params = {**dict.fromkeys(names, 0), "layers_N": dict.fromkeys(names, 0)}
    assert is_matrix(params) == {**names, "layers_N": names}
