"""Chats of an imported model: the messages go through its template; the answer is `decode`'s."""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.scripts.commands.serving.browser import opened
from tests.scripts.commands.serving.client import Client
from tests.scripts.commands.serving.servers import decoded, restored, serving
from tests.scripts.conftest import call
from tests.trainer.checkpoints.huggingface.test_convert import golden, write_model

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
    {{- raise_exception('Unknown role ' + message.role) }}
{%- endif %}
{{- message.content }}</s>
{%- endfor %}
{%- if add_generation_prompt %} j{% endif %}{% if thinks %} a b{% endif %}
{%- for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"""
CHAT = [
    {"role": "user", "content": "a b"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "c "}, {"type": "text", "text": "d"}],
    },
    {"role": "user", "content": "e"},
]


def schema(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": content}}


PROMPT = "<s>a b</s>c d</s>e</s> j"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, run = tmp_path_factory.mktemp("chat") / "llama", tmp_path_factory.mktemp("chat_run")
    write_model(folder, golden()["llama"])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert call("import", "hf", f"--input={folder}", f"--model_dir={run / 'llama'}") == 0
    return run / "llama"


@pytest.fixture(scope="module")
def client(model_dir: Path) -> Iterator[Client]:
    with serving(model_dir, max_length=32) as client:
        yield client


def test_the_openai_client_gets_what_decode_makes_of_the_rendered_chat(
    client: Client, model_dir: Path
) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none")
    settings: dict[str, Any] = {
        "model": "llama", "messages": CHAT, "max_completion_tokens": 6, "n": 2, "seed": 3,
        "temperature": 1.5, "extra_body": {"min_tokens": 6},
    }  # fmt: skip
    answer = api.chat.completions.create(**settings)
    with restored(model_dir) as model:
        [prompt] = model.vocabs.target.encode([PROMPT])
        texts = decoded(model, [PROMPT] * 2, max_tokens=6, min_tokens=6, temperature=1.5, seed=3)
        expected = [best.text.removeprefix(model.vocabs.target.text(prompt)) for [best] in texts]
    assert [choice.message.content for choice in answer.choices] == expected and all(expected)
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    assert answer.object == "chat.completion" and answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    streamed, roles = ["", ""], [list[str | None](), list[str | None]()]
    for part in api.chat.completions.create(**settings, stream=True):
        assert part.object == "chat.completion.chunk"
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index].append(choice.delta.role)
    assert streamed == expected
    assert all(first == "assistant" and not any(rest) for first, *rest in roles)


def test_the_openai_client_sends_an_answer_back(client: Client) -> None:
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none")
    first = api.chat.completions.create(model="llama", messages=CHAT, max_tokens=3, seed=1)
    answer = first.choices[0].message

    def usage(*messages: Any) -> Any:
        made = api.chat.completions.create(
            model="llama", messages=[*messages], max_tokens=1, temperature=0
        )
        return made.usage.prompt_tokens

    plain = {"role": "assistant", "content": answer.content}
    user: dict[str, Any] = {"role": "user", "content": "e"}
    sent = usage(CHAT[0], plain, user)
    assert usage(CHAT[0], answer, {**user, "name": "Ada"}) == sent
    assert usage(CHAT[0], answer.model_dump(), user) == sent
    empty = {"refusal": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    assert usage(CHAT[0], {**plain, **empty}, user) == sent
    nothing = {**answer.model_dump(), "content": None}
    assert usage(CHAT[0], nothing, user) == usage(CHAT[0], {**plain, "content": ""}, user)


RECORDED = json.loads((Path(__file__).parents[3] / "golden" / "client_requests.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_other_clients_are_answered(client: Client, name: str) -> None:
    """As openai 3.54, LiteLLM 1.110 and langchain-openai 1.7 send them, or as others' code does."""
    for request in RECORDED[name]:
        fields = request["body"]
        answer = client.post(request["path"], **{"max_tokens": 3, **fields})
        assert answer.status == 200, (fields, answer.text)


def test_the_template_reads_the_tools(client: Client, model_dir: Path) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "bd"]
    with restored(model_dir) as model:
        [prompt] = model.vocabs.target.encode([f"{PROMPT} b d"])
    answer = client.post("/v1/chat/completions", messages=CHAT, tools=tools, max_tokens=1)
    assert answer.json["usage"]["prompt_tokens"] == len(prompt)


def test_an_option_of_streams_may_be_null(client: Client) -> None:
    fields = {"messages": CHAT, "max_tokens": 1, "stream_options": {"include_usage": None}}
    assert client.post("/v1/chat/completions", **fields).status == 200


def test_an_answer_may_fill_what_the_chat_leaves(client: Client) -> None:
    answer = client.post("/v1/chat/completions", messages=CHAT, temperature=1, seed=1)
    used = answer.json["usage"]
    assert answer.json["choices"][0]["finish_reason"] == "stop" or used["total_tokens"] == 32
    for name in ("min_tokens", "max_tokens", "max_completion_tokens"):
        long = client.post("/v1/chat/completions", messages=CHAT, **{name: 99})
        assert long.status == 422 and long.json["error"]["message"].startswith(f"{name} = 99.")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "wizard", "content": "a"}]}, ["Unknown role wizard"]),
        ({"messages": []}, ["messages = []", "1 to 1024"]),
        ({"messages": [{"role": "user"}]}, ["messages", '"content": a text']),
        ({"messages": [{"role": "user", "content": "a " * 40}]}, ["messages = ", "at most 31"]),
        ({"messages": [{"role": "user", "content": None}]}, ["messages.0", '"content": a text']),
        ({"messages": [{"content": "a"}]}, ["messages.0 = {'content': 'a'}"]),
        (
            {"messages": [{**CHAT[1], "tool_calls": [{"id": "a"}]}]},
            ["messages.0.tool_calls = [{'id': 'a'}]", "null, which changes nothing"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            [
                "messages.0.content = [{'type': 'image_url'}]",
                'a text, or a list of one or more {"type": "text"',
            ],
        ),
        (
            {"messages": CHAT, "chat_template_kwargs": {"messages": []}},
            [
                "chat_template_kwargs = 'messages'",
                "variables of the chat template besides messages",
            ],
        ),
        ({"messages": CHAT, "tools": ["f"]}, ["tools = ", "a list of at most 1024 objects"]),
        ({"messages": CHAT, "tool_choice": "required"}, ["tool_choice = 'required'", "'auto'"]),
        (
            {"messages": CHAT, "response_format": {"type": "json_schema"}},
            ["response_format = {'type': 'json_schema'}", '"json_schema": {"schema": …}}'],
        ),
        (
            {"messages": CHAT, "response_format": schema({}), "min_tokens": 2},
            ["min_tokens = 2", "0 with response_format"],
        ),
        (  # the toy's tokenizer.json does not say how tokens become text
            {"messages": CHAT, "response_format": {"type": "json_object"}},
            ["response_format: TokenizerJsonVocab (", "cannot restrict texts"],
        ),
        ({"messages": CHAT, "tool_choice": "required"}, ["tool_choice = 'required'", "'none' or"]),
        ({"messages": CHAT, "logprobs": True}, ["logprobs = True", "false"]),
        ({"prompt": "a"}, ["messages is missing"]),
    ],
    ids=lambda value: "",
)
def test_a_bad_chat_is_explained(client: Client, fields: dict[str, Any], words: list[str]) -> None:
    answer = client.post("/v1/chat/completions", **fields)
    assert answer.status == 422
    assert all(word in answer.json["error"]["message"] for word in words), answer.text


def test_the_page_keeps_the_turns_of_a_chat(client: Client) -> None:
    with opened(client) as page:
        sent = list[Any]()
        page.on("request", lambda request: sent.append(request.post_data_json))
        page.fill("#system", "b")
        for count, text in enumerate(("a", "c"), 1):
            page.fill("#text", text)
            page.keyboard.press("Control+Enter")
            page.wait_for_selector(f"#answers[aria-busy=false] article:nth-child({2 * count})")
        texts = page.locator("#answers .text").all_text_contents()
        page.click("#new")
        assert page.locator("#answers article").count() == 0
    assert sent[1]["messages"] == [
        {"role": "system", "content": "b"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "c"},
    ]
    assert texts[2] == "c" and len(texts) == 4


def test_models_tell_whether_they_chat(client: Client) -> None:
    assert json.loads(client.get("/v1/models/llama").text)["chat"] is True


def test_variables_reach_the_chat_template(client: Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = client.post("/v1/chat/completions", messages=CHAT, max_tokens=1, **fields)
        return int(answer.json["usage"]["prompt_tokens"])

    more = prompt_tokens(chat_template_kwargs={"thinks": True})
    assert more > prompt_tokens(chat_template_kwargs={"thinks": False}) == prompt_tokens()


def test_a_chat_that_takes_long_keeps_to_the_limits_of_the_server(tmp_path: Path) -> None:
    """Others get no answer in time or are refused, and those who left are skipped."""
    folder = tmp_path / "llama"
    write_model(folder, golden()["llama"])
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = """{% set text = messages[0].content %}
    {%- if text == 'half' %}{{ raise_exception('\\ud800.') }}{% endif %}
    {%- if text == 'loop' %}LOOP{% endif %}{{ text }}"""
    (folder / "chat_template.jinja").write_text(template.replace("LOOP", loop))
    assert call("import", "hf", f"--input={folder}", f"--model_dir={tmp_path / 'run'}") == 0

    with serving(tmp_path / "run", max_length=32, time_limit_s=1.0, queue=3) as client:

        def status(content: str) -> int:
            messages = [{"role": "user", "content": content}]
            path = "/v1/chat/completions"
            return client.post(path, messages=messages, max_tokens=1).status

        assert status("half") == 422
        with ThreadPoolExecutor(4) as pool:
            answers = [*pool.map(status, ["loop"] * 4)]
        assert sorted(answers) == [429, 504, 504, 504]
        for _ in range(9):  # one loop still runs
            for process in multiprocessing.active_children():
                process.kill()
            if (answer := status("a b")) != 504:
                break
        assert answer == 200
