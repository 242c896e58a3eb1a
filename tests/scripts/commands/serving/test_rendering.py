"""A template that comes with a model cannot stop a server."""

import json
import multiprocessing

import pytest

from configs.errors import UserError
from data.tokenizers.chat_template import BadMessages
from scripts.commands.serving.rendering import LIMIT_CHARACTERS, TOO_MUCH, ChatRenderer

HI = [{"role": "user", "content": "hi"}]


def renderer(template: str) -> ChatRenderer:
    return ChatRenderer({"tokenizer_config.json": json.dumps({"chat_template": template})}, "</s>")


def test_chats_are_rendered_as_in_this_process() -> None:
    chats = renderer("{{ messages[0].content }} {{ shown }}{{ eos_token }}")
    assert chats.render(HI) == "hi </s>" and chats.render(HI, {"shown": 3}) == "hi 3</s>"
    with pytest.raises(BadMessages, match="no element 1"):
        renderer("{{ messages[1].content }}").render(HI)


def test_a_renderer_starts_again_where_something_ended_its_process() -> None:
    chats = renderer("{{ messages[0].content }}")
    assert chats.render(HI) == "hi"
    for wait in (True, False):
        for process in multiprocessing.active_children():
            process.kill()
            if wait:
                process.join()
        assert chats.render(HI) == "hi"


@pytest.mark.parametrize(
    ("hostile", "problem"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            TOO_MUCH,
        ),
        ("{{ 'a' * 10000000000 }}", "out of memory"),
        (f"{{{{ 'b' * {LIMIT_CHARACTERS + 1000} }}}}", TOO_MUCH),
    ],
)
def test_a_chat_that_takes_too_much_is_refused(hostile: str, problem: str) -> None:
    chats = renderer(f"{{% if messages[0].role == 'user' %}}{hostile}{{% endif %}}ok")
    with pytest.raises(BadMessages) as refused:
        chats.render(HI)
    assert str(refused.value) == problem
    assert chats.render([{"role": "system", "content": ""}]) == "ok"


def test_a_template_that_takes_too_much_to_compile_is_refused() -> None:
    with pytest.raises(UserError, match=r"^chat template: it takes more than"):
        renderer("{{ 7 ** 100000000 }}")
