"""Routers against versions written from the papers, one token after another."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.mesh import make_mesh
from models.feed_forward.moe.layer import load_of
from models.feed_forward.moe.routing import Load, Router, Routing, Top2, TopK
from tests.toys import WHOLE


def algorithm_1(gates_SE: np.ndarray, is_token_S: np.ndarray, capacity: int, drawn_S: np.ndarray):
    """Lepikhin et al. 2020, algorithm 1: combine weights, places and the auxiliary loss."""
    tokens, experts = gates_SE.shape
    count_E, weight_SE, place_SE = np.zeros(experts, int), np.zeros_like(gates_SE), {}
    real = [s for s in range(tokens) if is_token_S[s]]
    first = {s: int(np.argmax(gates_SE[s])) for s in real}
    second = {
        s: int(np.argmax(np.where(np.arange(experts) == first[s], -1, gates_SE[s]))) for s in real
    }
    for s in real:
        g1, g2 = gates_SE[s, first[s]], gates_SE[s, second[s]]
        if count_E[first[s]] < capacity:
            weight_SE[s, first[s]] = g1 / (g1 + g2)
            place_SE[s, first[s]] = int(count_E[first[s]])
        count_E[first[s]] += 1
    mean_E = gates_SE[is_token_S].mean(axis=0) if real else np.zeros(experts)
    aux = np.mean(count_E / max(len(real), 1) * mean_E)
    for s in real:
        g1, g2 = gates_SE[s, first[s]], gates_SE[s, second[s]]
        g2 = g2 / (g1 + g2)
        if count_E[second[s]] < capacity and 2 * g2 > drawn_S[s]:
            weight_SE[s, second[s]] = g2
            place_SE[s, second[s]] = int(count_E[second[s]])
        count_E[second[s]] += 1
    return weight_SE, place_SE, aux


TOKENS, EXPERTS = 12, 7


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Gates of one group, many of them ties, which places are real, a capacity and a seed.

    Smaller groups are filled up with places that are not real, and with experts without a chance,
    so that all sizes are one compiled program.
    """
    tokens, experts = draw(st.integers(1, TOKENS)), draw(st.integers(2, EXPERTS))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    levels = draw(st.sampled_from([2, 4, 1000]))
    logits = rng.integers(0, levels, (TOKENS, EXPERTS)) / levels * draw(st.sampled_from([1, 9]))
    logits[:, experts:] = -np.inf
    real = (rng.random(TOKENS) < draw(st.sampled_from([0.5, 1.0]))) & (np.arange(TOKENS) < tokens)
    return logits.astype(np.float32), real, draw(st.integers(1, tokens)), seed


@functools.partial(jax.jit, static_argnums=0)
def routed_and_loaded(
    router: Router,
    logits_SE: jax.Array,
    is_token_S: jax.Array,
    capacity: int | jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, Routing, Load]:
    logits_Gse, is_token_Gs = logits_SE[None], is_token_S[None]
    segments_Gs = is_token_Gs.astype(jnp.int32)
    gates_Gse = jax.nn.softmax(logits_Gse, axis=-1)
    routing = router.route(WHOLE, gates_Gse, segments_Gs, capacity, key)
    load = load_of(WHOLE, logits_Gse, gates_Gse, routing, is_token_Gs)
    return gates_Gse, routing, load


def routed(
    router: Router,
    logits_SE: np.ndarray,
    is_token_S: np.ndarray,
    capacity: int,
    key: jax.Array | None,
) -> tuple[np.ndarray, Routing, Load]:
    """Gates and routing of one group, axis G taken away, and its load."""
    with jax.set_mesh(make_mesh(WHOLE)):
        gates, routing, load = jax.device_get(
            routed_and_loaded(router, logits_SE, is_token_S, capacity, key)
        )
    return gates[0], Routing(*(field[0] for field in routing)), load


def dense(routing: Routing, experts: int) -> tuple[np.ndarray, dict[tuple[int, int], int]]:
    """Weights by token and expert, and the places of those that are kept."""
    weight_SE, place = np.zeros((len(routing.gate_Gsi), experts), np.float32), {}
    for s, i in zip(*np.nonzero(routing.kept_Gsi), strict=True):
        expert = int(routing.expert_Gsi[s, i])
        weight_SE[s, expert] += routing.gate_Gsi[s, i]
        place[int(s), expert] = int(routing.position_Gsi[s, i])
    return weight_SE, place


@settings(max_examples=2000, deadline=None)
@given(cases(), st.booleans())
def test_top_2_is_algorithm_1(case, random: bool) -> None:
    logits_SE, is_token_S, capacity, seed = case
    key = jax.random.key(seed) if random else None
    gates_SE, routing, load = routed(Top2(), logits_SE, is_token_S, capacity, key)
    drawn_S = np.zeros(len(is_token_S))
    if key is not None:
        drawn_S = np.asarray(jax.random.uniform(key, (1, len(is_token_S))))[0]
    weight_SE, place, aux = algorithm_1(gates_SE, is_token_S, capacity, drawn_S)
    computed_SE, found_place = dense(routing, gates_SE.shape[1])
    np.testing.assert_array_max_ulp(computed_SE, weight_SE, maxulp=2)  # one division
    assert found_place == place
    assert np.all(computed_SE.sum(axis=1) <= 1 + 1e-6)
    experts, tokens = gates_SE.shape[1], max(int(is_token_S.sum()), 1)
    np.testing.assert_allclose(load.aux / tokens, experts**2 * aux, rtol=2e-6, atol=1e-7)
    assert np.all(load.kept_e <= capacity)
    assert load.kept_e.sum() == len(place) == load.kept_i.sum()


@settings(max_examples=500, deadline=None)
@given(cases(), st.integers(1, 2), st.booleans())
def test_top_k_takes_the_best_in_order_until_an_expert_is_full(case, k, normalises) -> None:
    logits_SE, is_token_S, capacity, _ = case
    router = TopK(k=k, normalises=normalises)
    gates_SE, routing, _ = routed(router, logits_SE, is_token_S, capacity, None)
    weight_SE, count_E = np.zeros_like(gates_SE), np.zeros(gates_SE.shape[1], int)
    best = np.argsort(-gates_SE, axis=1, kind="stable")[:, :k]
    for i in range(k):
        for s in np.flatnonzero(is_token_S):
            expert, total = best[s, i], gates_SE[s, best[s]].sum() if normalises else 1
            if count_E[expert] < capacity:
                weight_SE[s, expert] = gates_SE[s, expert] / total
            count_E[expert] += 1
    np.testing.assert_allclose(dense(routing, len(count_E))[0], weight_SE, rtol=1e-6)


@pytest.mark.parametrize(
    ("router", "training", "places"),
    [
        (Top2(), True, math.ceil(2 * 100 / 8)),
        (Top2(capacity_factor=1.25), True, math.ceil(2.5 * 100 / 8)),
        (Top2(), False, math.ceil(4 * 100 / 8)),
        (TopK(k=1), True, math.ceil(100 / 8)),
        (TopK(k=1, least_capacity=40), True, 40),
        (TopK(k=8, capacity_factor=9.0), True, 100),
    ],
)
def test_capacity_is_the_even_share_times_a_factor(router, training, places) -> None:
    assert router.capacity(100, 8, training=training) == places
