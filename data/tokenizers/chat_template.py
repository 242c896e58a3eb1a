"""Renders the messages of a chat by the template that comes with a vocab of Hugging Face."""

import contextlib
import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import UserError, brief

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
RENDERER = Path(__file__).with_name("chat_renderer.py")


class BadMessages(ValueError):
    """Reports why a template refuses messages, such as two of a user in a row."""


class ChatTemplate:
    """Writes messages as the text that a model was trained on, up to where its answer begins.

    The variables and functions of a template are those of Hugging Face's `apply_chat_template`.
    It runs in another process, whose time and memory are limited.  One thread uses it.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]):
        self._text, self._special_tokens = text, dict(special_tokens)
        self._process: subprocess.Popen[str] | None = None
        try:
            self._ask(text)
        except BadMessages as error:
            raise UserError(f"chat template: cannot be read: {error}.") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of a chat, with the beginning of the next answer."""
        return self._ask(self._text, self._special_tokens, messages)

    def _ask(self, *request: Any) -> str:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(RENDERER)], text=True, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            weakref.finalize(self, _end, self._process)
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            _end(self._process)
            self._process = None
            raise BadMessages("it takes too much time or memory")
        answer = json.loads(line)
        if "error" in answer:
            raise BadMessages(brief(answer["error"]))
        text: str = answer["text"]
        return text


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(BrokenPipeError), process:
        pass


def chat_template(files: Mapping[str, str]) -> ChatTemplate | None:
    """Returns the template among the files of a tokenizer, if there is one."""
    text = template_text(files)
    if text is None:
        return None
    tokens = {}
    for name, token in json.loads(files.get(CONFIG, "{}")).items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return ChatTemplate(text, tokens)


def template_text(files: Mapping[str, str]) -> str | None:
    """Returns the text of the template among the files of a tokenizer, if there is one."""
    text = files.get(TEMPLATE) or json.loads(files.get(CONFIG, "{}")).get("chat_template")
    named = text if isinstance(text, list) else [{"name": "default", "template": text}]
    try:
        text = {one["name"]: one["template"] for one in named}.get("default")
        if text is None or isinstance(text, str):
            return text
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"{CONFIG}: chat_template = {brief(repr(text))}.  Legal: a text, or a list of "
        '{"name": "default", "template": a text}.'
    )
