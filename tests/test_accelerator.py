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

from models.attention.context import packed_context
from models.attention.flash import flash_attention, kernels_of_mesh, missing
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
        pattern=(Block(), Block(feed_forward=dataclasses.replace(EXPERTS, dispatch="dropless"))),
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


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_a_cpu(name: str, meshes: tuple[Mesh, Mesh]) -> None:
    (loss, gradients), (expected_loss, expected) = (gradient(name, mesh) for mesh in meshes)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for path, leaf in jax.tree.leaves_with_path(expected):
        other = functools.reduce(lambda tree, key: tree[key.key], path, gradients)
        assert np.abs(other - leaf).max() <= 1e-4 * scale, jax.tree_util.keystr(path)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "encoder": {"causal": False},
    "window": {"window": 100},
    "cap": {"logit_cap": 2.0},
    "narrow values": {"value_width": 64},
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_kernels_in_bfloat16_attend_as_plain_attention_does(
    name: str, meshes: tuple[Mesh, Mesh]
) -> None:
    """Packed rows, grouped heads: outputs and gradients, compared with float32."""
    case = {"causal": True, "window": None, "logit_cap": None, **ATTENTIONS[name]}
    width, length = case.pop("value_width", 128), 512
    rng = np.random.default_rng(5)
    shapes = (2, 2, 3, length, 128), (2, 2, length, 128), (2, 2, length, width)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    dy = jnp.asarray(rng.normal(size=(*shapes[0][:-1], width)), jnp.bfloat16)
    rows = packed_rows([[100, 212, 90], [length]], length, VOCAB)
    segments_BL = jnp.asarray(rows["segments_BL"])

    def gradients(attend: Any, *arrays: jax.Array) -> Any:
        y, backward = jax.vjp(attend, *arrays)
        return y, *backward(dy.astype(y.dtype))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        context = packed_context(
            WHOLE,
            segments_BL,
            segments_BL,
            causal=case["causal"],
            window=case["window"],
            kernel=None,
        )
        scores = jnp.einsum("bjqlk,bjmk->bjqlm", q, k)
        if case["logit_cap"]:
            scores = case["logit_cap"] * jnp.tanh(scores / case["logit_cap"])
        mask = context.mask_BLM[:, None, None]
        return jnp.einsum("bjqlm,bjmv->bjqlv", jax.nn.softmax(scores, where=mask), v)

    with jax.set_mesh(meshes[0]):
        arrays[0] = arrays[0] * 128**-0.5
        wide = [x.astype(jnp.float32) for x in arrays]
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(functools.partial(gradients, plain))(*wide)
        kernels = [
            kernel
            for kernel in kernels_of_mesh(interpreted=False)
            if kernel.name != "triton" or name in ("causal", "encoder")
            if missing(kernel.name) is None
        ]
        if not kernels:
            pytest.skip("no kernel here computes this attention")
        for kernel in kernels:
            attend = functools.partial(
                flash_attention,
                WHOLE,
                kernel,
                segments_BL=segments_BL,
                segments_BM=segments_BL,
                **case,
            )
            computed = jax.jit(functools.partial(gradients, attend))(*arrays)
            for number, (array, other) in enumerate(zip(computed, expected, strict=True)):
                error = np.linalg.norm(np.asarray(array, np.float32) - np.asarray(other))
                share = error / np.linalg.norm(np.asarray(other))
                assert share < 0.01, (kernel.name, number, share)


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
