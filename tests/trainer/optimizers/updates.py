"""Weights, gradients and updates that the tests of optimizers share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from layouts.axes import alphabet, axes_of_path
from layouts.layout import Layout
from models.api import STACKS, WeightInfo
from models.attention.bias import BUCKETS
from tests.toys import ROUND_OFF

STEPS, LAYERS = 30, 3


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


def transform_of(optimizer: Any, params: Any) -> optax.GradientTransformation:
    """The update of such weights, of which matrices sum over the axes but the last."""
    by_letter, infos = alphabet((BUCKETS,)).by_letter, {}
    for path, weight in traverse_util.flatten_dict(params, sep="/").items():
        axes = tuple(by_letter[letter].name for letter in axes_of_path(path))
        matrix = [name for name in axes if name not in STACKS]
        infos[path] = WeightInfo(weight.shape, axes, tuple(matrix[:-1]))
    return optimizer.transform(STEPS, infos, Layout())


@jax.enable_x64(True)
def updated(
    optimizer: Any, layers: list[dict[str, np.ndarray]], gradients: list[Any], stacked: bool
) -> list[dict[str, np.ndarray]]:
    """The weights after these gradients, by layer, where layers are stacked or kept apart."""

    def tree(layers: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        if stacked:
            joined = {name: np.stack([layer[name] for layer in layers]) for name in SHAPES}
            result: dict[str, Any] = {"layers_N": joined}
        else:
            result = {f"layer{i}": layer for i, layer in enumerate(layers)}
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), result)

    transform = transform_of(optimizer, tree(layers))

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


def assert_same(result: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> None:
    for layer, (weights, references) in enumerate(zip(result, expected, strict=True)):
        for name, reference in references.items():
            scale = np.abs(reference).max()
            np.testing.assert_allclose(
                weights[name] / scale, reference / scale, rtol=0, atol=ROUND_OFF,
                err_msg=f"{name} of layer {layer}",
            )  # fmt: skip
