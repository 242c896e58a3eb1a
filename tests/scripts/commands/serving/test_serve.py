"""A server on a toy model: the openai client, every status, clients that misbehave, reloads."""

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from configs.errors import UserError
from scripts.benchmarks.serve import TEMPERATURE, LoadCase, cases_of, load
from scripts.commands.serving.launch import bound_socket, check_address
from tests.scripts.commands.serving.browser import PHONE, opened
from tests.scripts.commands.serving.client import WAIT_S, Client
from tests.scripts.commands.serving.servers import decoded, restored, serving
from tests.scripts.conftest import Place

PROMPTS = ["kara mitu", "lo", "lostu nevo kara mitu lora"]


@pytest.fixture(scope="module")
def running(trained: Place) -> Iterator[Client]:
    with serving(trained.folder / "run", queue=40) as client:
        yield client


@pytest.fixture(scope="module")
def client(running: Client) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{running.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_gets_what_decode_makes(
    running: Client, client: openai.OpenAI, trained: Place
) -> None:
    """Texts of all kinds at once."""
    searches = [
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 1.1, "top_k": 9, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 99, "top_p": 0.95},
    ]
    cases = [(prompt, search) for prompt in PROMPTS for search in searches]

    def complete(case: tuple[str, dict[str, Any]]) -> list[str]:
        prompt, search = case
        fields = {"seed": 0, **search}
        answer = client.completions.create(
            model="run", prompt=prompt, max_tokens=9, echo=True, n=2,
            extra_body={name: fields.pop(name, 0) for name in ("top_k", "min_p")}, **fields,
        )  # fmt: skip
        return [choice.text for choice in answer.choices]

    with ThreadPoolExecutor(len(cases)) as pool:
        texts = list(pool.map(complete, cases))
    with restored(trained.folder / "run") as model:
        for (prompt, search), choices in zip(cases, texts, strict=True):
            lines = decoded(model, [prompt] * 2, max_tokens=9, **search)
            assert choices == [best.text for [best] in lines]


def test_a_list_of_prompts_gets_what_decode_makes_of_a_file(
    running: Client, trained: Place
) -> None:
    """Equal prompts get different samples; a prompt may be given as tokens."""
    prompts, settings = [PROMPTS[0], PROMPTS[1], PROMPTS[0]], {"seed": 4, "max_tokens": 9}
    answer = running.post(prompt=prompts, temperature=1.2, echo=True, **settings)
    with restored(trained.folder / "run") as model:
        expected = decoded(model, prompts, temperature=1.2, **settings)
        tokens = [ids.tolist() for ids in model.vocabs.target.encode(prompts)]
    texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == [best.text for [best] in expected] and texts[0] != texts[2]
    same = running.post(prompt=tokens, temperature=1.2, echo=True, **settings)
    assert same.json["choices"] == answer.json["choices"] and same.json["usage"]
    one = running.post(prompt=tokens[0], temperature=1.2, echo=True, **settings)
    assert one.json["choices"] == answer.json["choices"][:1]


def test_nothing_is_compiled_for_a_request_like_one_before(running: Client) -> None:
    """Whatever its settings; a longer prompt needs another program."""

    def compilations(**fields: Any) -> float:
        assert running.post(max_tokens=4, **fields).status == 200
        return running.metric("meshloom_compilations_total")

    before = compilations(prompt="lo", temperature=0)
    assert compilations(prompt="kara", temperature=1.2, top_k=9, seed=5) == before
    assert compilations(prompt=[3] * 18) > before


def test_a_stream_adds_up_to_the_answer(running: Client, client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": "run", "prompt": PROMPTS[:2], "n": 2, "seed": 3, "max_tokens": 8, "echo": True,
    }  # fmt: skip
    whole = client.completions.create(**settings)
    texts, ends, used = [""] * 4, [""] * 4, None
    for part in client.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    ):
        assert used is None, "the last event alone has the usage"
        used = part.usage
        assert "usage" in part.model_fields_set
        for choice in part.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert used == whole.usage and used is not None
    assert used.completion_tokens <= 4 * 8
    assert len(set(texts[:2])) == 2  # the choices of a prompt differ


def test_what_comes_at_once_is_sent_at_once(running: Client) -> None:
    """Each chunk of the transfer begins an event; the last one has the ends of both texts."""
    text = json.dumps({"prompt": "lo", "n": 2, "max_tokens": 1, "stream": True})
    with socket.create_connection(("127.0.0.1", running.port), WAIT_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall((head + kind + text).encode())
        answer = b"".join(iter(lambda: connection.recv(9999), b"")).decode()
    chunks = [chunk for chunk in re.split(r"\r\n[0-9a-f]+\r\n", answer)[1:] if chunk.strip()]
    assert all(chunk.startswith("data: ") for chunk in chunks)
    assert chunks[-1].count('"finish_reason": "') == 2 and "data: [DONE]" in chunks[-1]


def test_log_probabilities_are_those_of_decode(running: Client, trained: Place) -> None:
    settings: dict[str, Any] = {"temperature": 1.4, "seed": 2, "max_tokens": 9, "min_tokens": 9}
    [choice] = running.post(prompt=PROMPTS[0], logprobs=0, **settings).json["choices"]
    with restored(trained.folder / "run") as model:
        [[best]] = decoded(model, PROMPTS[:1], **settings)
    assert len(choice["logprobs"]["tokens"]) == 9
    total = sum(choice["logprobs"]["token_logprobs"])
    np.testing.assert_allclose(total, best.log_probability, rtol=1e-4)


def test_clients_in_the_queue_get_the_texts_of_decode(running: Client, trained: Place) -> None:
    cases = [
        LoadCase(case.prompt[:8], max_tokens=4 + case.seed % 9, min_tokens=0, seed=case.seed)
        for case in cases_of(40)
    ]
    answers = load(running.port, cases, 12)
    decode: dict[str, Any] = {"temperature": TEMPERATURE}
    with restored(trained.folder / "run") as model:
        expected = [
            decoded(model, [case.prompt], seed=case.seed, max_tokens=case.max_tokens, **decode)
            for case in cases
        ]
    assert [answer.text for answer in answers] == [best.text for [[best]] in expected]


def test_a_stop_ends_the_text_before_it(running: Client) -> None:
    settings = {"prompt": "kara", "temperature": 0, "max_tokens": 12, "logprobs": 0}
    whole = running.post(**settings).json["choices"][0]
    stop = whole["text"][2:4]
    for streams in (False, True):
        answer = running.post(**settings, stop=[stop, "never"], stream=streams)
        if streams:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if "{" in line]
            choices = [event["choices"][0] for event in events]
            text, end = "".join(choice["text"] for choice in choices), choices[-1]
        else:
            [end] = answer.json["choices"]
            text = end["text"]
        assert text == whole["text"].partition(stop)[0] and end["finish_reason"] == "stop"
        assert len(end["logprobs"]["token_logprobs"]) < len(whole["logprobs"]["token_logprobs"])


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"prompt": "a", "temperature": "hot"}, 422, ["temperature = 'hot'", "from 0 to"]),
        ({"prompt": "a", "temperature": 1e39}, 422, ["temperature = 1e+39", "from 0 to 1000000"]),
        ({"prompt": "a", "top_k": 2**31}, 422, ["top_k = 2147483648", "from 0 to 2147483647;"]),
        ({"prompt": "a", "temperatur": 1}, 422, ["temperatur", "Did you mean temperature?"]),
        ({"prompt": "a", "max_tokens": 99}, 422, ["max_tokens = 99", "for a prompt of"]),
        ({"prompt": "kara " * 30}, 422, ["prompt = ", "at most 22"]),
        (
            {"prompt": "a", "max_tokens": 2, "min_tokens": 3},
            422,
            ["min_tokens = 3", "max_tokens, here 2"],
        ),
        ({"prompt": ["a", 3]}, 422, ["prompt", "a text or its tokens, or a list of 1 to 128"]),
        ({"prompt": [3, -1]}, 422, ["prompt = [3, -1]", "tokens from 0 to"]),
        ({"prompt": [[3], [10**6]]}, 422, ["prompt = [1000000]", "tokens from 0 to"]),
        ({"prompt": "a", "stop": ["b", "ab" * 501]}, 422, ["stop = ", "1 to 1,000 characters"]),
        ({"prompt": "a", "logprobs": 21}, 422, ["logprobs = 21", "from 0 to 20"]),
        ({"prompt": "a", "max_tokens": 0}, 422, ["max_tokens = 0", "or 0 with echo"]),
        ({"prompt": [3] * 24, "max_tokens": 0, "echo": True}, 422, ["prompt = ", "at most 23"]),
        ({"prompt": "a", "best_of": 3, "n": 4}, 422, ["best_of = 3", "from n = 4, without"]),
        ({"prompt": "a", "best_of": 3, "stream": True}, 422, ["best_of = 3", "without stream"]),
        ({"prompt": "a", "best_of": True}, 422, ["best_of = True", "an integer from n to 128"]),
        ({"prompt": "a", "best_of": 129}, 422, ["best_of = 129", "from n to 128"]),
        ({"prompt": "a", "frequency_penalty": 2.5}, 422, ["frequency_penalty = 2.5", "-2 to 2"]),
        ({"prompt": "a", "repetition_penalty": 0}, 422, ["repetition_penalty = 0", "above 0"]),
        ({"prompt": "a", "logit_bias": {"a": 1}}, 422, ["logit_bias = ", "numbers from -100"]),
        ({"prompt": "a", "logit_bias": {"05": 1, "5": 1}}, 422, ["logit_bias = ", "an object of"]),
        ({"prompt": "a", "logit_bias": {"3": 101}}, 422, ["logit_bias = ", "to 100"]),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, 422, ["logit_bias = ", "tokens from 0 to"]),
        ({"prompt": "a", "logit_bias": [3]}, 422, ["logit_bias = [3]", "an object of at most"]),
        ({"prompt": "a", "verbosity": "low"}, 422, ["verbosity = 'low'", "Legal: 'medium',"]),
        (
            {"prompt": "a", "stream_options": {"include_usage": "x"}},
            422,
            ["stream_options.include_usage = 'x'"],
        ),
        ({}, 422, ["prompt is missing"]),
        ({"prompt": "a", "model": "gpt"}, 404, ["'gpt'", "'run'"]),
        ({"prompt": "a", "model": "x" * 999}, 404, ["(1,001 characters)"]),
        ({"prompt": ["a"] * 7, "n": 6}, 422, ["n = 6", "at most 40 texts", "not 42"]),
        ({"prompt": ["a"] * 41}, 422, ["prompt = ['a', 'a'", "at most 40 texts", "not 41"]),
        ({"prompt": "a" * 1_000_001}, 413, ["1,000,000 bytes"]),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_a_bad_request_is_explained(
    running: Client, fields: dict[str, Any], status: int, words: list[str]
) -> None:
    answer = running.post(**fields)
    assert answer.status == status
    assert all(word in answer.json["error"]["message"] for word in words), answer.text


def test_a_prompt_that_leaves_little_room_is_continued_by_less(running: Client) -> None:
    fields: dict[str, Any] = {"prompt": "kara mitu lostu nevo", "temperature": 0}
    length = running.post(**fields, max_tokens=1).json["usage"]["prompt_tokens"]
    room = 23 - length  # of --max_length
    assert 0 < room < 16  # the default of max_tokens
    used = running.post(**fields, min_tokens=room).json["usage"]
    assert used["completion_tokens"] == room
    for name in ("max_tokens", "min_tokens"):
        answer = running.post(**fields, **{name: room + 1})
        assert answer.status == 422 and f"to {room} tokens for a prompt of {length}" in answer.text


def test_a_full_queue_refuses_more(running: Client) -> None:
    long: dict[str, Any] = {"prompt": "", "max_tokens": 22, "min_tokens": 22, "n": 40}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: running.post(**long), range(8)))
    refused = [answer for answer in answers if answer.status != 200]
    assert 0 < len(refused) < 8 and {answer.status for answer in refused} == {429}
    assert "40 more exceed --queue=40" in refused[0].json["error"]["message"]


def test_fields_that_change_nothing_are_taken(running: Client) -> None:
    fields = {
        "presence_penalty": 0,
        "best_of": 2,
        "logit_bias": {},
        "suffix": None,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "response_format": {"type": "text"},
        "stop": ["1", "2", "3", "4", "5"],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "repeat_penalty": 1.0,
    }
    options = {"include_obfuscation": False}
    answer = running.post(prompt="a", max_tokens=1, n=2, stream_options=options, **fields)
    assert answer.status == 200
    refused = {"ignore_eos": [True, 0], "skip_special_tokens": [False, 1], "repeat_penalty": [1.1]}
    for name, values in refused.items():
        for value in values:
            answer = running.post(prompt="a", max_tokens=1, **{name: value})
            assert answer.status == 422 and name in answer.json["error"]["message"], value


def test_penalties_and_biases_change_texts(running: Client, client: openai.OpenAI) -> None:
    """A text without any stays as it is, while others have some."""
    fields: dict[str, Any] = {"model": "run", "prompt": "kara", "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**fields, logprobs=1)
    token = running.post("/tokenize", prompt="mitu").json["tokens"][0]
    biased = client.completions.create(**fields, logit_bias={str(token): 100}, logprobs=1)
    [name] = {*biased.choices[0].logprobs.tokens}
    assert name.strip("\u2581") and "mitu".startswith(name.strip("\u2581"))
    once = client.completions.create(**fields, frequency_penalty=2, presence_penalty=2)
    repeated = client.completions.create(**fields, extra_body={"repetition_penalty": 0.01})
    assert len({x.choices[0].text for x in (plain, biased, once, repeated)}) == 4
    again = client.completions.create(**fields, logprobs=1).choices[0]
    assert again.text == plain.choices[0].text
    scores = (x.logprobs.token_logprobs for x in (again, plain.choices[0]))
    np.testing.assert_allclose(*scores, rtol=1e-5)


def test_a_text_has_the_form_of_a_schema(running: Client) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields: dict[str, Any] = {"prompt": "kara", "max_tokens": 20, "n": 4, "seed": 1}
    schema["x-guidance"] = {"whitespace_flexible": False}
    answer = running.post(**fields, response_format=form).json
    texts = [json.loads(choice["text"]) for choice in answer["choices"]]
    assert all(text in ([True], [False]) for text in texts)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


def test_garbage_does_no_harm(running: Client) -> None:
    for body in (b"\xff\xfe", b"[" * 100_000, b"{'prompt': 1}", b"", b'{"temperature": NaN}'):
        assert running.post_bytes(body).status in (400, 422)
    assert running.post_bytes(b'{"prompt": ""}', kind="text/plain").status == 415
    assert running.get("/v1/completions").status == 405
    assert running.get("/v1/nothing").status == 404
    assert running.post("/v1/translate", text="a").status == 404
    assert running.get("/health", Host="evil.example").status == 403
    assert running.get("/health", Host="LOCALHOST:80").status == 200
    with socket.create_connection(("127.0.0.1", running.port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Len")  # and no more
        assert running.get("/health").json == {"status": "ok"}
        assert running.post(prompt="a", max_tokens=1).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\0",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"{post} application/json\r\n\r\nnot a chunk\r\n",
        b"{post} text/plain\r\n\r\nnot a chunk\r\n",
    ],
    ids=("tls", "headers", "body", "body of a request that is refused"),
)
def test_what_is_no_http_gets_an_error_like_others(
    running: Client, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    data = data.replace(b"{post}", post + b"Content-Type:")
    with socket.create_connection(("127.0.0.1", running.port), WAIT_S) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 400 and answer.getheader("Content-Type") == "application/json"
        assert json.loads(answer.read())["error"]["message"] == "This is not valid HTTP/1.1."
        assert not connection.recv(1)
    assert running.get("/health").status == 200
    assert {record.levelname for record in caplog.records} <= {"WARNING"}  # no traceback


def test_a_long_path_is_shortened_in_its_error(running: Client) -> None:
    answer = running.get("/" + "a" * 9999)
    assert answer.status == 404 and len(answer.text) < 1000


def test_a_client_that_leaves_frees_its_slots(running: Client) -> None:
    for streams in (False, True):
        before = running.metric("meshloom_new_tokens_total")
        body = {"prompt": "", "max_tokens": 23, "min_tokens": 23, "n": 40, "stream": streams}
        text = json.dumps(body)
        head = [
            "POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(text)}",
            "Content-Type: application/json", "", text,
        ]  # fmt: skip
        with socket.create_connection(("127.0.0.1", running.port)) as gone:
            gone.sendall("\r\n".join(head).encode())
            while running.metric("meshloom_new_tokens_total") == before:
                time.sleep(0.001)
        running.wait_until_idle()
        assert running.metric("meshloom_new_tokens_total") < before + 40 * 23


def test_the_page_streams_by_keyboard_on_a_phone(running: Client, trained: Place) -> None:
    with opened(running, PHONE, "dark") as page:
        keyboard = page.keyboard  # the prompt has the focus
        keyboard.type("lo")
        for text in ("9", "2", "1.2", "", "", "5"):  # tokens, texts, temperature, ..., seed
            keyboard.press("Tab")
            keyboard.type(text)
        keyboard.press("Control+Enter")
        page.wait_for_selector("#answers[aria-busy=false] article")
        texts = page.locator("#answers .text").all_inner_texts()
        endings = page.locator("#answers .about").all_inner_texts()
        width, color = page.evaluate(
            "[document.documentElement.scrollWidth, getComputedStyle(document.body).color]"
        )
        keyboard.press("Shift+Tab")
        keyboard.type("2")  # top p, which is at most 1
        keyboard.press("Control+Enter")
        assert page.evaluate("document.activeElement.matches(':invalid')")
    with restored(trained.folder / "run") as model:
        lines = decoded(model, ["lo"] * 2, max_tokens=9, temperature=1.2, seed=5)
    assert texts == [best.text for [best] in lines]
    assert all(" tokens, log p -" in ending for ending in endings)
    assert width == PHONE and color == "rgb(232, 234, 237)"  # light on dark


def test_the_page_loads_nothing_else(running: Client) -> None:
    text = running.get("/").text
    assert not re.findall(r'(?:src|href)="(?!data:,")|url\(|@import', text)


def test_models_and_metrics(running: Client, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "run" and client.models.retrieve("run") == model
    about = model.model_dump()
    assert about["kind"] == "completion" and about["max_length"] == 23 and about["step"] == 4
    assert running.metric("meshloom_slots") == 8  # 3, rounded up to the devices


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(UserError, match=r"--host=0.0.0.0: .* MESHLOOM_TOKEN"):
        check_address("0.0.0.0", None)
    for token in ("", "sécret", "secret "):  # no client could send these
        with pytest.raises(UserError, match=r"--token: .* Legal: .* ASCII"):
            check_address("0.0.0.0", token)
    with pytest.raises(UserError, match=r"--token: it has 15 characters.*at least 16"):
        check_address("0.0.0.0", "a" * 15)
    check_address("0.0.0.0", "a" * 16)
    check_address("127.0.0.1", "secret")
    check_address("127.0.0.2", None)
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port={port}: .*in use"):
            bound_socket("127.0.0.1", port)


def test_tokens_of_a_text_and_back(running: Client, trained: Place) -> None:
    answer = running.post("/tokenize", prompt=PROMPTS[0])
    with restored(trained.folder / "run") as model:
        [ids] = model.vocabs.target.encode([PROMPTS[0]])
    assert answer.json["tokens"] == ids.tolist() and answer.json["count"] == len(ids)
    back = running.post("/detokenize", tokens=ids.tolist())
    assert back.json == {"prompt": PROMPTS[0]}
    turns = [*ids.tolist(), model.vocabs.target.end_id, *ids.tolist()]  # as those of a chat
    assert running.post("/detokenize", tokens=turns).json["prompt"].count(PROMPTS[0]) == 2
    refused = running.post("/detokenize", tokens=[3, 10**6])
    assert refused.status == 422 and "tokens = 1000000.  Legal: integers from 0 to" in refused.text
