"""The texts of an answer: all of each, however its tokens come."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from starlette.requests import ClientDisconnect

from scripts.commands.serving.bodies import CompletionBody
from scripts.commands.serving.completions import AnswerChoice, CompletionForm, event, events
from scripts.commands.shared_flags import CheckpointFlags
from tests.data.test_vocab import Digits
from tests.scripts.commands.serving.client import Client
from tests.scripts.commands.serving.servers import restored, serving
from tests.scripts.conftest import Place, call
from tests.trainer.checkpoints.huggingface.test_convert import golden, write_model
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.decoder import Request
from trainer.decoding.text_stream import TextStream
from trainer.serving.service import Job


def choice_of(*stops: str, vocab: Digits | None = None) -> AnswerChoice:
    return AnswerChoice(0, Job(Request([4], 9)), TextStream(vocab or Digits(), [4], stops))


def test_a_text_that_ends_while_it_is_read_is_complete():
    class Interrupted(Digits):
        def _text(self, ids):
            if ids[-1:] == [5] and choice.job.finish is None:  # another thread adds the last token
                choice.job.tokens.append(6)
                choice.job.finish = "length"
            return super()._text(ids)

    choice = choice_of(vocab=Interrupted())
    choice.job.tokens.append(5)
    pieces = []
    while not choice.is_done:
        pieces.append(choice.update())
    assert pieces == ["5", "6"] and choice.finish == "length" and choice.new_tokens == 2


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
def test_a_stop_ends_the_same_text_however_many_tokens_come_at_once(at_once):
    """123 begins earlier than 2 and 34, but 2 is complete first."""
    choice, text = choice_of("34", "123", "2"), ""
    for token in range(0, 6, at_once):
        choice.job.tokens += [0, 1, 2, 3, 4, 5][token : token + at_once]
        text += choice.update()
    assert (text, choice.finish, choice.new_tokens) == ("01", "stop", 3)


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("stop_ids", "stops", "expected"),
    [
        ([3, 4], (), ("012", "stop", 4)),
        ([3], ("12",), ("0", "stop", 3)),
        ([1], ("12",), ("0", "stop", 2)),
        ([9], (), ("012345", "length", 6)),
    ],
)
def test_a_token_may_end_a_text_too(at_once, stop_ids, stops, expected):
    choice, text = choice_of(*stops), ""
    choice.text.stop_ids = stop_ids
    for token in range(0, 6, at_once):
        choice.job.tokens += [0, 1, 2, 3, 4, 5][token : token + at_once]
        choice.job.finish = "length" if token + at_once >= 6 else None
        text += choice.update()
    assert (text, choice.finish, choice.new_tokens) == expected


def test_a_stream_that_nobody_reads_ends_without_an_error():
    class Left:
        async def changes(self):
            yield
            raise ClientDisconnect

    async def sent(exchange: Any, served: Any = None) -> list[str]:
        body = CompletionBody(prompt="a", stream=True)
        form = CompletionForm(body, Digits())
        return [event async for event in events(exchange, [], {}, body, served, form)]

    assert asyncio.run(sent(Left())) == []


def test_an_event_is_one_line_for_every_client():
    """Python's str.splitlines, by which some clients read, knows more line ends than the format."""
    text = "a\nb\x85c\u2028d\u2029é"
    sent = event({"text": text})
    assert len(sent.splitlines()) == 2 and "é" in sent
    assert json.loads(sent.removeprefix("data: ")) == {"text": text}


def test_the_end_of_a_text_has_a_log_probability() -> None:
    """Clients drop the last token of an answer, and count those of the prompt."""
    choice = choice_of()
    job = choice.job
    job.tokens, job.log_probabilities, job.likeliest = [5], [-0.5, -0.25], [[(5, -0.5)]] * 2
    job.prompt_log_probabilities, job.prompt_likeliest = [], []
    job.end_id, job.finish = 1, "stop"
    text = choice.update()
    form = CompletionForm(CompletionBody(prompt=[4], echo=True, logprobs=1), Digits())
    made = form.choice(choice, text)
    assert made["text"] == "45"
    assert made["logprobs"]["token_logprobs"] == [None, -0.5, -0.25]
    assert len(made["logprobs"]["tokens"]) == len(made["logprobs"]["top_logprobs"]) == 3
    stopped = choice_of("5")
    stopped.job.tokens, stopped.job.log_probabilities = [5], [-0.5, -0.25]
    stopped.job.likeliest, stopped.job.end_id, stopped.job.finish = [[], []], 1, "stop"
    form = CompletionForm(CompletionBody(prompt=[4], logprobs=0), Digits())
    made = form.choice(stopped, stopped.update())
    assert made["logprobs"]["token_logprobs"] == [-0.5] and made["text"] == ""


LONGEST = 40


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    write_model(folder / "hf", golden()["llama"])
    assert call("import", "hf", f"--input={folder / 'hf'}", f"--model_dir={folder / 'llama'}") == 0
    return folder / "llama"


@pytest.fixture(scope="module")
def client(model_dir: Path) -> Iterator[Client]:
    with serving(model_dir, max_length=LONGEST) as client:
        yield client


def harness(prompts: list[list[int]], **changes: Any) -> dict[str, Any]:
    """The body that lm-evaluation-harness sends for log-likelihoods."""
    fields = {"model": "llama", "prompt": prompts, "temperature": 0, "max_tokens": 1}
    return {**fields, "logprobs": 1, "seed": 1234, "echo": True, **changes}


def forward(model: TrainedModel, text: list[int]) -> np.ndarray:
    """Log-probabilities after each token of a text: a plain pass in float32."""
    inputs = np.tile(np.array(text, np.int32), (8, 1))  # a row for each device
    batch = {
        "inputs_BL": inputs,
        "positions_BL": np.tile(np.arange(len(text), dtype=np.int32), (8, 1)),
        "segments_BL": np.ones_like(inputs),
    }
    with jax.set_mesh(model.mesh):
        network = model.model.network(model.params)
        x_BLD, softmax_VD = network(batch)[0], network.output_weights()
        return np.asarray(jax.nn.log_softmax(np.asarray(x_BLD)[0] @ np.asarray(softmax_VD).T))


def test_the_harness_gets_the_scores_of_a_plain_pass(client: Client, model_dir: Path) -> None:
    rng = np.random.default_rng(3)
    prompts = [[1, *rng.integers(3, 13, length).tolist()] for length in (4, 20, 1, 7)]
    answer = client.post(**harness(prompts)).json
    again = client.post(**harness(prompts, max_tokens=0, logprobs=20)).json
    stream = client.post(**harness(prompts[:1], stream=True)).text.splitlines()
    ends = [json.loads(line[6:]) for line in stream if line.startswith("data: {")]
    streamed, whole = (lists["choices"][0]["logprobs"] for lists in (ends[-1], answer))
    assert streamed["tokens"] == whole["tokens"]
    # One prompt alone and one of four are rounded differently: products have other shapes.
    np.testing.assert_allclose(
        streamed["token_logprobs"][1:], whole["token_logprobs"][1:], atol=1e-6
    )
    for alone, joint in zip(streamed["top_logprobs"][1:], whole["top_logprobs"][1:], strict=True):
        assert alone == pytest.approx(joint, abs=1e-6)
    assert again["usage"]["completion_tokens"] == 0
    greedy = 0
    with restored(model_dir) as model:
        for choice, scored, prompt in zip(
            answer["choices"], again["choices"], prompts, strict=True
        ):
            expected_LV = forward(model, prompt)
            own = expected_LV[np.arange(len(prompt) - 1), prompt[1:]]
            lists = choice["logprobs"]
            assert len(lists["tokens"]) == len(prompt) + 1
            assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
            np.testing.assert_allclose(lists["token_logprobs"][1:-1], own, atol=1e-4)
            best = expected_LV.max(axis=1)
            highest = [max(top.values()) for top in lists["top_logprobs"][1:]]
            np.testing.assert_allclose(highest, best, atol=1e-4)
            is_greedy = np.equal(lists["token_logprobs"][1:], highest)
            np.testing.assert_array_equal(is_greedy[:-1], own == best[:-1])
            assert is_greedy[-1]  # the new token
            greedy += is_greedy[:-1].sum()
            # A prompt that nothing follows has the same scores; there are 13 tokens to name.
            assert scored["finish_reason"] == "length"
            assert choice["text"].startswith(scored["text"])
            lists = scored["logprobs"]
            assert lists["tokens"] == choice["logprobs"]["tokens"][:-1]
            np.testing.assert_allclose(lists["token_logprobs"][1:], own, atol=1e-4)
            for tops, place_V in zip(lists["top_logprobs"][1:], expected_LV, strict=False):
                values = sorted(tops.values(), reverse=True)
                np.testing.assert_allclose(values[:13], -np.sort(-place_V)[:13], atol=1e-4)
    assert 0 < greedy < sum(map(len, prompts)) - len(prompts)


def test_the_best_of_several_samples_are_those_with_the_highest_mean_log_probability(
    client: Client,
) -> None:
    """Of each prompt: they are among the samples that the same seed gives in full."""
    fields: dict[str, Any] = {"prompt": [[3, 4], [5]], "seed": 7, "logprobs": 1, "max_tokens": 6}
    every = client.post(**fields, n=5)
    best = client.post(**fields, n=2, best_of=5)
    assert best.json["usage"] == every.json["usage"]
    assert [choice["index"] for choice in best.json["choices"]] == [0, 1, 2, 3]
    for prompt in range(2):
        samples = every.json["choices"][5 * prompt : 5 * prompt + 5]
        samples.sort(key=lambda sample: -np.mean(sample["logprobs"]["token_logprobs"]))
        chosen = best.json["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in chosen] == [s["text"] for s in samples[:2]]
        for choice, sample in zip(chosen, samples, strict=False):
            scores, expected = (c["logprobs"]["token_logprobs"] for c in (choice, sample))
            assert scores == pytest.approx(expected, rel=1e-4)
    assert len(client.post(**fields | {"logprobs": None}, best_of=5).json["choices"]) == 2


def test_a_text_has_the_score_of_meshloom_score(
    client: Client, model_dir: Path, tmp_path: Path
) -> None:
    """The end of a line, which `score` counts, is one more token."""
    lines = ["a b c", "d", "j i h g f e"]
    (tmp_path / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
    files = f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'scores.tsv'}"
    assert call("score", f"--model_dir={model_dir}", *files) == 0
    rows = (tmp_path / "scores.tsv").read_text().splitlines()
    expected = [float(row.split("\t")[0]) for row in rows[-len(lines) :]]
    with restored(model_dir) as model:
        vocab = model.vocabs.target
        texts = [[vocab.begin_id, *ids.tolist(), vocab.end_id] for ids in vocab.encode(lines)]
    answer = client.post(**harness(texts, max_tokens=0, logprobs=0)).json
    sums = [sum(choice["logprobs"]["token_logprobs"][1:]) for choice in answer["choices"]]
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert {choice["logprobs"]["top_logprobs"] for choice in answer["choices"]} == {None}


def test_texts_of_a_prompt_share_its_scores(client: Client) -> None:
    """Beside texts that ask for none; a prompt may fill all places, if nothing follows."""
    answer = client.post(**harness([[1, 3, 4]], n=2, temperature=1, max_tokens=4, logprobs=2))
    first, second = (choice["logprobs"] for choice in answer.json["choices"])
    assert first["token_logprobs"][:3] == second["token_logprobs"][:3]
    assert first["token_logprobs"] != second["token_logprobs"]
    assert all(2 <= len(top) <= 3 for top in first["top_logprobs"][1:])
    full = client.post(**harness([[3] * LONGEST], max_tokens=0)).json["choices"][0]
    assert len(full["logprobs"]["token_logprobs"]) == LONGEST
    plain = client.post(**harness([[3] * 5], max_tokens=0, logprobs=None)).json["choices"][0]
    assert plain["logprobs"] is None and plain["text"] == "a a a a a"


def test_a_begin_token_that_a_client_sends_is_not_read_twice(trained: Place) -> None:
    """Under a layout that splits the batch.  Then the first token of the text has a score, too."""
    with serving(trained.folder / "run") as client, restored(trained.folder / "run") as model:
        vocab = model.vocabs.target
        ids = vocab.encode(["kara mitu"])[0].tolist()
        prompts = {"text": "kara mitu", "ids": ids, "begun": [vocab.begin_id, *ids]}
        settings = {"temperature": 0, "max_tokens": 3, "min_tokens": 3, "logprobs": 1, "echo": True}
        text, alone, begun = (
            client.post(prompt=prompt, **settings).json["choices"][0] for prompt in prompts.values()
        )
        expected_LV = forward(model, [vocab.begin_id, *ids[:-1]])
    assert vocab.reads_begin and text["text"] == alone["text"] == begun["text"]
    own = expected_LV[np.arange(len(ids)), ids]
    lists, alone, begun = (choice["logprobs"] for choice in (text, alone, begun))
    assert lists["tokens"] == alone["tokens"] == begun["tokens"][1:]
    assert lists["tokens"][: len(ids)] == vocab.pieces(ids)
    np.testing.assert_allclose(lists["token_logprobs"][1 : len(ids)], own[1:], atol=1e-4)
    assert lists["token_logprobs"][0] is begun["token_logprobs"][0] is None
    np.testing.assert_allclose(begun["token_logprobs"][1], own[0], atol=1e-4)
    for scores in (alone["token_logprobs"][1:], begun["token_logprobs"][2:]):
        np.testing.assert_allclose(scores, lists["token_logprobs"][1:], rtol=1e-5)
    assert [*map(set, begun["top_logprobs"][2:])] == [*map(set, lists["top_logprobs"][1:])]


def test_tokens_that_stop_a_text(client: Client) -> None:
    """Here "a"; the tokens before it are beyond those of the tokenizer, and have no text."""
    settings = {"prompt": [1, 4, 6], "temperature": 0, "max_tokens": 8, "min_tokens": 8}
    whole = client.post(**settings, logprobs=0).json["choices"][0]
    at = whole["logprobs"]["tokens"].index("a")
    [number] = client.post("/tokenize", prompt="a").json["tokens"]
    stopped = client.post(**settings, stop_token_ids=[number, 9]).json
    [choice] = stopped["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert stopped["usage"]["completion_tokens"] == at + 1 < 8
    refused = client.post(**settings, stop_token_ids=[10_000])
    assert refused.status == 422 and "stop_token_ids" in refused.text


def test_samples_are_ranked_by_the_suffix_behind_them(client: Client, model_dir: Path) -> None:
    """As a plain pass over prompt, text and suffix scores it, also after a text that stopped."""
    prompt, suffix = [1, 4, 6], "c a"
    fields: dict[str, Any] = {"prompt": prompt, "seed": 2, "logprobs": 0, "temperature": 2}
    fields |= {"max_tokens": 5, "stop": ["g"], "rescore_suffix": suffix}
    every = client.post(**fields, n=6).json["choices"]
    assert len({choice["text"] for choice in every}) > 3
    stopped = [choice for choice in every if "g" in choice["logprobs"]["tokens"][-1]]
    assert 0 < len(stopped) < len(every)
    with restored(model_dir) as model:
        vocab = model.vocabs.target
        ids = vocab.encode_continuation(suffix).tolist()
        numbers = {
            piece: i for i, piece in enumerate(vocab.pieces(range(model.run.model.vocab_rows)))
        }
        for choice in every:
            pieces = choice["logprobs"]["tokens"]
            text = [numbers[piece] for piece in pieces if numbers[piece] not in vocab.stop_ids]
            if choice in stopped:  # its text ends before the stop
                text = vocab.encode_continuation(choice["text"]).tolist()
            log_p_LV = forward(model, [*prompt, *text, *ids])
            expected = np.mean([log_p_LV[i - len(ids) - 1, t] for i, t in enumerate(ids)])
            assert choice["suffix_log_probability"] == pytest.approx(expected, abs=1e-4)
    scores = [choice["suffix_log_probability"] for choice in every]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1
    best = client.post(**fields, best_of=6).json["choices"]
    assert [choice["text"] for choice in best] == [every[0]["text"]]
    for wrong, words in (
        ({"rescore_suffix": ""}, "rescore_suffix = ''"),
        ({"stream": True}, "tokens, without stream"),
        ({"rescore_suffix": "a " * 50}, f"1 to {LONGEST - 2} tokens"),
        ({"max_tokens": LONGEST - 3}, f"1 to {LONGEST - 3 - len(ids)} tokens"),
    ):
        answer = client.post(**fields | wrong)
        assert answer.status == 422 and words in answer.text, answer.text


def test_a_prompt_that_begins_as_an_earlier_one_is_read_from_there_on(model_dir: Path) -> None:
    """The usage of an answer counts what was read before, and the text is that of the first."""
    flags = CheckpointFlags(model_dir=model_dir, gin_param=("Layout.rules=''",))
    prompt = np.random.default_rng(5).integers(3, 13, 70).tolist()
    fields: dict[str, Any] = {"max_tokens": 9, "min_tokens": 9, "seed": 1}
    with serving(model_dir, max_length=140, model=flags) as client:
        first = client.post(prompt=prompt, n=2, **fields).json
        again = client.post(prompt=prompt, n=2, **fields).json
        turn = client.post(prompt=[*prompt, 4, 5, 6], **fields).json
        other = client.post(prompt=[*reversed(prompt)], **fields).json
    cached = [
        each["usage"]["prompt_tokens_details"]["cached_tokens"]
        for each in (first, again, turn, other)
    ]
    # The last token is read where a text begins, and one before it so that something is.
    assert cached == [0, len(prompt) - 2, len(prompt) - 1, 0]
    assert first["choices"] == again["choices"]
    with serving(model_dir, max_length=140, model=flags, cached_prompts=0) as client:
        whole = client.post(prompt=[*prompt, 4, 5, 6], **fields).json
    assert whole["choices"] == turn["choices"]
