"""Sampling: what it draws from and what it sends between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.padding import with_padding
from models.decoding.generate import DecodeInputs
from models.decoding.sampling import Samples, Sampling, gumbel, ordered_integers
from tests.toys import WHOLE

ROWS, WIDTH, VOCAB, NEW = 2, 3, 512, 5


def advance(sampling: Sampling, layout: Layout) -> tuple[jax.stages.Compiled, tuple]:
    """Returns one step of sampling, compiled, and its arguments."""
    mesh = make_mesh(layout)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):

        def put(array: np.ndarray, axes: str) -> jax.Array:
            return jax.device_put(array, NamedSharding(mesh, layout.place(axes)))

        lengths_B = put(np.zeros(ROWS, np.int32), "B")
        inputs = DecodeInputs(
            prompts_BL=put(np.zeros((ROWS, 1), np.int32), "Bl"),
            prompt_lengths_B=lengths_B,
            seeds_B=put(np.arange(ROWS, dtype=np.uint32), "B"),
            max_new_tokens_B=put(np.full(ROWS, NEW, np.int32), "B"),
            min_new_tokens_B=put(np.full(ROWS, NEW, np.int32), "B"),
        )
        logits = rng.normal(0, 2, (ROWS, WIDTH, VOCAB)).astype(np.float32)
        state = sampling.start(layout, inputs, NEW)
        arguments = (state, put(logits, "BWV"), inputs, jnp.zeros((), jnp.int32))
        step = jax.jit(lambda *given: sampling.advance(layout, *given)[0])
        return step.lower(*arguments).compile(), arguments


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, width=WIDTH),
        Sampling(width=WIDTH),
        Sampling(0.7, top_p=0.9, width=WIDTH),
        Sampling(0.7, top_k=9, top_p=0.9, min_p=0.2, width=WIDTH),
    ],
    ids=str,
)
def test_no_device_gathers_the_vocabulary(sampling: Sampling) -> None:
    layout = Layout(mesh="data:2,model:4", rules="batch:data;vocab:model")
    step, arguments = advance(sampling, layout)
    collectives = CompiledText.read(step.as_text()).collectives(make_mesh(layout).shape)
    assert collectives
    for collective in collectives:
        assert collective.bytes < 4 * VOCAB, collective
    split: Samples = step(*arguments)
    whole, same = advance(sampling, WHOLE)
    np.testing.assert_array_equal(split.tokens_BWT, whole(*same).tokens_BWT)


@pytest.mark.parametrize("top_k", [None, 60])
def test_tokens_less_likely_than_a_share_of_the_likeliest_are_not_drawn(top_k: int | None) -> None:
    logits_BWV = np.random.default_rng(0).normal(0, 1, (1, 1, 60)).astype(np.float32)
    probs_V = np.exp(logits_BWV[0, 0] / 0.7)
    legal = set(np.flatnonzero(probs_V >= 0.3 * probs_V.max()))
    sampling = Sampling(0.7, top_k=top_k, min_p=0.3)
    with jax.set_mesh(make_mesh(WHOLE)):
        choose = jax.jit(lambda seed_B: sampling.choose(WHOLE, logits_BWV, seed_B, jnp.int32(0))[0])
        drawn = {int(choose(jnp.array([seed], jnp.uint32))[0, 0]) for seed in range(400)}
    assert drawn == legal and 3 < len(legal) < 20


@pytest.mark.parametrize("top_k", [None, 7])
def test_temperatures_too_low_to_divide_by_take_the_likeliest(top_k: int | None) -> None:
    logits_BWV = jnp.asarray(np.random.default_rng(0).normal(0, 9, (ROWS, WIDTH, 60)), jnp.float32)
    seeds_B, step = jnp.arange(ROWS, dtype=jnp.uint32), jnp.zeros((), jnp.int32)
    with jax.set_mesh(make_mesh(WHOLE)):
        chosen = [
            Sampling(temperature, top_k=top_k).choose(WHOLE, logits_BWV, seeds_B, step)
            for temperature in (1e-40, 1e-6)
        ]
    for tokens_BW, logits_BW in chosen:
        np.testing.assert_array_equal(tokens_BW, logits_BWV.argmax(axis=-1))
        np.testing.assert_array_equal(logits_BW, logits_BWV.max(axis=-1))


def test_padding_of_the_vocabulary_changes_no_noise() -> None:
    layout = Layout(mesh="model:4", rules="vocab:model+")
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        padded = with_padding(layout, V=VOCAB - 2)
        seeds_B = jnp.arange(ROWS, dtype=jnp.uint32)
        step = jnp.zeros((), jnp.int32)
        draw = jax.jit(gumbel, static_argnums=(0, 3, 4))
        padded_BWV = draw(padded, seeds_B, step, "BWV", (ROWS, WIDTH, VOCAB))
        whole_BWV = draw(padded, seeds_B, step, "BWv", (ROWS, WIDTH, VOCAB - 2))
    np.testing.assert_array_equal(np.asarray(padded_BWV)[:, :, : VOCAB - 2], whole_BWV)


def test_integers_are_in_the_order_of_floats() -> None:
    x = jnp.array([-jnp.inf, -2.0, -0.0, 0.0, 1e-9, 3.0])
    assert jnp.sign(jnp.diff(ordered_integers(x))).tolist() == [1, 1, 0, 1, 1]
