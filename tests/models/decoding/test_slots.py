"""Slots: a text gets what it gets alone, whenever it joins and whatever runs beside it."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.decoding import slots
from models.decoding.generate import BEGIN, END, DecodeInputs, generate
from models.decoding.sampling import Sampling
from models.decoding.slots import Joining, SlotDecoder, SlotSettings
from models.precision import Precision
from models.transformer import Transformer, TransformerModel
from tests.models.decoding.test_generate import DECODER, EXPERTS, LENGTHS, NEW, PROMPTS, weights
from tests.toys import WHOLE
from trainer.step import token_losses

SLOTS, CACHE, PADDED, TOGETHER, MAX_STEPS = 4, 13, 5, 2, 3
SEARCHES = (
    Sampling(temperature=0),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.1),
    Sampling(temperature=1.5, min_p=0.2),
)
MIXED = [SEARCHES[row % len(SEARCHES)] for row in range(8)]
SPLIT = Layout(
    mesh="data:2,model:2", rules="batch:data;heads:model;d_ff:model;vocab:model;experts:data"
)


def limit(row: int) -> int:
    """The new tokens of a row."""
    return NEW - row % 3


class Text(NamedTuple):
    tokens: list[int]
    log_probability: float


@functools.cache
def expected(spec: Transformer, search: Sampling, row: int) -> Text:
    """What `generate` makes of a row, alone."""
    with jax.set_mesh(make_mesh(WHOLE)):
        inputs = DecodeInputs(
            prompts_BL=PROMPTS[[row]],
            prompt_lengths_B=np.array([LENGTHS[row]], np.int32),
            seeds_B=np.array([row], np.uint32),
            max_new_tokens_B=np.array([limit(row)], np.int32),
        )
        inputs = jax.tree.map(jax.numpy.asarray, inputs)
        params = jax.tree.map(jax.numpy.asarray, weights(spec))
        output = generate(TransformerModel(spec, WHOLE), search, NEW, params, inputs)
    tokens = [int(token) for token in output.tokens_BWT[0, 0][: limit(row)]]
    length = tokens.index(END) + 1 if END in tokens else limit(row)
    return Text(tokens[:length], float(output.log_probability_BW[0, 0]))


def forward(spec: Transformer, text: np.ndarray) -> np.ndarray:
    """Log-probabilities of all tokens in each place of a text, as `score` computes them."""
    rows = 64  # one for each token
    inputs = np.array([BEGIN, *text[:-1]], np.int32)
    batch = {
        "inputs_BL": np.tile(inputs, (rows, 1)),
        "targets_BL": np.tile(np.arange(rows, dtype=np.int32)[:, None], (1, len(text))),
        "positions_BL": np.tile(np.arange(len(text), dtype=np.int32), (rows, 1)),
        "segments_BL": np.ones((rows, len(text)), np.int32),
    }
    with jax.set_mesh(make_mesh(WHOLE)):
        params = jax.tree.map(jnp.asarray, weights(spec))
        return -np.asarray(token_losses(TransformerModel(spec, WHOLE), params, batch).loss_BL).T


READ = jax.jit(SlotDecoder.read, static_argnums=0)
JOIN = jax.jit(SlotDecoder.join, static_argnums=0, donate_argnums=1)
RESIZE = jax.jit(SlotDecoder.resize, static_argnums=0)
STEPS = jax.jit(SlotDecoder.steps, static_argnums=0, donate_argnums=2)


class Batch:
    """Slots of a model under a layout, and the texts that run in them."""

    def __init__(self, spec: Transformer, layout: Layout) -> None:
        self.layout, self.mesh = layout, make_mesh(layout)
        model = TransformerModel(spec, layout)
        self.decoder = decoder = SlotDecoder(model, SLOTS, CACHE, (END,), MAX_STEPS)
        with jax.set_mesh(self.mesh):
            shapes = jax.eval_shape(model.init, jax.random.key(0))
            params = jax.tree.map(
                lambda w, s: jax.device_put(w, NamedSharding(self.mesh, s.sharding.spec)),
                weights(spec),
                shapes,
            )
            self.prepared = jax.jit(model.prepare)(params)
            self.slots = jax.jit(decoder.start)(self.prepared)
        self.texts: dict[int, Text] = {}
        self.rows = dict[int, int]()

    def joining(self, rows: dict[int, int], searches: Sequence[Sampling]) -> Joining:
        """What puts rows into slots, by slot."""
        slots = [*rows, *[99] * (TOGETHER - len(rows))]
        filled = [*rows.values(), *[0] * (TOGETHER - len(rows))]
        chosen = [searches[row] for row in filled]

        def vector(values: Sequence[float], dtype: type = np.int32) -> jax.Array:
            return self.put(np.array(values, dtype), "B")

        settings = SlotSettings(
            vector(filled, np.uint32),
            vector([limit(row) for row in filled]),
            vector([1] * TOGETHER),
            vector([search.temperature for search in chosen], np.float32),
            vector([search.top_k or 0 for search in chosen]),
            vector([search.top_p or 1 for search in chosen], np.float32),
            vector([search.min_p for search in chosen], np.float32),
            vector([0] * TOGETHER),
        )
        return Joining(
            vector(slots),
            self.put(PROMPTS[filled], "Bl"),
            vector([LENGTHS[row] for row in filled]),
            vector([BEGIN] * TOGETHER),
            settings,
        )

    def join(self, rows: dict[int, int], searches: Sequence[Sampling]) -> None:
        """Puts rows into slots, by slot."""
        joining = self.joining(rows, searches)
        with jax.set_mesh(self.mesh):
            cache, last_B, _ = READ(self.decoder, self.prepared, joining)
            self.slots = JOIN(self.decoder, self.slots, joining, cache, last_B)
        self.rows |= rows
        self.texts |= {row: Text([], 0.0) for row in rows.values()}

    def resize(self, slots: int, length: int) -> None:
        """Moves the texts, in the reverse order, to slots of another size."""
        before, self.decoder = (
            self.decoder,
            dataclasses.replace(self.decoder, slots=slots, cache_length=length),
        )
        texts = sorted(self.rows, reverse=True)
        old = [*texts, *[before.slots] * (slots - len(texts))]
        with jax.set_mesh(self.mesh):
            self.slots = RESIZE(self.decoder, self.slots, self.put(np.array(old, np.int32), "B"))
        self.rows = {index: self.rows[slot] for index, slot in enumerate(texts)}

    def advance(self, steps: int) -> None:
        with jax.set_mesh(self.mesh):
            self.slots, new = STEPS(self.decoder, self.prepared, self.slots, steps)
        tokens_BT, gains_BT, _ = jax.device_get(new)
        for slot, row in [*self.rows.items()]:
            for token, gain in zip(tokens_BT[slot][:steps], gains_BT[slot][:steps], strict=True):
                tokens, total = self.texts[row]
                self.texts[row] = Text([*tokens, int(token)], total + gain)
                if token == END or len(tokens) + 1 == limit(row):
                    del self.rows[slot]
                    break

    def put(self, array: np.ndarray, axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, self.layout.place(axes)))

    def run(
        self, searches: Sequence[Sampling], sizes: Sequence[tuple[int, int]] = ((SLOTS, CACHE),)
    ) -> dict[int, Text]:
        """Lets two rows join whenever there are free slots; once, nothing runs for a while.

        All texts move to the next of the sizes before each call.
        """
        waiting, steps, next_sizes = [*range(8)], cycle((1, MAX_STEPS, 2)), cycle(sizes)
        while waiting or self.rows:
            size = next(next_sizes)
            if size != (self.decoder.slots, self.decoder.cache_length):
                self.resize(*size)
            room = min(TOGETHER, min(sizes)[0] - len(self.rows))
            free = [slot for slot in range(size[0]) if slot not in self.rows][:room]
            joining = dict(zip(free, waiting, strict=False))
            waiting = waiting[len(joining) :]
            if joining:
                self.join(joining, searches)
            self.advance(next(steps))
        return self.texts


def test_a_text_gets_what_it_gets_alone() -> None:
    check(DECODER, WHOLE, MIXED)


def test_no_layout_changes_it() -> None:
    check(EXPERTS, SPLIT, [SEARCHES[-1]] * 8)


def test_settings_of_texts_are_placed_as_their_logits() -> None:
    """The batch gives its mesh axis to the vocabulary, in tensors that have both."""
    check(DECODER, Layout(mesh="data:2", rules="vocab:data;batch:data?"), MIXED)


def test_texts_move_to_more_and_longer_slots_and_back() -> None:
    check(DECODER, WHOLE, MIXED, sizes=[(4, 13), (5, 17), (4, 11)])
    check(EXPERTS, SPLIT, [SEARCHES[-1]] * 8, sizes=[(4, 13), (8, 17)])


def check(
    spec: Transformer, layout: Layout, searches: Sequence[Sampling],
    sizes: Sequence[tuple[int, int]] = ((SLOTS, CACHE),),
) -> None:  # fmt: skip
    texts = Batch(spec, layout).run(searches, sizes)
    assert len({len(text.tokens) for text in texts.values()}) > 2  # slots were free at other times
    for row, (tokens, log_probability) in texts.items():
        alone = expected(spec, searches[row], row)
        assert tokens == alone.tokens, row
        np.testing.assert_allclose(log_probability, alone.log_probability, rtol=1e-4)


def test_prompts_are_scored_in_chunks_under_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one pass over the whole text scores them, with the likeliest tokens in each place."""
    monkeypatch.setattr(slots, "SCORED_POSITIONS", 2)
    rows = [0, 2]
    for spec, layout in ((DECODER, WHOLE), (EXPERTS, SPLIT)):
        batch = Batch(spec, layout)
        batch.decoder = dataclasses.replace(batch.decoder, candidates=3)
        with jax.set_mesh(batch.mesh):
            joining = batch.joining(dict(enumerate(rows)), SEARCHES[:1] * 8)
            cache, last_B, scores = READ(batch.decoder, batch.prepared, joining)
            batch.slots = JOIN(batch.decoder, batch.slots, joining, cache, last_B)
        assert scores.log_p_NBT.shape == (3, 2, 2) and scores.candidates is not None
        log_p_BT, top_BTU, top_log_p_BTU = (
            np.concatenate([*jax.device_get(x)], axis=1)
            for x in (scores.log_p_NBT, *scores.candidates)
        )
        for index, row in enumerate(rows):
            length = LENGTHS[row]
            prompt = PROMPTS[row, :length]
            expected_LV = forward(spec, prompt)
            own = expected_LV[np.arange(length), prompt]
            np.testing.assert_allclose(log_p_BT[index, :length], own, atol=1e-4)
            best = -np.sort(-expected_LV)[:, :3]
            np.testing.assert_allclose(top_log_p_BTU[index, :length], best, atol=1e-4)
            order = np.take_along_axis(expected_LV, top_BTU[index, :length], axis=1)
            np.testing.assert_allclose(order, best, atol=1e-4)
        # The texts go on as if their prompts were only read, and their new tokens are ranked.
        with jax.set_mesh(batch.mesh):
            _, new = STEPS(batch.decoder, batch.prepared, batch.slots, 2)
        tokens_BT, gains_BT, (top_BTU, top_log_p_BTU) = jax.device_get(new)
        for index, row in enumerate(rows):
            first = expected(spec, SEARCHES[0], row).tokens[:2]
            assert [*tokens_BT[index, : len(first)]] == first
            assert [*top_BTU[index, : len(first), 0]] == first  # greedy
            np.testing.assert_array_equal(
                top_log_p_BTU[index, : len(first), 0], gains_BT[index, : len(first)]
            )


def test_a_step_copies_no_cache() -> None:
    """A token is written in place, though the attention reads what it is written to."""
    batch = Batch(DECODER, WHOLE)
    with jax.set_mesh(batch.mesh):
        program = STEPS.lower(batch.decoder, batch.prepared, batch.slots, 2).compile().as_text()
    shape = ",".join(map(str, batch.slots.cache["layers"][1][0]["keys_BJMK"].shape))
    assert f"f32[{shape}]" in program
    assert not re.findall(rf"f32\[{shape}\]\S* copy\(", program)


def test_weights_are_cast_once_for_all_steps() -> None:
    """A step reads the weights as it computes with them, each layer apart."""
    spec = dataclasses.replace(DECODER, precision=Precision(compute="bfloat16"), scan=False)
    model = TransformerModel(spec, WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)):
        params = jax.eval_shape(model.init, jax.random.key(0))
        prepared = jax.tree.leaves(jax.eval_shape(model.prepare, params))
    uncast = {weight.shape for weight in prepared if weight.dtype != jnp.bfloat16}
    assert uncast == {(64, 16), (24, 16), (16,)}  # two tables, of which few rows are read; a norm
    assert len(prepared) > len(jax.tree.leaves(params))
