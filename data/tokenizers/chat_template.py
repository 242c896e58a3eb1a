"""Renders the messages of a chat by the template that comes with a vocab of Hugging Face."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from configs.errors import UserError, brief

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"


class BadMessages(ValueError):
    """Says why a template refuses messages, such as two of a user in a row."""


class ChatTemplate:
    """Writes messages as the text that a model was trained on, up to where its answer begins.

    The variables and functions of a template are those of Hugging Face's `apply_chat_template`.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Answers]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"chat template: cannot be read: {brief(str(error))}.") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of a chat, with the beginning of the next answer."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True,
                **self._special_tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadMessages(brief(str(error))) from None


class _Answers(jinja2.ext.Extension):
    """Reads what is between `generation` and `endgeneration`, where templates mark answers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_template(files: Mapping[str, str]) -> ChatTemplate | None:
    """Returns the template among the files of a tokenizer; None where there is none."""
    config = json.loads(files.get(CONFIG, "{}"))
    text = files.get(TEMPLATE) or config.get("chat_template")
    if isinstance(text, list):  # templates by name
        by_name = {one.get("name"): one.get("template") for one in text}
        text = by_name.get("default")
    if not isinstance(text, str):
        return None
    tokens = {name: _content(token) for name, token in config.items() if name.endswith("_token")}
    return ChatTemplate(text, {name: token for name, token in tokens.items() if token is not None})


def _content(token: Any) -> str | None:
    """Returns the text of a special token, which may be an object that describes it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
