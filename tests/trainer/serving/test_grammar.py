"""Texts of a JSON schema: each token leads to one, in every kind of vocabulary."""

import dataclasses
import json
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest

from configs.errors import UserError
from data.tokenizers.labels import LabelVocab
from data.tokenizers.sentence_piece import SentencePiece, SentencePieceVocab
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocab import Vocab, make
from layouts.layout import Layout
from models.decoding.sampling import Sampling
from tests.data.tokenizers.test_tokenizer_json import byte_fallback, byte_level
from tests.models.decoding.test_generate import DECODER
from tests.toys import WHOLE
from tests.trainer.serving.test_continuous import new_engine
from trainer.decoding.decoder import Request
from trainer.serving.continuous import ContinuousService
from trainer.serving.grammar import Grammar, bytes_of
from trainer.serving.service import DeadEnd, Job, TokenPenalties

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "count": {"enum": [1, 20, -3]},
        "is_it": {"type": "boolean"},
        "parts": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}
DOCUMENTS = [
    {"name": "", "count": 20},
    {"name": 'a"\u00e9\n', "count": -3, "is_it": True, "parts": []},
    {"name": "\U0001f600", "count": 1, "parts": [None, None]},
]
LINES = ["the reader reads the end of {the} spaces", '"and": [reads, on]'] * 9


def sentence_pieces() -> SentencePieceVocab:
    settings = SentencePiece(size=300, model_type="bpe", normalization="identity")
    vocab = make(settings, iter(LINES))
    assert isinstance(vocab, SentencePieceVocab)
    return vocab


@pytest.fixture(params=[sentence_pieces, byte_level, byte_fallback], scope="module")
def vocab(request: Any, tmp_path_factory: Any) -> Vocab:
    if request.param == sentence_pieces:
        return sentence_pieces()
    folder = tmp_path_factory.mktemp("vocab")
    request.param().save(str(folder / "tokenizer.json"))
    return make(TokenizerJson(path=str(folder), end="</s>"), iter(()))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_token_of_a_legal_text_is_allowed(vocab: Vocab, document: Any) -> None:
    grammar, text = Grammar(vocab, SCHEMA), json.dumps(document, ensure_ascii=False)
    for token in vocab.encode_continuation(text).tolist():
        allowed = grammar.allowed()
        assert allowed is not None and allowed[token] and not allowed[vocab.end_id], (text, token)
        grammar.add(token)
    allowed = grammar.allowed()
    assert allowed is not None and np.nonzero(allowed)[0].tolist() == sorted(vocab.stop_ids)


def test_whatever_allowed_tokens_come_the_text_is_of_the_schema(vocab: Vocab) -> None:
    first, rng, texts = Grammar(vocab, SCHEMA), np.random.default_rng(0), set()
    for _ in range(20):
        grammar, tokens = first.copy(), list[int]()
        while True:
            allowed = grammar.allowed()
            assert allowed is not None
            token = int(rng.choice(np.nonzero(allowed)[0]))
            if token == vocab.end_id:
                break
            tokens.append(token)
            grammar.add(token)
        text = vocab.text(tokens)
        jsonschema.validate(json.loads(text), SCHEMA)
        texts.add(text)
    assert len(texts) > 15


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "wat"}, "Invalid type: wat"),
        ({"$ref": "#/missing"}, "'/missing' does not exist"),
        ({"type": "string", "pattern": "(("}, "unclosed group"),
        ({"type": "integer", "multipleOf": 999_983}, "digits in multipleOf.  Legal: at"),
        (
            {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.983}]},
            "digits in multipleOf.  Legal: at",
        ),
        ({"properties": {f"{i}": {} for i in range(9001)}}, "characters with 0 digits"),
    ],
)
def test_a_schema_that_is_none_is_refused(vocab: Vocab, schema: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Grammar(vocab, schema)


def test_a_large_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, reads = sentence_pieces(), list[int]()
    hidden = vocab.control_ids
    monkeypatch.setattr(type(vocab), "control_ids", property(lambda _: reads.append(1) or hidden))
    Grammar(vocab, SCHEMA)
    assert len(reads) == 1


def test_a_vocabulary_without_text_is_refused() -> None:
    with pytest.raises(UserError, match="LabelVocab cannot"):
        Grammar(LabelVocab(b'["a", "b"]'), SCHEMA)


@pytest.mark.few(1)
@pytest.mark.parametrize("rules", ["", "batch:x;vocab:y"])
def test_some_texts_of_a_batch_are_json(rules: str) -> None:
    """The others are the texts that they are alone."""
    vocab = sentence_pieces()
    layout = Layout(mesh="x:2,y:2", rules=rules) if rules else WHOLE
    spec = dataclasses.replace(DECODER, vocab=320)
    engine = new_engine(4, 64, layout=layout, spec=spec, vocab=vocab)
    rng = np.random.default_rng(5)
    requests = [Request(rng.integers(5, 200, 3 + i).tolist(), 50, i) for i in range(6)]

    def run(jobs: list[Job]) -> list[Job]:
        service = ContinuousService(engine, step=0, queue=9)
        for job in jobs:
            service.submit([job])
            service.advance(service.next_jobs())
        while not all(job.is_done for job in jobs):
            service.advance(service.next_jobs())
        return jobs

    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        alone = run([Job(request, Sampling()) for request in requests])
        grammar, penalties = Grammar(vocab, SCHEMA), TokenPenalties(frequency=0.5)
        jobs = run(
            [
                Job(request, Sampling(), grammar=grammar.copy(), penalties=penalties)
                if i % 2
                else Job(request, Sampling())
                for i, request in enumerate(requests)
            ]
        )
    texts = [vocab.text(job.tokens) for job in jobs]
    for i, (job, before) in enumerate(zip(jobs, alone, strict=True)):
        if i % 2:
            jsonschema.validate(json.loads(texts[i]), SCHEMA)
            assert job.finish == "stop" and np.isfinite(job.log_probabilities).all()
        else:
            assert job.tokens == before.tokens


def test_a_vocabulary_without_the_letters_of_json_is_a_dead_end() -> None:
    settings = SentencePiece(size=40, model_type="bpe", byte_fallback=False)
    vocab = make(settings, iter(["the reader reads the end of the spaces"] * 9))
    engine = new_engine(2, 24, vocab=vocab)
    service = ContinuousService(engine, step=0, queue=9)
    job = Job(Request([5], 9), grammar=Grammar(vocab, SCHEMA))
    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        service.submit([job])
        for _ in range(3):
            service.advance(service.next_jobs())
    assert isinstance(job.failure, DeadEnd)


def test_a_token_of_json_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = sentence_pieces()
    engine = new_engine(1, 16, spec=dataclasses.replace(DECODER, vocab=320), vocab=vocab)

    def run() -> None:
        service = ContinuousService(engine, step=0, queue=9)
        job = Job(Request([5], 9), grammar=Grammar(vocab, SCHEMA))
        service.submit([job])
        while not job.is_done:
            service.advance(service.next_jobs())

    with jax.set_mesh(engine.mesh):
        engine.warm_up()
        run()
        monkeypatch.delattr(type(engine.model), "step")
        run()


def test_pieces_are_bytes_of_a_text() -> None:
    assert (bytes_of("▁a"), bytes_of("<0xF0>")) == (b" a", b"\xf0")
