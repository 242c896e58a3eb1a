"""Renders the messages of a chat with the template of a Hugging Face tokenizer."""

import datetime
import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from configs.errors import UserError, brief
from data.tokenizers.tokenizer_json import CONFIG, SPECIAL_TOKENS, template_text

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that `chat_template_kwargs` cannot set."""


_MARKS = (f"\ufdd0{os.urandom(8).hex()}", f"\ufdd1{os.urandom(8).hex()}")
"""Surround answers while a chat is rendered; no text contains them."""

_UNMARKED = "and the template does not mark answers by {% generation %}"

Messages = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]
"""First character of each answer, and the one after its last."""


class BadMessages(ValueError):
    """Reports why a template refuses messages, such as two user messages in a row."""


class _Answers(jinja2.ext.Extension):
    """Marks what is between `generation` and `endgeneration` as an answer."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in _MARKS)
        self.environment.extend(marks_answers=True)
        return [jinja2.nodes.Scope([begin, *body, end])]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    """Returns the message of a template's error as one line that can be encoded."""
    words = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    kind = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return brief(words.rstrip(".") or kind)


def shared(text: str, other: str) -> str:
    """Returns what both texts begin with, without a part of a special token."""
    if other.startswith(text):
        return text
    return re.sub("<[^<>]*$", "", os.path.commonprefix([text, other]))  # noqa: RUF071


class ChatTemplate:
    """Renders messages as the text that a model was trained on, up to the start of its answer.

    A template has the variables and functions of Hugging Face's `apply_chat_template`.  As there,
    it runs in Jinja's sandbox, where it cannot reach Python.  Nothing limits its time here.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]):
        self._special_tokens = dict(special_tokens)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Answers]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except Exception as error:  # any type: the template decides what fails
            raise UserError(f"chat template: cannot be read: {_reason(error)}.") from None

    def render(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a chat, with the beginning of the next answer.

        `variables` are those of the template, such as enable_thinking.
        """
        return re.sub("|".join(_MARKS), "", self._render(messages, variables, begins=True))

    def answers(self, messages: Messages) -> tuple[str, Spans]:
        """Returns the text of a whole chat, and where the assistant's answers are in it.

        If a template does not mark them, an answer is what a message adds to the chat before it.
        """
        text = self._render(messages, None, begins=False)
        if getattr(self._template.environment, "marks_answers", False):
            parts = re.split("|".join(_MARKS), text)  # every second part is an answer
            ends = [*itertools.accumulate(map(len, parts))]
            return "".join(parts), [*zip(ends[::2], ends[1::2], strict=False)]
        spans, probe = Spans(), [*messages, {"role": "user", "content": "Hi"}]
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not i:
                raise BadMessages(f"it begins with an answer, {_UNMARKED}")
            later = self._render(probe, None, False) if message is messages[-1] else text
            so_far = self._render(messages[: i + 1], None, False)
            span = len(shared(self.render(messages[:i]), text)), len(shared(so_far, later).rstrip())
            # Some templates write the generation prompt after every message.
            is_open = not later.startswith(so_far) and so_far == self.render(messages[: i + 1])
            if is_open or message.get("content", "").strip() not in text[slice(*span)]:
                raise BadMessages(f"other messages change how an answer is written, {_UNMARKED}")
            spans.append(span)
        return text, spans

    def _render(self, messages: Messages, variables: Mapping[str, Any] | None, begins: bool) -> str:
        try:
            fixed = dict(zip(RESERVED, (messages, None, None, begins), strict=True))
            text = self._template.render({**self._special_tokens, **fixed, **(variables or {})})
            text.encode()  # raises if it contains half of a surrogate pair
        except Exception as error:  # any type: the template decides what fails
            raise BadMessages(_reason(error)) from None
        return text


def chat_template(files: Mapping[str, str], end: str = "") -> ChatTemplate | None:
    """Returns the template in a tokenizer's files; `end` is the end token if no file names one."""
    text = template_text(files)
    if text is None:
        return None
    tokens = {"eos_token": end} if end else {}
    settings = [json.loads(files.get(file, "{}")) for file in (SPECIAL_TOKENS, CONFIG)]
    for name, token in (settings[0] | settings[1]).items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return ChatTemplate(text, tokens)
