"""Continuous batching: how many steps a call has follows from speed, and changes no text."""

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.decoding.sampling import Sampling
from models.transformer import TransformerModel
from tests.data.test_vocab import Digits
from tests.models.decoding.test_generate import DECODER, weights
from tests.toys import WHOLE
from trainer.decoding.decoder import Request
from trainer.serving.continuous import ContinuousService
from trainer.serving.service import Job, NoFiniteScore
from trainer.serving.slot_engine import CALL_S, MAX_STEPS, SlotEngine


@pytest.fixture
def engine() -> SlotEngine:
    mesh = make_mesh(WHOLE)
    with jax.set_mesh(mesh):
        params = jax.tree.map(jnp.asarray, weights(DECODER))
        vocab = Digits(64, begin_id=0, end_id=1)
        return SlotEngine(TransformerModel(DECODER, WHOLE), params, mesh, vocab, 3, 13)


def test_a_machine_that_is_busy_at_first_makes_few_steps_a_call_only_then(
    engine: SlotEngine,
) -> None:
    engine.note_call(1, CALL_S)
    assert engine.steps == 1
    engine.note_call(1, CALL_S / 2)
    assert engine.steps == 2
    engine.note_call(2, CALL_S / 4)
    assert engine.steps == MAX_STEPS
    engine.note_call(MAX_STEPS, 100 * CALL_S)  # waited for something else
    assert engine.steps == MAX_STEPS


def test_log_probabilities_that_are_not_finite_are_no_answer(engine: SlotEngine) -> None:
    service = ContinuousService(engine, step=0, queue=9)
    job = Job(Request([5], 9), Sampling())
    service.submit([job])
    with jax.set_mesh(engine.mesh):
        engine.set_weights(jax.tree.map(lambda x: jnp.full_like(x, np.nan), engine.params))
        for _ in range(3):
            service.advance(service.next_jobs())
    assert isinstance(job.failure, NoFiniteScore) and job.finish is None and not job.tokens


def test_texts_do_not_depend_on_the_steps_of_calls(engine: SlotEngine) -> None:
    def answers(steps: Iterable[int]) -> list[Job]:
        service = ContinuousService(engine, step=0, queue=9)
        jobs = [Job(Request([5], 3 + seed, seed), Sampling()) for seed in range(7)]
        service.submit(jobs)
        for engine.steps in steps:
            service.advance(service.next_jobs())
            if all(job.is_done for job in jobs):
                break
        return jobs

    with jax.set_mesh(engine.mesh):
        engine.set_weights(engine.params)
        expected = answers(itertools.repeat(1))
        changing = answers(itertools.cycle([4, 1, 3, 1, 2]))
    assert max(len(job.tokens) for job in expected) > 4
    for job, same in zip(changing, expected, strict=True):
        assert job.tokens == same.tokens
        np.testing.assert_allclose(job.log_probabilities, same.log_probabilities, rtol=1e-5)
