"""Laws of the model: what must hold whatever its weights are."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.api import Batch, Params
from models.attention.context import cross_context, packed_context
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.attention.plain import capped
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2
from models.layers.blocks import Contexts
from models.loss import Criterion, LossSums
from models.norms import RmsNorm
from models.parts import Block, BlockParts
from models.positions.absolute import NoPositions, Sinusoidal
from models.positions.relative import Relative
from models.positions.rotary import Rotary, YarnScaling
from models.precision import Precision
from models.transformer import Transformer, TransformerModel
from tests.toys import WHOLE, on_mesh, packed_rows, pair_rows, toy

Array = jax.Array | np.ndarray
KINDS = {
    "learned": toy(),
    "rotary, gated": toy(positions=Rotary(), feed_forward=Mlp(gated=True, activation="silu")),
    "relative, untied": toy(
        positions=Relative(), tied=False, feed_forward=Mlp(activation="gelu"), kv_heads=1
    ),
    "sinusoidal": toy(positions=Sinusoidal(), kv_heads=None),
    "none": toy(positions=NoPositions()),
}
PAIR_KINDS = {
    "pair, sinusoidal": toy(
        positions=Sinusoidal(), encoder_layers=3, attention=MultiHead(combined_qkv=True)
    ),
    "pair, relative for a stack, two vocabularies": toy(
        positions=Relative(shared=True), encoder_layers=1, source_vocab=26, tied=False
    ),
    "pair, rotary, scaled": toy(
        positions=Rotary(),
        encoder_layers=2,
        attention=MultiHead(query_scale=1.0),
        embed_scale=1.5,
        logit_scale=0.25,
    ),
}
# With room for every token, as decoding has it.
EXPERTS = Moe(experts=5, router=Top2(evaluation_capacity_factor=9.0))
EXPERT_KINDS = {
    "experts": toy(positions=Rotary(), pattern=(Block(), Block(feed_forward=EXPERTS))),
    "pair, experts": toy(positions=Sinusoidal(), encoder_layers=1, feed_forward=EXPERTS),
}
# What decoders of Hugging Face have beside.
WINDOW = 3
IMPORTED_KINDS = {
    "window, norms, biases": toy(
        positions=Rotary(theta=100.0, scaling=YarnScaling(factor=2.0, original_length=8)),
        attention=MultiHead(window=WINDOW, qk_norm=True, biases="all"),
        norm=RmsNorm(offset=True),
    ),
    "a window and no positions in turn, bounded logits": toy(
        positions=Rotary(), attention=MultiHead(logit_cap=1.5),
        pattern=(Block(attention=MultiHead(window=WINDOW)), Block(positions=NoPositions())),
    ),
    "latent, with and without latent queries": toy(
        positions=Rotary(), attention=Latent(latent=5, rotated=2),
        pattern=(
            Block(),
            Block(attention=Latent(latent=7, rotated=6, query_latent=9, window=3, logit_cap=1.5)),
        ),
    ),
    "norms after and around, bounded logits of tokens": toy(
        positions=Rotary(), norm=RmsNorm(offset=True), logit_cap=2.0,
        attention=MultiHead(qk_norm=True, qk_norm_over="heads"),
        pattern=(Block(norm_places="after", residual_scale=0.3), Block(norm_places="both")),
    ),
}  # fmt: skip
PLAIN = Criterion()
ONE_ROW = packed_rows([[3, 4]], 8, 22)
ROWS = packed_rows([[3, 5], [8], [2, 2, 2], [1, 6]], 8, 22)
PAIR_ROWS = pair_rows([[3, 5], [8], [2, 2, 2], [1, 6]], [[4, 2], [6], [1, 3, 1], [6, 1]], 8, 22)


@functools.cache
def shapes_of(model: TransformerModel) -> Params:
    return jax.eval_shape(model.init, jax.random.key(0))


def randomised(model: TransformerModel) -> Params:
    """Weights with nothing left at its initial zero or one, where a law might hold by accident."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: rng.normal(0.3, 0.3, w.shape).astype(np.float32), shapes_of(model)
    )


# Each program is traced and compiled once, however many batches of one shape it gets.


@functools.cache
def token_losses_of(spec: Transformer) -> Callable[..., Any]:
    return jax.jit(TransformerModel(spec, WHOLE).token_losses)


@functools.cache
def gradient_of(spec: Transformer, criterion: Criterion) -> Callable[..., tuple[Params, LossSums]]:
    model = TransformerModel(spec, WHOLE)

    def objective(params: Params, batch: Batch) -> tuple[jax.Array, LossSums]:
        sums = model.loss(params, batch, criterion, jax.random.key(3))
        return sums.objective, sums

    return jax.jit(jax.grad(objective, has_aux=True))


def losses(spec: Transformer, batch: Batch) -> np.ndarray:
    """Each token's loss."""
    mesh, placed = on_mesh(WHOLE, batch)
    with jax.set_mesh(mesh):
        params = randomised(TransformerModel(spec, WHOLE))
        return np.asarray(token_losses_of(spec)(params, placed).loss_BL)


def sums_and_gradients(
    spec: Transformer, batch: Batch, criterion: Criterion = PLAIN
) -> tuple[LossSums, Params]:
    mesh, placed = on_mesh(WHOLE, batch)
    with jax.set_mesh(mesh):
        params = randomised(TransformerModel(spec, WHOLE))
        gradients, sums = gradient_of(spec, criterion)(params, placed)
    return sums, gradients


def assert_close(computed, expected, tolerance: float = 2e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        computed,
        expected,
    )


@pytest.mark.parametrize(("embed_scale", "factor"), [(None, 4.0), (1.0, 1.0)])
def test_embeddings_have_their_scale(embed_scale: float | None, factor: float) -> None:
    spec = toy(d_model=16, embed_scale=embed_scale, positions=NoPositions())
    model = TransformerModel(spec, WHOLE)
    mesh, batch = on_mesh(WHOLE, ROWS)
    with jax.set_mesh(mesh):
        network = model.network(jax.tree.map(jnp.asarray, randomised(model)))
        table_VD = network.embed_VD[...]
        x_BLD = network.embed(batch["inputs_BL"], batch["positions_BL"])
    np.testing.assert_allclose(x_BLD, factor * np.asarray(table_VD)[ROWS["inputs_BL"]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_its_segment_up_to_itself_and_nothing_else(kind: str) -> None:
    """Causality by gradient: of three criteria, past of the segment yes, future no, others no."""
    model = TransformerModel(KINDS[kind], WHOLE)
    mesh, batch = on_mesh(WHOLE, ONE_ROW)
    with jax.set_mesh(mesh):
        params = randomised(model)

        def output(x_BLD: jax.Array, params: dict, place: jax.Array) -> jax.Array:
            view = packed_context(WHOLE, batch["positions_BL"], batch["segments_BL"])
            y_BLD = model.network(params).decoder(x_BLD, lambda _: Contexts(view))[0]
            return jnp.sum(jnp.where(jnp.arange(8)[:, None] == place, y_BLD[0] ** 2, 0))

        gradient = jax.jit(jax.grad(output))
        x_BLD = jax.random.normal(jax.random.key(2), (1, 8, 10))
        for place in range(7):
            gradient_BLD = gradient(x_BLD, params, place)
            visible = np.flatnonzero(np.abs(gradient_BLD[0]).sum(-1))
            first = 0 if place < 3 else 3
            assert list(visible) == list(range(first, place + 1))


def test_a_token_sees_a_window_of_each_layer_and_any_scale_of_its_query() -> None:
    """A loss depends on the inputs of one window for each layer; and on no norm of queries."""
    spec = IMPORTED_KINDS["window, norms, biases"]
    model = TransformerModel(spec, WHOLE)
    mesh, batch = on_mesh(WHOLE, packed_rows([[8]], 8, 22))
    with jax.set_mesh(mesh):
        params = randomised(model)
        attention = params["decoder"]["layers_N"]["attention"]
        attention["bq_JQK"] = 0 * attention["bq_JQK"]

        def outputs(x_BLD: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
            network = model.network(params)
            view = packed_context(
                WHOLE, batch["positions_BL"], batch["segments_BL"], window=spec.attention.window
            )
            y_BLD = network.decoder(x_BLD, lambda _: Contexts(view))[0]
            return jnp.sum(y_BLD[0, 7] ** 2), y_BLD

        gradient = jax.jit(jax.grad(outputs, has_aux=True))
        x_BLD = jax.random.normal(jax.random.key(2), (1, 8, 10))
        gradient_BLD, y_BLD = gradient(x_BLD, params)
        visible = np.flatnonzero(np.abs(gradient_BLD[0]).sum(-1))
        assert list(visible) == list(range(7 - spec.layers * (WINDOW - 1), 8))

        attention["wq_DJQK"] = 1000 * attention["wq_DJQK"]
        assert_close(gradient(x_BLD, params)[1], y_BLD, 1e-3)
        attention["q_norm"]["scale_K"] = 5 + attention["q_norm"]["scale_K"]
        assert np.abs(gradient(x_BLD, params)[1] - y_BLD).max() > 0.1


@pytest.mark.parametrize(("windows", "first"), [((3, None), 0), ((3, 2), 4), ((2, 2), 5)])
def test_each_block_of_a_pattern_has_its_own_window(
    windows: tuple[int | None, ...], first: int
) -> None:
    """The last token of eight sees the inputs that the windows of both blocks reach."""
    pattern = tuple(Block(attention=MultiHead(window=window)) for window in windows)
    model = toy(pattern=pattern, positions=NoPositions()).model(WHOLE)
    mesh, batch = on_mesh(WHOLE, packed_rows([[8]], 8, 22))
    with jax.set_mesh(mesh):
        params = randomised(model)

        @jax.jit
        def last_output(x_BLD: jax.Array) -> jax.Array:
            network = model.network(params)

            def contexts(block: BlockParts) -> Contexts:
                row = network.row_context(
                    block, batch["positions_BL"], batch["segments_BL"], drop_tokens=False,
                    training=False,
                )  # fmt: skip
                return Contexts(row)

            return jnp.sum(network.decoder(x_BLD, contexts)[0][0, 7] ** 2)

        x_BLD = jax.random.normal(jax.random.key(2), (1, 8, 10))
        gradient_BLD = jax.grad(last_output)(x_BLD)
    assert np.flatnonzero(np.abs(gradient_BLD[0]).sum(-1))[0] == first


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


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_packed_pairs_have_the_losses_they_have_alone(kind: str) -> None:
    sizes = {"M": (4, 2), "L": (3, 5)}
    packed = losses(PAIR_KINDS[kind], {name: array[:1] for name, array in PAIR_ROWS.items()})
    for segment in (1, 2):
        alone = {}
        for name, array in PAIR_ROWS.items():
            size, start = sizes[name[-1]][segment - 1], sum(sizes[name[-1]][: segment - 1])
            alone[name] = np.zeros_like(array[:1])
            alone[name][0, :size] = array[0, start : start + size]
            if name.startswith("segments"):
                alone[name][0, :size] = 1
        start = sum(sizes["L"][: segment - 1])
        size = sizes["L"][segment - 1]
        assert_close(losses(PAIR_KINDS[kind], alone)[0, :size], packed[0, start : start + size])


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_a_target_sees_the_whole_source_of_its_segment_and_no_other(kind: str) -> None:
    model = TransformerModel(PAIR_KINDS[kind], WHOLE)
    mesh, batch = on_mesh(WHOLE, {name: array[:1] for name, array in PAIR_ROWS.items()})
    with jax.set_mesh(mesh):
        network = model.network(jax.tree.map(jnp.asarray, randomised(model)))

        @jax.jit
        @jax.grad
        def gradient(memory_BMD: jax.Array, place: jax.Array) -> jax.Array:
            source = cross_context(WHOLE, batch["segments_BL"], batch["segments_BM"], memory_BMD)
            view = packed_context(WHOLE, batch["positions_BL"], batch["segments_BL"])
            x_BLD = jax.random.normal(jax.random.key(1), (1, 8, 10))
            y_BLD = network.decoder(x_BLD, lambda _: Contexts(view, source))
            return jnp.sum(jnp.where(jnp.arange(8)[:, None] == place, y_BLD[0] ** 2, 0))

        memory_BMD = jax.random.normal(jax.random.key(2), (1, 6, 10))
        for place in range(8):
            visible = np.flatnonzero(np.abs(gradient(memory_BMD, place)[0]).sum(-1))
            assert list(visible) == ([0, 1, 2, 3] if place < 3 else [4, 5])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change",
    [
        {"scan": True},
        {"scan": True, "remat": "dots"},
        {"remat": "full", "remat_saves": ("query_proj", "value_proj", "context", "mlpwi")},
        {"remat": "full", "remat_offloads": ("layer_input", "out_proj", "mlpwi")},
        {"loss_chunks": 4},
        {"attention": MultiHead(dropout=0.3, combined_qkv=True)},
    ],
    ids=str,
)
def test_ways_to_compute_give_the_same_loss_and_gradients(change: dict) -> None:
    plain = toy(
        dropout=0.2,
        attention=MultiHead(dropout=0.3),
        positions=Relative(),
        tied=False,
        encoder_layers=2,
    )
    criterion = Criterion(label_smoothing=0.1, z_loss=1e-2)
    expected = sums_and_gradients(plain, PAIR_ROWS, criterion)
    computed = sums_and_gradients(dataclasses.replace(plain, **change), PAIR_ROWS, criterion)
    assert_close(computed, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_out_what_causality_masks_changes_nothing(kind: str) -> None:
    changed = dataclasses.replace(KINDS[kind], attention=MultiHead(chunks=3))
    assert_close(sums_and_gradients(changed, ROWS), sums_and_gradients(KINDS[kind], ROWS))


def test_dropout_changes_the_loss_and_only_with_a_key() -> None:
    plain, _ = sums_and_gradients(toy(), ROWS)
    dropped, _ = sums_and_gradients(toy(dropout=0.2), ROWS)
    assert abs(float(plain.loss - dropped.loss)) > 1e-2
    np.testing.assert_array_equal(losses(toy(dropout=0.2), ROWS), losses(toy(), ROWS))


def test_r_drop_adds_the_divergence_of_two_passes_to_the_mean_of_both() -> None:
    spec = dataclasses.replace(EXPERT_KINDS["pair, experts"], dropout=0.2, loss_chunks=2)
    batch = PAIR_ROWS
    together, _ = sums_and_gradients(spec, batch, Criterion(r_drop=3.0, label_smoothing=0.1))
    model = TransformerModel(spec, WHOLE)
    mesh, placed = on_mesh(WHOLE, batch)

    def one_pass(params: Params, key: jax.Array) -> tuple[LossSums, jax.Array]:
        network = model.network(params)
        logits_BLV = network(placed, key)[0] @ network.output_weights().T
        sums = model.loss(params, placed, Criterion(label_smoothing=0.1), key)
        return sums, jax.nn.log_softmax(logits_BLV)

    with jax.set_mesh(mesh):
        params, compute = randomised(model), jax.jit(one_pass)
        passes = [compute(params, key) for key in jax.random.split(jax.random.key(3))]
    (sums, first_BLV), (other_sums, second_BLV) = jax.tree.map(np.asarray, passes)
    mean = jax.tree.map(lambda one, other: (one + other) / 2, sums, other_sums)
    counted_BL = batch["segments_BL"] > 0
    apart_BL = sum(
        (np.exp(one_BLV) * (one_BLV - other_BLV)).sum(-1)
        for one_BLV, other_BLV in ((first_BLV, second_BLV), (second_BLV, first_BLV))
    )
    apart = apart_BL[counted_BL].sum() / 2
    assert apart > 0.1
    assert_close(together, mean._replace(objective=mean.objective + 3.0 / 2 * apart))


def test_a_mask_leaves_targets_out_of_the_loss_and_changes_no_other() -> None:
    mask_BL = np.zeros_like(ROWS["segments_BL"])
    mask_BL[:, 1::2] = 1
    masked = {**ROWS, "loss_mask_BL": mask_BL}
    counted = (mask_BL > 0) & (ROWS["segments_BL"] > 0)
    sums, gradients = sums_and_gradients(toy(), masked)
    masked_losses = losses(toy(), masked)
    assert np.all((masked_losses > 0) == counted)
    np.testing.assert_allclose(float(sums.loss), masked_losses.sum(), rtol=1e-5)
    assert float(sums.tokens) == counted.sum()
    other = np.where(counted, ROWS["targets_BL"], 1)
    _, same = sums_and_gradients(toy(), {**masked, "targets_BL": other})
    assert_close(same, gradients, 0)


def test_losses_and_their_sum_have_bounded_logits() -> None:
    spec = IMPORTED_KINDS["norms after and around, bounded logits of tokens"]
    unbounded = losses(dataclasses.replace(spec, logit_cap=None), ROWS)
    sums, gradients = sums_and_gradients(spec, ROWS)
    computed = losses(spec, ROWS)
    np.testing.assert_allclose(float(sums.loss), computed.sum(), rtol=1e-5)
    assert np.ptp(computed[ROWS["segments_BL"] > 0]) > 0.1
    assert abs(computed.sum() - unbounded.sum()) > 1
    assert all(np.any(gradient) for gradient in jax.tree.leaves(gradients))


def test_sums_count_each_target_once() -> None:
    sums, _ = sums_and_gradients(toy(), ROWS)
    assert float(sums.tokens) == (ROWS["segments_BL"] > 0).sum()
    np.testing.assert_allclose(float(sums.loss), losses(toy(), ROWS).sum(), rtol=1e-5)


@pytest.mark.few(6)
@pytest.mark.parametrize("scan", [False, True], ids=["layers in a row", "scan"])
@pytest.mark.parametrize("kind", [*KINDS, *PAIR_KINDS, *EXPERT_KINDS, *IMPORTED_KINDS])
def test_cached_decoding_gives_the_logits_of_teacher_forcing(kind: str, scan: bool) -> None:
    """Token by token from an empty cache, and a prompt at once and then token by token."""
    spec = dataclasses.replace(
        (KINDS | PAIR_KINDS | EXPERT_KINDS | IMPORTED_KINDS)[kind], scan=scan
    )
    model = TransformerModel(spec, WHOLE)
    batch = pair_rows([[3, 5], [8], [2, 2, 2], [1, 6]], [[6], [2], [4], [6]], 8, 22)
    tokens = np.random.default_rng(0).integers(0, 22, (4, 8)).astype(np.int32)
    places = np.tile(np.arange(8, dtype=np.int32), (4, 1))
    batch |= {"inputs_BL": tokens, "positions_BL": places, "segments_BL": np.ones_like(tokens)}
    mesh, placed = on_mesh(WHOLE, batch)
    source = placed if spec.has_encoder else None
    visible = np.tril(np.ones((8, 8), bool))[None].repeat(4, axis=0)

    def teacher_forced(params: Params, batch: Batch) -> jax.Array:
        network = model.network(params)
        x_BLD = network(batch)[0] * spec.logit_scale
        logits_BLV = WHOLE.einsum("BLD,VD->BLV", x_BLD, network.output_weights())
        return capped(logits_BLV, spec.logit_cap)

    @jax.jit
    def empty(params: Params, source: Batch | None) -> Any:
        return model.init_cache(model.prepare(params, for_one_call=True), source, 4, 8)

    @jax.jit
    def part(
        params: Params, cache: Any, tokens: Array, places: Array, visible: Array
    ) -> tuple[Any, Array]:
        prepared = model.prepare(params, for_one_call=True)
        return model.step(prepared, cache, tokens, places, visible, places[0, 0])

    with jax.set_mesh(mesh):
        params = randomised(model)
        expected_BLV = jax.jit(teacher_forced)(params, placed)
        for prompt in (1, 5):
            cache = empty(params, source)
            for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, 8))]:
                here = (slice(None), slice(start, stop))
                cache, logits_BLV = part(params, cache, tokens[here], places[here], visible[here])
                assert_close(logits_BLV, expected_BLV[here], 1e-4)


def test_bfloat16_computes_near_float32() -> None:
    exact = losses(toy(), ROWS)
    rough = losses(toy(precision=Precision(compute="bfloat16")), ROWS)
    assert rough.dtype == np.float32
    assert 1e-5 < np.abs(exact - rough).max() < 0.3
