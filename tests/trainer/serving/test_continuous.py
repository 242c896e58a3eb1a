"""Continuous batching: how many steps a call has follows from speed, and changes no text."""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from configs.errors import UserError
from data.vocab import Vocab
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.adapters.lora import ADAPTER, Lora
from models.api import Params
from models.decoding.sampling import Sampling
from models.transformer import Transformer, TransformerModel
from tests.data.test_vocab import Digits
from tests.models.decoding.test_generate import DECODER, weights
from tests.toys import WHOLE
from trainer.decoding.decoder import Request
from trainer.serving import slot_engine
from trainer.serving.continuous import ContinuousService
from trainer.serving.service import NO_PENALTIES, Job, NoFiniteScore, TokenPenalties
from trainer.serving.slot_engine import CALL_S, MAX_STEPS, SlotEngine, SlotSize


def new_engine(
    slots: int,
    max_length: int,
    cached_prompts: int = 0,
    layout: Layout = WHOLE,
    spec: Transformer = DECODER,
    vocab: Vocab | None = None,
    adapters: Mapping[str, tuple[Lora, Params]] | None = None,
) -> SlotEngine:
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        vocab = vocab or Digits(64, begin_id=0, end_id=1)
        model = TransformerModel(spec, layout)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params = jax.tree.map(
            lambda w, s: jax.device_put(w, NamedSharding(mesh, s.sharding.spec)),
            weights(spec),
            shapes,
        )
        for number, (_, matrices) in (adapters or {}).items():
            params |= {number: jax.device_put(matrices, NamedSharding(mesh, jax.P()))}
        chosen = tuple(adapter for adapter, _ in (adapters or {}).values())
        model = dataclasses.replace(model, adapters=chosen)
        return SlotEngine(model, params, mesh, vocab, slots, max_length, cached_prompts)


@pytest.fixture
def engine() -> SlotEngine:
    return new_engine(3, 13)


def test_a_machine_that_is_busy_at_first_makes_few_steps_a_call_only_then(
    engine: SlotEngine,
) -> None:
    size, larger = engine.size, engine.size._replace(slots=3)
    for steps, seconds, expected in (
        (1, CALL_S, 1),
        (1, CALL_S / 2, 2),
        (2, CALL_S / 4, MAX_STEPS),
        (MAX_STEPS, 100 * CALL_S, MAX_STEPS),  # waited for something else
    ):
        engine.note_call(size, steps, seconds)
        engine.note_call(larger, 1, CALL_S)  # of another speed
        assert engine.steps == expected


def test_log_probabilities_that_are_not_finite_are_no_answer(engine: SlotEngine) -> None:
    service = ContinuousService(engine, step=0, queue=9)
    job = Job(Request([5], 9), Sampling())
    service.submit([job])
    with jax.set_mesh(engine.mesh):
        params = jax.tree.map(jnp.asarray, weights(DECODER))
        engine.set_weights(jax.tree.map(lambda x: jnp.full_like(x, np.nan), params))
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
        engine.warm_up()
        expected = answers(itertools.repeat(1))
        changing = answers(itertools.cycle([4, 1, 3, 1, 2]))
    assert max(len(job.tokens) for job in expected) > 4
    for job, same in zip(changing, expected, strict=True):
        assert job.tokens == same.tokens
        np.testing.assert_allclose(job.log_probabilities, same.log_probabilities, rtol=1e-5)


def test_texts_that_are_more_or_longer_move_to_other_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is the one that it is alone; a move to fewer slots waits a while."""
    monkeypatch.setattr(slot_engine, "SHORTEST_CACHE", 8)
    monkeypatch.setattr(slot_engine, "PATIENCE", 2)
    engine, sizes = new_engine(3, 13), list[SlotSize]()
    jobs = [Job(Request([5, 6], n, seed, n), Sampling()) for seed, n in enumerate((11, 3, 2))]

    def run(jobs: list[Job]) -> list[list[int]]:
        service = ContinuousService(engine, step=0, queue=9)
        service.submit(jobs)
        sizes.clear()
        while not all(job.is_done for job in jobs):
            service.advance(service.next_jobs())
            sizes.append(engine.size)
        texts = [[*job.tokens] for job in jobs]
        for job in jobs:
            job.tokens, job.log_probabilities, job.finish, job.dispatched = [], [], None, 0
        return texts

    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        assert engine.size == (1, 8)
        [alone] = run(jobs[:1])
        assert sizes[0] == (1, 8) and sizes[-1] == (1, 13)
        alone = [alone, *run(jobs[1:2]), *run(jobs[2:])]
        assert {*sizes} == {(1, 8)}
        assert run(jobs) == alone
        assert sizes[0] == (3, 8) and sizes[-1] == (1, 13)


@functools.cache
def prefix_logits() -> Callable[[jax.Array], jax.Array]:
    """A function that gives the logits after each token of a text of 32, in one pass."""
    model, places = TransformerModel(DECODER, WHOLE), jnp.arange(32)
    prepared = model.prepare(jax.tree.map(jnp.asarray, weights(DECODER)))
    is_before = (places[:, None] >= places)[None]

    def logits(row: jax.Array) -> jax.Array:
        cache = model.init_cache(prepared, None, 1, 32)
        return model.step(prepared, cache, row[None], places[None], is_before, jnp.int32(0))[1][0]

    return jax.jit(logits)


@functools.cache
def logits_of(tokens: tuple[int, ...]) -> np.ndarray:
    """The logits of the token after these."""
    with jax.set_mesh(make_mesh(WHOLE)):
        row = np.array([*tokens, *[0] * (32 - len(tokens))])
        return np.asarray(prefix_logits()(row))[len(tokens) - 1].astype(np.float64)


def penalized_text(job: Job, given: TokenPenalties) -> tuple[list[int], list[float]]:
    """The text that a penalized greedy search finds, token by token, and log-probabilities of the
    model itself."""
    prompt, text, log_p = [*job.request.prompt], list[int](), list[float]()
    for _ in range(job.request.max_new_tokens):
        logits = logits_of((0, *prompt, *text)).copy()
        log_probabilities = logits - np.logaddexp.reduce(logits)
        for token, bias in given.bias.items():
            logits[token] += bias
        for token in {*prompt, *text}:
            logits[token] *= 1 / given.repetition if logits[token] > 0 else given.repetition
        for token in {*text}:
            logits[token] -= given.presence + given.frequency * text.count(token)
        if len(text) + 1 < job.request.min_new_tokens:
            logits[1] = -np.inf
        token = int(logits.argmax())
        log_p.append(log_probabilities[token])
        if token == 1:
            break
        text.append(token)
    return text, log_p


@pytest.mark.few(1)
@pytest.mark.parametrize("rules", ["", "vocab:x", "batch:x;vocab:y"])
def test_penalties_change_the_texts_that_have_them_and_no_other(
    rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rules:
        monkeypatch.setattr(slot_engine, "SHORTEST_CACHE", 8)  # texts move
    layout = Layout(mesh="x:2,y:2" if "y" in rules else "x:2", rules=rules) if rules else WHOLE
    rng = np.random.default_rng(len(rules))
    given = [
        NO_PENALTIES,
        TokenPenalties(repetition=1.3),
        TokenPenalties(presence=1.5, frequency=0.3),
        TokenPenalties(frequency=-1.0),
        NO_PENALTIES,
        TokenPenalties(bias={9: 100.0}),
        TokenPenalties(0.7, -0.4, 1.1, {t: 5.0 - t / 3 for t in range(2, 50, 3)}),
        TokenPenalties(bias={token: -100.0 for token in range(40)}),
        TokenPenalties(2.0, 2.0, 2.0),
    ]
    engine = new_engine(4, 24, layout=layout)
    service = ContinuousService(engine, step=0, queue=99)
    jobs = [
        Job(Request(rng.integers(2, 64, 1 + i).tolist(), 3 + i, min_new_tokens=3), penalties=each)
        for i, each in enumerate(given)
    ]
    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        for job in jobs:  # they join one after another
            service.submit([job])
            service.advance(service.next_jobs())
        while not all(job.is_done for job in jobs):
            service.advance(service.next_jobs())
    texts = [
        penalized_text(job, each or TokenPenalties()) for job, each in zip(jobs, given, strict=True)
    ]
    plain = [penalized_text(job, TokenPenalties())[0] for job in jobs]
    for job, (text, log_p) in zip(jobs, texts, strict=True):
        assert job.tokens == text
        np.testing.assert_allclose(job.log_probabilities, log_p, rtol=1e-4, atol=1e-5)
    changed = [text != same for (text, _), same in zip(texts, plain, strict=True)]
    assert changed.count(True) >= 5 and not changed[0] and not changed[4]


def test_weights_are_held_once(engine: SlotEngine) -> None:
    params = jax.tree.map(jnp.asarray, weights(DECODER))
    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        layers = [weakref.ref(weight) for weight in jax.tree.leaves(params["decoder"])]
        stored_bytes = sum(weight.nbytes for weight in jax.tree.leaves(params))
        engine.set_weights(params)
        del params
    assert not any(weight() for weight in layers)
    assert sum(weight.nbytes for weight in jax.tree.leaves(engine._weights)) == stored_bytes


def answer_in_turn(engine: SlotEngine, jobs: list[Job]) -> None:
    """Answers each job before the next one is submitted."""
    service = ContinuousService(engine, step=0, queue=1)
    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        for job in jobs:
            service.submit([job])
            while not job.is_done:
                service.advance(service.next_jobs())


@pytest.mark.long
def test_a_prompt_that_begins_as_an_earlier_one_has_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the rest of it is read; new weights, and two prompts later, all of it."""
    monkeypatch.setattr(slot_engine, "SHORTEST_CACHED", 32)
    numbers = np.random.default_rng(0).integers(2, 64, 64).tolist()
    turns = [numbers[:20], numbers[:45], numbers[:45], [*numbers[:30], 5, 7], [9, *numbers[:39]]]
    others = [[8, *numbers[:20]], [7, *numbers[:20]]]
    prompts = [*turns, *others, numbers[:20]]

    def answers(kept: int) -> tuple[list[Job], SlotEngine]:
        engine = new_engine(2, 60, kept)
        jobs = [Job(Request(prompt, 6, seed=3, min_new_tokens=6), Sampling()) for prompt in prompts]
        answer_in_turn(engine, jobs)
        return jobs, engine

    expected, _ = answers(0)
    jobs, engine = answers(2)
    for job, same in zip(jobs, expected, strict=True):
        assert job.tokens == same.tokens and not same.cached_tokens
        np.testing.assert_allclose(job.log_probabilities, same.log_probabilities, rtol=1e-5)
    # 16 tokens are read at least: of the fourth prompt, which fills 32 positions, the last half.
    # The model reads its begin token before a prompt, which counts for none.
    assert [job.cached_tokens for job in jobs] == [0, 19, 43, 15, 0, 0, 0, 0]
    service = ContinuousService(engine, step=0, queue=9)
    again = [Job(Request(prompts[-1], 1)), Job(Request(prompts[-1], 1))]
    with jax.set_mesh(engine.mesh):
        service.submit(again[:1])
        service.advance(service.next_jobs())
        engine.set_weights(jax.tree.map(jnp.asarray, weights(DECODER)))
        service.submit(again[1:])
        service.advance(service.next_jobs())
    assert [job.cached_tokens for job in again] == [15, 0]
    together = [Job(Request(prompt, 1)) for prompt in (numbers[:21], numbers[1:21])]
    longer = [Job(Request(numbers[:45], 6, seed=3, min_new_tokens=6), Sampling())]
    with jax.set_mesh(engine.mesh):
        for arriving in (together, longer):  # each of those together has its pass, and is cached
            service.submit(arriving)
            while not all(job.is_done for job in arriving):
                service.advance(service.next_jobs())
    assert longer[0].cached_tokens == 20 and longer[0].tokens == expected[1].tokens


@pytest.mark.long
def test_prompts_of_more_than_64_tokens_are_cached_under_any_limit_of_positions() -> None:
    prompt = [*range(2, 62), *range(2, 12)]
    jobs = [Job(Request(prompt, 1)), Job(Request(prompt, 1))]
    answer_in_turn(new_engine(1, 100, 2), jobs)
    assert [job.cached_tokens > 0 for job in jobs] == [False, True]


ADAPTERS = (
    Lora(rank=3, alpha=5.0, targets=("w*",)),
    Lora(rank=1, alpha=2.0, targets=("attention/wq", "mlp/wo")),
    Lora(rank=5, alpha=0.7, targets=("wi", "wv"), store="bfloat16"),
)


def matrices_of(number: int) -> Params:
    """The weights of an adapter that change what the model says."""
    model = TransformerModel(dataclasses.replace(DECODER, adapter=ADAPTERS[number - 1]), WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)):
        adapter = model.init(jax.random.key(0))[ADAPTER]
    keys = iter(jax.random.split(jax.random.key(number), 100))
    draw = jax.random.normal
    return {ADAPTER: jax.tree.map(lambda x: draw(next(keys), x.shape, x.dtype) / 2, adapter)}


@pytest.mark.long
@pytest.mark.parametrize("rules", ["", "vocab:x;adapter_rank:x?;d_ff:x", "batch:x;heads:y"])
def test_adapters_are_served_together_as_each_alone(
    rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are those of a model whose weights have the adapter added; prompts are cached apart."""
    monkeypatch.setattr(slot_engine, "SHORTEST_CACHED", 32)
    layout = Layout(mesh="x:2,y:2" if "y" in rules else "x:2", rules=rules) if rules else WHOLE
    rng = np.random.default_rng(5)
    long = rng.integers(2, 64, 30).tolist()
    requests = [(prompt, n) for prompt in ([5], [7, 8, 9], long) for n in (0, 1, 2, 3, 1)]

    def answers(engine: SlotEngine, requests: list[tuple[list[int], int]]) -> list[Job]:
        service = ContinuousService(engine, step=0, queue=99)
        jobs = [  # prompts that are scored are not cached
            Job(Request(p, 6, min_new_tokens=6), adapter=n, scores_prompt=p is not long)
            for p, n in requests
        ]
        with jax.set_mesh(engine.mesh):
            engine.warm_up()
            service.submit(jobs)
            while not all(job.is_done for job in jobs):
                service.advance(service.next_jobs())
        return jobs

    adapters = {str(n): (adapter, matrices_of(n)) for n, adapter in enumerate(ADAPTERS, 1)}
    jobs = answers(new_engine(4, 60, 9, layout, adapters=adapters), requests)
    # The last one has the prompt and the adapter of an earlier one; several devices cache none.
    cached = [job.cached_tokens > 0 for job in jobs[-5:]]
    assert cached == [False, False, False, False, "batch" not in rules]
    texts = {n: [job.tokens for job in jobs if job.adapter == n] for n in range(4)}
    assert len({str(texts[n][:3]) for n in texts}) == 4
    for number in range(4):
        engine = new_engine(4, 60)
        if number:
            spec = dataclasses.replace(DECODER, adapter=ADAPTERS[number - 1])
            with jax.set_mesh(engine.mesh):
                params = weights(DECODER) | matrices_of(number)
                engine._unprepared = TransformerModel(spec, WHOLE).merged(params)
        expected = answers(engine, [(p, 0) for p, n in requests if n == number])
        for job, same in zip((j for j in jobs if j.adapter == number), expected, strict=True):
            assert job.tokens == same.tokens
            for name in ("log_probabilities", "prompt_log_probabilities"):
                np.testing.assert_allclose(
                    getattr(job, name), getattr(same, name), rtol=1e-4, atol=1e-5
                )


def test_adapters_that_are_merged_into_weights_are_not_served_beside_others() -> None:
    spec = dataclasses.replace(DECODER, adapter=Lora(targets=("*",)))
    with jax.set_mesh(make_mesh(WHOLE)):
        matrices = {ADAPTER: TransformerModel(spec, WHOLE).init(jax.random.key(0))[ADAPTER]}
        engine = new_engine(2, 30, adapters={"1": (spec.adapter, matrices)})
        with pytest.raises(UserError, match=r"outside a matmul with rows"):
            engine.warm_up()
