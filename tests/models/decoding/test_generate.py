"""Decoding: each search finds what it should, and no layout and no neighbour changes it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from configs.load import load
from layouts.axes import letters_of
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Batch, Params
from models.decoding.beam import Beam
from models.decoding.generate import BEGIN, END, DecodeInputs, DecodeOutput, Search, generate
from models.decoding.sampling import Sampling
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2
from models.parts import Block
from models.positions.absolute import Sinusoidal
from models.positions.relative import Relative
from models.transformer import Transformer, TransformerModel
from tests.models.test_transformer import randomised
from tests.toys import ROOT, SPLITTABLE, WHOLE, packed_rows

LAYOUTS = sorted(path.stem for path in (ROOT / "layouts").glob("*.gin") if path.stem != "whole")
NEW = 6
LENGTHS = [5, 0, 3, 5, 1, 2, 4, 5]
PROMPTS = np.random.default_rng(0).integers(2, 64, (8, 5)).astype(np.int32)
SOURCES = packed_rows([[7], [8], [3], [5], [2], [8], [6], [1]], 8, 64, seed=1)
DECODER = dataclasses.replace(SPLITTABLE, layers=2)
PAIR = dataclasses.replace(DECODER, encoder_layers=2, layers=1, positions=Relative())
TIGHT = Moe(experts=16, d_ff=24, router=Top2(evaluation_capacity_factor=0.1, least_capacity=1))
PATTERN = (Block(), Block(feed_forward=TIGHT))
EXPERTS = dataclasses.replace(DECODER, first_blocks=PATTERN[:1], pattern=PATTERN[1:])
ENCODER_EXPERTS = dataclasses.replace(PAIR, encoder_pattern=PATTERN)
NO_PROMPT = dataclasses.replace(
    PAIR, layers=3, first_blocks=(Block(norm_places="both"),), positions=Sinusoidal(), scan=True
)
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.5, top_k=20, top_p=0.9, width=2)
BEAM = Beam(width=3)
APART = Beam(width=3, flat=False)
SUFFIX = (7, 40, 12)  # another length than of any prompt or text
SEARCHES = {"greedy": GREEDY, "sampled": SAMPLED, "flat beam": BEAM, "beam": APART}
SEARCHED = [
    ("decoder", "greedy"), ("decoder", "sampled"), ("pair", "flat beam"),
    ("pair without prompts, scan", "beam"),
]  # fmt: skip
SEARCHED_WITH_EXPERTS = [("experts", "sampled"), ("experts", "flat beam")]
SEARCHED_IN_STAGES = [("decoder", "greedy")]  # one and three layers do not divide over two stages
MODELS = {"decoder": DECODER, "pair": PAIR, "pair without prompts, scan": NO_PROMPT}


@functools.cache
def decoded(
    spec: Transformer,
    search: Search,
    layout: Layout = WHOLE,
    rows: tuple[int, ...] = tuple(range(8)),
    min_new_tokens: int | None = None,
    max_new_tokens: tuple[int, ...] = (NEW,) * 8,
    ids: tuple[int, int] = (BEGIN, END),
    more_stops: tuple[int, ...] = (),
    suffix: tuple[int, ...] = (),
    change: Callable[[TransformerModel, Params], Params] | None = None,
) -> DecodeOutput:
    """What some of the rows get; with other ids, of a model whose vocabulary is in that order."""
    model = TransformerModel(spec, layout)
    mesh = make_mesh(layout)
    chosen = list(rows)
    prompts = PROMPTS[:, :0] if spec is NO_PROMPT else swapped(PROMPTS, ids)
    lengths = np.minimum(np.array(LENGTHS, np.int32), prompts.shape[1])

    def put(array: np.ndarray, axes: str, *, rows: bool = True) -> jax.Array:
        array = array[chosen] if rows else array
        return jax.device_put(array, NamedSharding(mesh, layout.place(axes)))

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params = jax.tree.map(
            lambda w, s: jax.device_put(w, NamedSharding(mesh, s.sharding.spec)),
            reordered(weights(spec), ids),
            shapes,
        )
        if change is not None:
            params = jax.jit(change, static_argnums=0)(model, params)
        inputs = DecodeInputs(
            prompts_BL=put(prompts, "Bl"),
            prompt_lengths_B=put(lengths, "B"),
            seeds_B=put(np.arange(8, dtype=np.uint32), "B"),
            max_new_tokens_B=put(np.array(max_new_tokens, np.int32), "B"),
            min_new_tokens_B=None
            if min_new_tokens is None
            else put(np.full(8, min_new_tokens, np.int32), "B"),
            suffix_L=put(np.array(suffix, np.int32), "l", rows=False) if suffix else None,
            source={name: put(array, letters_of(name)) for name, array in sources(ids).items()}
            if spec.has_encoder
            else None,
            begin_id=ids[0],
            stop_ids=(ids[1], *more_stops),
        )
        output = generate(model, search, NEW, params, inputs)
    return DecodeOutput(*map(np.asarray, output))


def swapped(tokens: np.ndarray, ids: tuple[int, int]) -> np.ndarray:
    """The same tokens, where the ids of beginning and end and these have changed places."""
    order = np.arange(64, dtype=np.int32)
    order[[*ids, BEGIN, END]] = order[[BEGIN, END, *ids]]
    return order[tokens]


def reordered(params: Params, ids: tuple[int, int]) -> Params:
    return {**params, "embed_VD": params["embed_VD"][swapped(np.arange(64), ids)]}


def sources(ids: tuple[int, int] = (BEGIN, END)) -> Batch:
    return {
        "inputs_BM": swapped(SOURCES["targets_BL"], ids),
        "segments_BM": SOURCES["segments_BL"],
        "positions_BM": SOURCES["positions_BL"],
    }


@functools.cache
def weights(spec: Transformer) -> Params:
    """Weights under which the next token depends much on the ones before, and END comes up."""
    params = randomised(TransformerModel(spec, WHOLE))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda w: rng.normal(0, 0.5, w.shape).astype(np.float32), params)
    params["embed_VD"][END] *= 1.5  # its logit is often the largest or the smallest
    return params


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(model: TransformerModel, params: Params, batch: Batch) -> jax.Array:
    """Log-probabilities of every next token."""
    network = model.network(params)
    logits_BLV = WHOLE.einsum("BLD,VD->BLV", network(batch)[0], network.output_weights())
    return jax.nn.log_softmax(logits_BLV)


def gains(spec: Transformer, row: int, texts: list[list[int]]) -> np.ndarray:
    """Log-probabilities of every token after the row's prompt and each of some texts."""
    model = TransformerModel(spec, WHOLE)
    prompt = [] if spec is NO_PROMPT else [*PROMPTS[row, : LENGTHS[row]]]
    padded = np.zeros((len(texts), 16), np.int32)
    for place, text in enumerate(texts):
        inputs = [0, *prompt, *text]
        padded[place, : len(inputs)] = inputs
    batch = {name: np.repeat(array[[row]], len(texts), 0) for name, array in sources().items()}
    batch |= {
        "inputs_BL": padded,
        "positions_BL": np.tile(np.arange(16, dtype=np.int32), (len(texts), 1)),
        "segments_BL": np.ones_like(padded),
    }
    with jax.set_mesh(make_mesh(WHOLE)):
        params = jax.tree.map(jnp.asarray, weights(spec))
        return np.asarray(teacher_forced(model, params, batch))[:, len(prompt) :]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_takes_the_likeliest_token_after_each_prefix(kind: str) -> None:
    spec = MODELS[kind]
    output = decoded(spec, GREEDY)
    for row in (0, 1, 4):
        tokens = [*output.tokens_BWT[row, 0]]
        gain = gains(spec, row, [tokens])[0]
        score = 0.0
        for place, token in enumerate(tokens):
            assert token == gain[place].argmax()
            score += gain[place, token]
            if token == END:
                break
        np.testing.assert_allclose(output.log_probability_BW[row, 0], score, rtol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_a_score_is_the_log_probability_under_teacher_forcing(kind: str) -> None:
    spec = MODELS[kind]
    output = decoded(spec, BEAM)
    for row in (0, 2, 5):
        texts = output.tokens_BWT[row].tolist()
        for gain, text, score, log_p in zip(
            gains(spec, row, texts), texts, output.score_BW[row], output.log_probability_BW[row],
            strict=True,
        ):  # fmt: skip
            length = text.index(END) + 1 if END in text else NEW
            total = sum(gain[place, token] for place, token in enumerate(text[:length]))
            np.testing.assert_allclose(log_p, total, rtol=1e-4)
            np.testing.assert_allclose(score, total / ((5 + length) / 6) ** 0.6, rtol=1e-4)
        assert sorted(output.score_BW[row], reverse=True) == [*output.score_BW[row]]


@pytest.mark.parametrize("search", ["greedy", "sampled", "flat beam"])
def test_a_minimum_of_tokens_changes_no_log_probability(search: str) -> None:
    """END may not come early, and yet the model gives it the probability that it has."""
    output = decoded(PAIR, SEARCHES[search], min_new_tokens=5)
    for row in (0, 2, 5):
        texts = output.tokens_BWT[row].tolist()
        for gain, text, log_p in zip(
            gains(PAIR, row, texts), texts, output.log_probability_BW[row], strict=True
        ):
            assert END not in text[:4]
            length = text.index(END) + 1 if END in text else NEW
            total = sum(gain[place, token] for place, token in enumerate(text[:length]))
            np.testing.assert_allclose(log_p, total, rtol=1e-4)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_token_losses_of_experts_are_those_of_decoding(kind: str) -> None:
    """Texts of all rows packed into one, where the experts have room for few of the tokens."""
    spec = EXPERTS if kind == "decoder" else ENCODER_EXPERTS
    output, rows = decoded(spec, BEAM), (0, 2, 5)
    texts = [
        [int(token) for token in (*PROMPTS[row, : LENGTHS[row]], *output.tokens_BWT[row, 0])]
        for row in rows
    ]
    lengths = list(map(len, texts))
    batch = packed_rows([lengths], 40, 64)
    batch["targets_BL"][0, : sum(lengths)] = [token for text in texts for token in text]
    starts = np.cumsum([0, *lengths[:-1]])
    batch["inputs_BL"][0] = np.roll(batch["targets_BL"][0], 1)
    batch["inputs_BL"][0, starts] = 0
    sizes = [int((SOURCES["segments_BL"][row] > 0).sum()) for row in rows]
    packed = packed_rows([sizes], 24, 64)
    batch |= {f"{name[:-1]}M": packed[name] for name in ("segments_BL", "positions_BL")}
    sources = [SOURCES["targets_BL"][row, :size] for row, size in zip(rows, sizes, strict=True)]
    batch["inputs_BM"] = packed["targets_BL"]
    batch["inputs_BM"][0, : sum(sizes)] = np.concatenate(sources)
    model = TransformerModel(spec, WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)):
        params = jax.tree.map(jnp.asarray, weights(spec))
        losses_L = np.asarray(jax.jit(model.token_losses)(params, batch).loss_BL)[0]
    for row, text, start in zip(rows, texts, starts, strict=True):
        new = text[LENGTHS[row] :]
        size = new.index(END) + 1 if END in new else NEW
        first = start + LENGTHS[row]
        np.testing.assert_allclose(
            output.log_probability_BW[row, 0], -losses_L[first : first + size].sum(), rtol=1e-5
        )


@pytest.mark.parametrize("kind", MODELS)
def test_a_beam_of_one_is_greedy(kind: str) -> None:
    expected = decoded(MODELS[kind], GREEDY)
    for flat in (True, False):
        output = decoded(MODELS[kind], Beam(width=1, flat=flat))
        np.testing.assert_array_equal(output.tokens_BWT, expected.tokens_BWT)
        np.testing.assert_allclose(
            output.log_probability_BW, expected.log_probability_BW, rtol=1e-5
        )


@pytest.mark.parametrize("kind", MODELS)
def test_a_flat_beam_finds_what_a_plain_one_finds(kind: str) -> None:
    flat, apart = decoded(MODELS[kind], BEAM), decoded(MODELS[kind], APART)
    np.testing.assert_array_equal(flat.tokens_BWT, apart.tokens_BWT)
    np.testing.assert_allclose(flat.score_BW, apart.score_BW, rtol=1e-5)
    assert len({tuple(text) for text in flat.tokens_BWT[0]}) == 3


CUT = (NEW, NEW, 3, NEW, 1, NEW, NEW, 2)
FIVE = dataclasses.replace(SAMPLED, width=5)


@pytest.mark.parametrize("kind", ["decoder", "pair"])
def test_samples_are_ranked_by_a_suffix_behind_each(kind: str) -> None:
    """Texts that end at once, sooner or not at all, after prompts of several lengths."""
    output, lengths = decoded(MODELS[kind], FIVE, suffix=SUFFIX, max_new_tokens=CUT), set()
    for row in range(8):
        texts = [
            (text[: text.index(END)] if END in text else text)[: CUT[row]]
            for text in output.tokens_BWT[row].tolist()
        ]
        lengths |= set(map(len, texts))
        scores = gains(MODELS[kind], row, [[*text, *SUFFIX] for text in texts])
        for text, gain, score in zip(texts, scores, output.score_BW[row], strict=True):
            behind = gain[np.arange(len(text), len(text) + len(SUFFIX)), SUFFIX]
            np.testing.assert_allclose(score, behind.mean(), rtol=1e-5)
        assert sorted(output.score_BW[row], reverse=True) == [*output.score_BW[row]]
    assert lengths >= {1, 3, NEW} and (0 in lengths or kind == "pair")


def test_a_suffix_changes_the_order_of_samples_alone() -> None:
    output = decoded(DECODER, FIVE, suffix=SUFFIX, max_new_tokens=CUT)
    without = decoded(DECODER, FIVE, max_new_tokens=CUT)
    order = np.argsort(-output.log_probability_BW, axis=1, kind="stable")
    np.testing.assert_array_equal(
        np.take_along_axis(output.tokens_BWT, order[:, :, None], 1), without.tokens_BWT
    )
    np.testing.assert_allclose(
        np.take_along_axis(output.log_probability_BW, order, 1), without.score_BW, rtol=1e-5
    )
    assert (order != np.arange(5)).any()


def test_a_suffix_ranks_samples_in_one_cache_as_in_separate_ones() -> None:
    flat, apart = (
        decoded(DECODER, dataclasses.replace(FIVE, flat=flat), suffix=SUFFIX, max_new_tokens=CUT)
        for flat in (True, False)
    )
    np.testing.assert_array_equal(flat.tokens_BWT, apart.tokens_BWT)
    np.testing.assert_allclose(flat.score_BW, apart.score_BW, rtol=1e-5)


def test_samples_are_the_same_in_one_cache_and_in_separate_ones() -> None:
    flat, apart = (
        decoded(DECODER, dataclasses.replace(SAMPLED, flat=flat)) for flat in (True, False)
    )
    np.testing.assert_array_equal(flat.tokens_BWT, apart.tokens_BWT)
    np.testing.assert_allclose(flat.score_BW, apart.score_BW, rtol=1e-5)


@pytest.mark.parametrize(
    ("penalty", "stop_ids", "count"),
    [("gnmt", (END,), 85), ("power", (END,), 85), ("gnmt", (END, 3), 53)],
)
def test_a_wide_beam_finds_the_best_of_all_texts(
    penalty: str, stop_ids: tuple[int, ...], count: int
) -> None:
    """Over a vocabulary of 5 and texts of at most 3 tokens, which all are scored.

    With one END they are 1 + 4 + 16 * 5, with two (1 + 3 + 9) * 2 + 27.
    """
    spec = dataclasses.replace(NO_PROMPT, vocab=5)
    beam = Beam(width=100, alpha=1.0, penalty=penalty)
    model = TransformerModel(spec, WHOLE)
    others = [token for token in range(5) if token not in stop_ids]
    all_texts = [
        [*prefix, stop]
        for size in range(3)
        for prefix in itertools.product(others, repeat=size)
        for stop in stop_ids
    ]
    all_texts += [[*text] for text in itertools.product(others, repeat=3)]
    rows = {
        name: array[:2] % 5 if "inputs" in name else array[:2] for name, array in sources().items()
    }
    with jax.set_mesh(make_mesh(WHOLE)):
        params = jax.tree.map(jnp.asarray, weights(spec))
        inputs = DecodeInputs(
            jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.uint32),
            jnp.full(2, 3), source=jax.tree.map(jnp.asarray, rows), stop_ids=stop_ids,
        )  # fmt: skip
        output = generate(model, beam, 3, params, inputs)
        for row in range(2):
            inputs = np.array([[0, *text, 0, 0][:3] for text in all_texts], np.int32)
            batch = {
                name: jnp.repeat(array[row : row + 1], len(inputs), 0)
                for name, array in rows.items()
            }
            batch |= {
                "inputs_BL": jnp.asarray(inputs),
                "segments_BL": jnp.ones_like(inputs),
                "positions_BL": jnp.tile(jnp.arange(3), (len(inputs), 1)),
            }
            gain = np.asarray(teacher_forced(model, params, batch))
            scores = []
            for place, text in enumerate(all_texts):
                total = sum(gain[place, i, token] for i, token in enumerate(text))
                scores.append(total / ((5 + len(text)) / 6 if penalty == "gnmt" else len(text)))
            order = np.argsort(scores)[::-1]
            assert len(all_texts) == count
            for rank in range(count):
                text = output.tokens_BWT[row, rank].tolist()
                np.testing.assert_allclose(
                    output.score_BW[row, rank], scores[order[rank]], rtol=1e-4
                )
                length = len(all_texts[order[rank]])
                assert text[:length] == all_texts[order[rank]]
            assert not np.isfinite(output.score_BW[row, count:]).any()


def searched(name: str) -> list[tuple[str, str]]:
    """Returns models that a layout can split, and how each is searched."""
    if name == "pipeline":
        return SEARCHED_IN_STAGES
    return SEARCHED_WITH_EXPERTS if name.startswith("expert") else SEARCHED


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("name", "kind", "search"), [(name, *case) for name in LAYOUTS for case in searched(name)]
)
def test_no_layout_changes_what_is_decoded(name: str, kind: str, search: str) -> None:
    layout = load([f"layouts/{name}.gin"]).make(Layout)
    spec = EXPERTS if kind == "experts" else MODELS[kind]
    suffix = SUFFIX if search == "sampled" else ()
    output = decoded(spec, SEARCHES[search], layout, suffix=suffix)
    expected = decoded(spec, SEARCHES[search], suffix=suffix)
    np.testing.assert_array_equal(output.tokens_BWT, expected.tokens_BWT)
    np.testing.assert_allclose(output.score_BW, expected.score_BW, rtol=1e-4)
    np.testing.assert_allclose(output.log_probability_BW, expected.log_probability_BW, rtol=1e-4)


@pytest.mark.parametrize("search", SEARCHES)
def test_rows_may_be_split_further_than_their_logits(search: str) -> None:
    layout = Layout(mesh="x:2,y:2", rules="batch:x;vocab:y;batch:y?")
    output = decoded(MODELS["decoder"], SEARCHES[search], layout)
    expected = decoded(MODELS["decoder"], SEARCHES[search])
    np.testing.assert_array_equal(output.tokens_BWT, expected.tokens_BWT)
    np.testing.assert_allclose(output.score_BW, expected.score_BW, rtol=1e-4)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_row_does_not_depend_on_its_batch(search: str) -> None:
    together = decoded(PAIR, SEARCHES[search])
    apart = decoded(PAIR, SEARCHES[search], rows=(6, 1, 3))
    np.testing.assert_array_equal(apart.tokens_BWT, together.tokens_BWT[[6, 1, 3]])


@pytest.mark.parametrize("search", SEARCHES)
def test_texts_keep_their_limits(search: str) -> None:
    max_new_tokens = (2, 3, 4, 5, 6, 6, 1, 2)
    output = decoded(PAIR, SEARCHES[search], max_new_tokens=max_new_tokens)
    for row, limit in enumerate(max_new_tokens):
        assert not output.tokens_BWT[row, :, limit:].any()
    alone = decoded(PAIR, SEARCHES[search])
    np.testing.assert_array_equal(output.tokens_BWT[4:6], alone.tokens_BWT[4:6])
    ends = [(decoded(PAIR, SEARCHES[search], min_new_tokens=n).tokens_BWT == END) for n in (1, 5)]
    assert ends[0][:, :, :4].any() and not ends[1][:, :, :4].any()


def test_nothing_follows_the_end() -> None:
    tokens = decoded(DECODER, SAMPLED).tokens_BWT.reshape(-1, NEW)
    ended = 0
    for row in tokens:
        places = np.flatnonzero(row == END)
        if len(places):
            ended += 1
            assert not row[places[0] + 1 :].any()
    assert ended and len({tuple(row) for row in tokens}) > 8  # samples differ


def test_each_stop_ends_a_text() -> None:
    one = decoded(DECODER, GREEDY).tokens_BWT[:, 0].tolist()
    stop = one[5][1]
    several = decoded(DECODER, GREEDY, more_stops=(stop,)).tokens_BWT[:, 0].tolist()
    cut = [
        [*text[: text.index(stop) + 1], *NEW * [0]][:NEW] if stop in text else text for text in one
    ]
    assert stop != END and several == cut != one


def test_top_k_of_one_is_greedy() -> None:
    greedy = decoded(DECODER, GREEDY).tokens_BWT
    for cut in (Sampling(temperature=2.0, top_k=1), Sampling(temperature=2.0, top_p=1e-6)):
        np.testing.assert_array_equal(decoded(DECODER, cut).tokens_BWT, greedy)


def test_samples_follow_the_probabilities() -> None:
    """The first token of 4,000 samples of one row, against the model's own distribution."""
    output = decoded(DECODER, Sampling(width=4000, flat=False), rows=(1,), max_new_tokens=(1,) * 8)
    counts = np.bincount(output.tokens_BWT[0, :, 0], minlength=64)
    expected = 4000 * np.exp(gains(DECODER, 1, [[]])[0, 0])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 5).all()
    assert (counts > 0).sum() > 10


@pytest.mark.parametrize(("spec", "search"), [(DECODER, GREEDY), (PAIR, BEAM)])
def test_the_ids_of_beginning_and_end_do_not_matter(spec: Transformer, search: Search) -> None:
    expected, ids = decoded(spec, search), (9, 40)
    output = decoded(spec, search, ids=ids)
    np.testing.assert_allclose(output.score_BW, expected.score_BW, rtol=2e-5)
    texts = expected.tokens_BWT.reshape(-1, NEW)
    endings = [text.index(END) + 1 if END in text else NEW for text in texts.tolist()]
    assert min(endings) < NEW
    for text, other, end in zip(texts, output.tokens_BWT.reshape(-1, NEW), endings, strict=True):
        np.testing.assert_array_equal(other[:end], swapped(text[:end], ids))
