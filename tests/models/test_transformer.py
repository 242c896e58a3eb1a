"""Laws of the model: what must hold whatever its weights are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.api import Batch, Params
from models.attention import packed_view
from models.loss import Criterion, Sums
from models.spec import Transformer
from models.transformer import TransformerModel
from models.weights import Precision
from tests.toys import WHOLE, on_mesh, packed_rows, toy

KINDS = {
    "learned": toy(),
    "rotary, gated": toy(positions="rotary", gated=True, activation="silu"),
    "relative, untied": toy(positions="relative", tied=False, activation="gelu", kv_heads=1),
    "sinusoidal": toy(positions="sinusoidal", kv_heads=None),
}
PLAIN = Criterion()
ONE_ROW = packed_rows([[3, 4]], 8, 22)
ROWS = packed_rows([[3, 5], [8], [2, 2, 2], [1, 6]], 8, 22)


def randomised(model: TransformerModel) -> Params:
    """Weights with nothing left at its initial zero or one, where a law might hold by accident."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda w: rng.normal(0.3, 0.3, w.shape).astype(np.float32), shapes)


def losses(spec: Transformer, batch: Batch) -> np.ndarray:
    """Each token's loss."""
    model = TransformerModel(spec, WHOLE)
    mesh, placed = on_mesh(WHOLE, batch)
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(model.token_losses)(randomised(model), placed))


def sums_and_gradients(
    spec: Transformer, batch: Batch, criterion: Criterion = PLAIN
) -> tuple[Sums, Params]:
    model = TransformerModel(spec, WHOLE)
    mesh, placed = on_mesh(WHOLE, batch)

    def objective(params: Params, batch: Batch) -> tuple[jax.Array, Sums]:
        sums = model.loss(params, batch, criterion, jax.random.key(3))
        return sums.objective, sums

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(objective, has_aux=True))
        gradients, sums = gradient(randomised(model), placed)
    return sums, gradients


def assert_close(found, wanted, tolerance: float = 2e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, wanted
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_its_segment_up_to_itself_and_nothing_else(kind: str) -> None:
    """Causality by gradient: of three criteria, past of the segment yes, future no, others no."""
    model = TransformerModel(KINDS[kind], WHOLE)
    mesh, batch = on_mesh(WHOLE, ONE_ROW)
    with jax.set_mesh(mesh):
        params = randomised(model)

        def output(x_BLD: jax.Array, params: dict, place: jax.Array) -> jax.Array:
            view = packed_view(WHOLE, batch["positions_BL"], batch["segments_BL"])
            y_BLD, _ = model.network(params).decoder(x_BLD, view)
            return jnp.sum(jnp.where(jnp.arange(8)[:, None] == place, y_BLD[0] ** 2, 0))

        gradient = jax.jit(jax.grad(output))
        x_BLD = jax.random.normal(jax.random.key(2), (1, 8, 10))
        for place in range(7):
            gradient_BLD = gradient(x_BLD, params, place)
            seen = np.flatnonzero(np.abs(gradient_BLD[0]).sum(-1))
            first = 0 if place < 3 else 3
            assert list(seen) == list(range(first, place + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_segments_have_the_losses_they_have_alone(kind: str) -> None:
    packed = losses(KINDS[kind], ONE_ROW)
    start = 0
    for size in (3, 4):
        alone = {name: np.zeros_like(array) for name, array in ONE_ROW.items()}
        for name in alone:
            alone[name][0, :size] = ONE_ROW[name][0, start : start + size]
        alone["segments_BL"][0, :size] = 1
        assert_close(losses(KINDS[kind], alone)[0, :size], packed[0, start : start + size])
        start += size


@pytest.mark.parametrize(
    "change",
    [
        {"scan": True},
        {"remat": "full"},
        {"scan": True, "remat": "dots"},
        {"loss_chunks": 4},
        {"combined_qkv": True},
    ],
    ids=str,
)
def test_ways_to_compute_give_the_same_loss_and_gradients(change: dict) -> None:
    plain = toy(dropout=0.2, attention_dropout=0.3, positions="relative", tied=False)
    criterion = Criterion(label_smoothing=0.1, z_loss=1e-2)
    wanted = sums_and_gradients(plain, ROWS, criterion)
    found = sums_and_gradients(dataclasses.replace(plain, **change), ROWS, criterion)
    assert_close(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_out_what_causality_masks_changes_nothing(kind: str) -> None:
    changed = dataclasses.replace(KINDS[kind], attention_chunks=3)
    assert_close(sums_and_gradients(changed, ROWS), sums_and_gradients(KINDS[kind], ROWS))


def test_dropout_changes_the_loss_and_only_with_a_key() -> None:
    plain, _ = sums_and_gradients(toy(), ROWS)
    dropped, _ = sums_and_gradients(toy(dropout=0.2), ROWS)
    assert abs(float(plain.loss - dropped.loss)) > 1e-2
    np.testing.assert_array_equal(losses(toy(dropout=0.2), ROWS), losses(toy(), ROWS))


def test_sums_count_each_target_once() -> None:
    sums, _ = sums_and_gradients(toy(), ROWS)
    assert float(sums.tokens) == (ROWS["segments_BL"] > 0).sum()
    np.testing.assert_allclose(float(sums.loss), losses(toy(), ROWS).sum(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_gives_the_logits_of_teacher_forcing(kind: str) -> None:
    """Token by token from an empty cache, and a prompt at once and then token by token."""
    model = TransformerModel(KINDS[kind], WHOLE)
    rows, length = 4, 8
    tokens = np.random.default_rng(0).integers(0, 22, (rows, length)).astype(np.int32)
    places = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    batch = {"inputs_BL": tokens, "positions_BL": places, "segments_BL": np.ones_like(tokens)}
    mesh, placed = on_mesh(WHOLE, batch)

    def teacher_forced(params: Params, batch: Batch) -> jax.Array:
        network, x_BLD = model.hidden(params, batch, None)
        return WHOLE.einsum("BLD,VD->BLV", x_BLD, network.output_weights())

    with jax.set_mesh(mesh):
        params = randomised(model)
        wanted_BLV = jax.jit(teacher_forced)(params, placed)
        step = jax.jit(model.step)
        for prompt in (1, 5):
            cache = model.start(params, rows, length)
            cache, logits_BLV = step(params, cache, tokens[:, :prompt], places[:, :prompt])
            assert_close(logits_BLV, wanted_BLV[:, :prompt], 1e-4)
            for place in range(prompt, length):
                here = (slice(None), slice(place, place + 1))
                cache, logits_BLV = step(params, cache, tokens[here], places[here])
                assert_close(logits_BLV, wanted_BLV[here], 1e-4)


def test_bfloat16_computes_near_float32() -> None:
    exact = losses(toy(), ROWS)
    rough = losses(toy(precision=Precision(compute="bfloat16")), ROWS)
    assert rough.dtype == np.float32
    assert 1e-5 < np.abs(exact - rough).max() < 0.3
