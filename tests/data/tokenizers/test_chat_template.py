"""Chat templates: the text that Hugging Face's `apply_chat_template` makes of messages."""

import json

import pytest

from configs.errors import UserError
from data.tokenizers.chat_template import BadMessages, chat_template

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TURNS = """{% for message in messages %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
    {% if not message.content %}
        {% break %}
    {% endif %}
{%- generation %}[{{ message.content | tojson }}]
{% endgeneration %}
{% endfor %}
"""
CHAT = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "é"}]


def test_a_template_writes_the_turns_and_the_beginning_of_the_next():
    """As transformers 5.3 writes them."""
    config = json.dumps({"bos_token": {"content": "<s>"}, "pad_token": None})
    template = chat_template({"chat_template.jinja": LLAMA3, "tokenizer_config.json": config})
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
    assert template.render(CHAT) == (
        "<s>" + head.format("user", "hi<|eot_id|>") + head.format("assistant", "é<|eot_id|>")
        + head.format("assistant", "")
    )  # fmt: skip


def test_a_template_may_refuse_messages():
    template = chat_template({"tokenizer_config.json": json.dumps({"chat_template": TURNS})})
    assert template.render(CHAT) == '[" hi "]\n["é"]\n'
    assert template.render([*CHAT, {"role": "user", "content": ""}]) == '[" hi "]\n["é"]\n'
    with pytest.raises(BadMessages, match="Roles must alternate"):
        template.render(CHAT[1:])


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_reach_python(attack):
    with pytest.raises(BadMessages):
        chat_template({"chat_template.jinja": attack + "{{ undefined.x }}"}).render(CHAT)


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(BadMessages, match="surrogates not allowed"):
        chat_template({"chat_template.jinja": "{{ '\\ud800' }}"}).render(CHAT)


def test_the_template_named_default_is_taken():
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    config = {"tokenizer_config.json": json.dumps({"chat_template": named})}
    assert chat_template(config).render(CHAT) == "b"
    assert chat_template({}) is None and chat_template({"tokenizer_config.json": "{}"}) is None


def test_a_template_that_is_damaged_is_refused():
    with pytest.raises(UserError, match=r"chat template: cannot be read: .*endfor"):
        chat_template({"chat_template.jinja": "{% for m in messages %}"})


@pytest.mark.parametrize("text", [5, True, {"default": "a"}, [{"name": "default"}], ["a"], [5]])
def test_a_template_is_a_text(text):
    config = json.dumps({"chat_template": text})
    with pytest.raises(UserError, match=r"tokenizer_config.json: chat_template = .*Legal: a text"):
        chat_template({"tokenizer_config.json": config})


def test_special_tokens_may_be_in_a_file_of_their_own() -> None:
    files = {
        "chat_template.jinja": "{{ bos_token }}{{ eos_token }}",
        "special_tokens_map.json": '{"bos_token": "<a>", "eos_token": {"content": "<b>"}}',
        "tokenizer_config.json": '{"bos_token": "<c>"}',
    }
    template = chat_template(files)
    assert template is not None and template.render(CHAT) == "<c><b>"
