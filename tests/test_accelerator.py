"""A step and a decoded text on an accelerator equal those of a CPU.

Runs where JAX has one: MESHLOOM_TEST_PLATFORMS=cuda,cpu .venv/bin/python -m pytest -n 0 \
tests/test_accelerator.py, which is a part of `make bench-gpu`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from models.attention.multi_head import MultiHead
from models.decoding.beam import Beam
from models.decoding.generate import DecodeInputs, generate
from models.decoding.sampling import Sampling
from models.feed_forward.moe.layer import Moe
from models.loss import Criterion
from models.parts import Block
from models.positions.relative import Relative
from models.transformer import Transformer
from tests.toys import WHOLE, packed_rows

ROWS, LENGTH, VOCAB = 4, 128, 96
MODEL = Transformer(
    vocab=VOCAB, layers=2, d_model=256, d_ff=320, heads=4, kv_heads=2, d_kv=64, length=LENGTH
)
EXPERTS = Moe(experts=4, dispatch="gather")
MODELS = {
    "plain": dataclasses.replace(MODEL, attention=MultiHead(implementation="plain")),
    "flash": MODEL,
    "relative": dataclasses.replace(MODEL, positions=Relative()),
    "dropout": dataclasses.replace(MODEL, dropout=0.2),
    "gather": dataclasses.replace(MODEL, pattern=(Block(), Block(feed_forward=EXPERTS))),
    "dropless": dataclasses.replace(
        MODEL,
        pattern=(
            Block(),
            Block(feed_forward=dataclasses.replace(EXPERTS, dispatch="dropless")),
        ),
    ),
}
SEARCHES = {"beam": Beam(3), "greedy": Sampling(temperature=0.0)}


def mesh_of(device: jax.Device) -> Mesh:
    return Mesh(np.array([device]), ("data",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def meshes() -> tuple[Mesh, Mesh]:
    device = jax.devices()[0]
    if device.platform == "cpu":
        pytest.skip("JAX has no accelerator here")
    return mesh_of(device), mesh_of(jax.devices("cpu")[0])


def batch() -> dict[str, np.ndarray]:
    return packed_rows([[50, 60], [128], [3, 90, 20], [77]], LENGTH, VOCAB)


@functools.cache
def weights(name: str) -> Any:
    model = MODELS[name].model(WHOLE)
    with jax.set_mesh(mesh_of(jax.devices("cpu")[0])):
        return jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(1)))


def gradient(name: str, mesh: Mesh) -> tuple[float, Any]:
    """The loss of each token, and the gradient, with products in full float32."""
    model = MODELS[name].model(WHOLE)

    def loss(params: Any, batch: Any) -> jax.Array:
        sums = model.loss(params, batch, Criterion(), jax.random.key(2))
        return sums.objective / sums.tokens

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        params = jax.device_put(weights(name), jax.NamedSharding(mesh, jax.P()))
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(params, batch()))


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_a_cpu(name: str, meshes: tuple[Mesh, Mesh]) -> None:
    (loss, gradients), (expected_loss, expected) = (gradient(name, mesh) for mesh in meshes)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for path, leaf in jax.tree.leaves_with_path(expected):
        other = functools.reduce(lambda tree, key: tree[key.key], path, gradients)
        assert np.abs(other - leaf).max() <= 1e-4 * scale, jax.tree_util.keystr(path)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["plain", "gather"])
def test_texts_are_those_of_a_cpu(name: str, search: str, meshes: tuple[Mesh, Mesh]) -> None:
    model, new_tokens = MODELS[name].model(WHOLE), 12
    inputs = DecodeInputs(
        prompts_BL=jnp.array([[5, 9, 11], [7, 0, 0]]),
        prompt_lengths_B=jnp.array([3, 1]),
        seeds_B=jnp.zeros(2, jnp.uint32),
        max_new_tokens_B=jnp.full(2, new_tokens),
    )
    outputs = []
    for mesh in meshes:
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            whole = jax.NamedSharding(mesh, jax.P())
            params, placed = jax.device_put((weights(name), inputs), whole)
            output = generate(model, SEARCHES[search], new_tokens, params, placed)
            outputs.append(jax.tree.map(np.asarray, output))
    np.testing.assert_array_equal(outputs[0].tokens_BWT, outputs[1].tokens_BWT)
    np.testing.assert_allclose(
        outputs[0].log_probability_BW, outputs[1].log_probability_BW, rtol=1e-4
    )
