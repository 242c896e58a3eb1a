"""Reads text and pairs from JSON Lines files."""

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from configs.errors import UserError, brief
from configs.json_reader import read_json
from configs.spec import spec
from data.sources import text_files
from data.sources.pair_kinds import FilePairs, Preferences
from data.sources.pairs import Pair
from data.sources.text import FileText


@spec
class JsonlText(FileText):
    """Reads text from files with one JSON object per line, plain, .gz, .xz or .zst."""

    field: str = "text"
    """Name of the field; "page.text" selects field text of field page."""

    has_newlines = True

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[str]:
        texts = (text for [text] in records(paths, [self.field], setting, errors))
        return text_files.with_text(texts, setting, "record")


@spec
class Jsonl(FilePairs):
    """Reads files with one JSON object per line, plain, .gz, .xz or .zst; two fields are a pair."""

    source_field: str
    """Name of the field to translate; "translation.de" selects field de of field translation."""
    target_field: str
    """Name of the field that holds the translation."""

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Pair]:
        fields = [self.source_field, self.target_field]
        return itertools.starmap(Pair, records(paths, fields, setting, errors))


@spec
class JsonlChats(FilePairs):
    """Reads chats for `@ChatTask()` from files of a JSON object per line, plain, .gz, .xz or .zst.

    A field holds the messages, each {"role": "user", "content": "Hi"}, or {"from": "human",
    "value": "Hi"} as in ShareGPT's files.
    """

    field: str = "messages"
    """Name of the field, such as "conversations"; a dot selects a nested field."""

    has_chats = True

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Pair]:
        """Yields chats as JSON, each with the text of all its answers."""
        for [chat] in records(paths, [self.field], setting, errors, chats=True):
            answers = [m for m in json.loads(chat) if m["role"] == "assistant"]
            said = (m.get("content") or str(m.get("tool_calls") or "") for m in answers)
            yield Pair(chat, "\n".join(said))


def messages_of(value: Any, name: str, place: str) -> str:
    """Returns the messages in a field as JSON, with the key names that OpenAI uses."""
    messages = list[dict[str, Any]]()
    for number, given in enumerate(field_of(value, name, place, list), 1):
        message = given if isinstance(given, dict) else {}
        if "from" in message and "role" not in message:
            role = {"human": "user", "gpt": "assistant"}.get(str(message["from"]), message["from"])
            message = {"role": role, "content": message.get("value")}
        message = {key: x for key, x in sorted(message.items()) if x is not None}
        texts = message.get("role"), message.get("content", "" if "tool_calls" in message else None)
        if not all(isinstance(text, str) for text in texts) or message.get("weight", 1) != 1:
            raise UserError(
                f"{place}, message {number} of field {name!r}: found {brief(repr(given))}.  Legal: "
                '{"role": "user", "content": "a text"}, or {"from": "human", "value": "a text"}; '
                "no weight except 1."
            )
        messages.append(message)
    if "assistant" not in (roles := {message["role"]: None for message in messages}):
        listed = ", ".join(map(repr, roles)) or "none"
        raise UserError(f"{place}: roles in field {name!r}: {listed}.  None is 'assistant'.")
    if unread := [key for key in ("tools", "system") if value.get(key)]:
        raise UserError(f"{place}: {unread[0]!r} is not supported.  Put it into a system message.")
    return json.dumps(messages, ensure_ascii=False)


def records(
    paths: Sequence[str], fields: Sequence[str], setting: str, errors: str, *, chats: bool = False
) -> Iterator[list[str]]:
    """Yields the texts of some fields, or chats as JSON, for each line that is not blank."""
    read = messages_of if chats else functools.partial(field_of, kind=str)

    def of_file(path: str) -> Iterator[list[str] | None]:
        for number, line in enumerate(text_files.read_lines(path, errors), 1):
            if not line.strip():
                yield None
                continue
            place = f"{path}, line {number}"
            try:
                value = read_json(line, object, place)
            except UserError as error:
                legal = f"one JSON object per line (found {brief(repr(line), 60)})"
                raise UserError(f"{error}  Legal: {legal}.") from None
            texts = [read(value, field, f"{place}: {setting}") for field in fields]
            for name, text in zip(fields, texts, strict=True):
                if errors == "strict" and text_files.LONE_SURROGATE.search(text):
                    raise UserError(
                        f"{place}: half a surrogate pair, such as \\ud800, is not text (field "
                        f"{name!r}).  Write the whole character."
                    )
            yield texts

    return text_files.of_files(paths, map(of_file, paths), setting, "line of JSON")


def field_of(value: Any, name: str, place: str, kind: type) -> Any:
    """Returns a field.  A dot leads into a nested field, unless a field's name contains the dot."""
    parent, is_missing = value, False
    is_whole_name = isinstance(value, dict) and name in value
    for part in [name] if is_whole_name else name.split("."):
        parent = value
        is_missing = not isinstance(value, dict) or part not in value
        value = None if is_missing else value[part]
    if not isinstance(value, kind):
        legal = brief(", ".join(parent)) if isinstance(parent, dict) else "none: not an object"
        given = "null" if value is None else type(value).__name__
        wanted = "text" if kind is str else "a list of messages"
        problem = "no such field" if is_missing else f"found {given}, legal: {wanted}"
        raise UserError(f"{place} needs field {name!r}: {problem}.  Its fields: {legal}.")
    return value


@spec
class JsonlPreferences(Preferences):
    """Reads preferences from files with one JSON object per line, plain, .gz, .xz or .zst."""

    texts = staticmethod(records)
