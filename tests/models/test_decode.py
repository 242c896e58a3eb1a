"""Decoding: greedy takes the likeliest, sampling follows its seed, no layout changes either."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from configs.load import load
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Params
from models.decode import END, Sampling, sample
from models.transformer import TransformerModel
from tests.models.test_transformer import randomised
from tests.toys import ROOT, SPLITTABLE, WHOLE

LAYOUTS = sorted(path.name for path in (ROOT / "layouts").glob("*.gin"))
NEW = 6
LENGTHS = [5, 0, 3, 5, 1, 2, 4, 5]
PROMPTS = np.random.default_rng(0).integers(2, 64, (8, 5)).astype(np.int32)


@functools.cache
def decoded(layout: Layout, sampling: Sampling, rows: tuple[int, ...] = tuple(range(8))):
    """New tokens and scores of some of the prompts."""
    model = TransformerModel(SPLITTABLE, layout)
    mesh = make_mesh(layout)

    def put(array: np.ndarray, axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, layout.place(axes)))

    chosen = list(rows)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params = jax.tree.map(
            lambda w, s: jax.device_put(w, NamedSharding(mesh, s.sharding.spec)),
            weights(),
            shapes,
        )
        found = sample(
            model,
            sampling,
            NEW,
            params,
            put(PROMPTS[chosen], "Bl"),
            put(np.array(LENGTHS, np.int32)[chosen], "B"),
            put(np.array(chosen, np.uint32), "B"),
        )
    return tuple(map(np.asarray, found))


@functools.cache
def weights() -> Params:
    """Weights under which the next token depends much on the ones before, and END comes up."""
    params = randomised(TransformerModel(SPLITTABLE, WHOLE))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda w: rng.normal(0, 0.5, w.shape).astype(np.float32), params)


GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.5, top_k=20, top_p=0.9)


def test_greedy_takes_the_likeliest_token_after_each_prefix() -> None:
    model = TransformerModel(SPLITTABLE, WHOLE)
    tokens, scores = decoded(WHOLE, GREEDY)
    with jax.set_mesh(make_mesh(WHOLE)):
        for row in (0, 1, 4):
            length = LENGTHS[row]
            inputs = [0, *PROMPTS[row, :length]]
            score = 0.0
            for new in tokens[row]:
                padded = np.zeros((1, 12), np.int32)
                padded[0, : len(inputs)] = inputs
                batch = {
                    "inputs_BL": padded,
                    "positions_BL": np.arange(12, dtype=np.int32)[None],
                    "segments_BL": np.ones((1, 12), np.int32),
                }
                logits = np.asarray(teacher_forced(model, weights(), batch))[0, len(inputs) - 1]
                assert new == logits.argmax()
                score += logits[new] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                inputs.append(new)
                if new == END:
                    break
            np.testing.assert_allclose(scores[row], score, rtol=1e-4)


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(model: TransformerModel, params: Params, batch: dict) -> jax.Array:
    network, x_BLD = model.hidden(params, batch, None)
    return WHOLE.einsum("BLD,VD->BLV", x_BLD, network.output_weights())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_layout_changes_what_is_decoded(name: str, sampling: Sampling) -> None:
    layout = load([f"layouts/{name}"]).make(Layout)
    tokens, scores = decoded(layout, sampling)
    wanted_tokens, wanted_scores = decoded(WHOLE, sampling)
    np.testing.assert_array_equal(tokens, wanted_tokens)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_does_not_depend_on_its_batch(sampling: Sampling) -> None:
    together, _ = decoded(WHOLE, sampling)
    apart, _ = decoded(WHOLE, sampling, rows=(6, 1, 3))
    np.testing.assert_array_equal(apart, together[[6, 1, 3]])


def test_nothing_follows_the_end() -> None:
    tokens, _ = decoded(WHOLE, SAMPLED)
    ended = 0
    for row in tokens:
        places = np.flatnonzero(row == END)
        if len(places):
            ended += 1
            assert not row[places[0] + 1 :].any()
    assert len({tuple(row) for row in tokens}) > 4  # samples differ


def test_top_k_of_one_is_greedy() -> None:
    tokens, _ = decoded(WHOLE, Sampling(temperature=2.0, top_k=1))
    np.testing.assert_array_equal(tokens, decoded(WHOLE, GREEDY)[0])
    tokens, _ = decoded(WHOLE, Sampling(temperature=2.0, top_p=1e-6))
    np.testing.assert_array_equal(tokens, decoded(WHOLE, GREEDY)[0])
