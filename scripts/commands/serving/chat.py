"""Answers `POST /v1/chat/completions`: the next message of a chat."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from data.tokenizers.chat_template import BadMessages
from scripts.commands.serving.bodies import ChatBody
from scripts.commands.serving.completions import (
    AnswerChoice,
    ServedPrompt,
    answer,
    check_count,
    choices_of,
    served_decoder,
)
from scripts.commands.serving.errors import ApiError, bad_field
from scripts.commands.serving.exchange import read_body, tokenize

RENDERING = ThreadPoolExecutor(1, "chat")
"""One thread, as a template renders one chat at a time: the others wait for no other thread."""


class ChatForm:
    """Writes choices as messages."""

    id_prefix = "chatcmpl"
    whole, part = "chat.completion", "chat.completion.chunk"

    def choice(self, choice: AnswerChoice, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._entry(choice, "message", message)

    def delta(self, choice: AnswerChoice, text: str, *, first: bool) -> dict[str, Any]:
        message = {"role": "assistant"} if first else {}
        return self._entry(choice, "delta", message | ({"content": text} if text else {}))

    def begins(self) -> bool:
        return False

    def _entry(self, choice: AnswerChoice, name: str, message: dict[str, Any]) -> dict[str, Any]:
        entry = {"index": choice.index, name: message, "logprobs": None}
        return entry | {"finish_reason": choice.finish}


async def chat(request: Request) -> Response:
    """Writes the next message of a chat."""
    served = served_decoder(request)
    template = served.chat
    if template is None:
        raise ApiError(404, f"{served.name} has no chat template.  Legal: POST /v1/completions.")
    body = await read_body(request, ChatBody, served.limits)
    served.check_name(body.model)
    check_count(1, "messages", body.messages, body, served)
    messages = [message.for_template() for message in body.messages]
    try:
        text = await asyncio.get_running_loop().run_in_executor(
            RENDERING, template.render, messages
        )
    except BadMessages as error:
        raise bad_field("messages", messages, f"what the chat template takes ({error})") from None

    def choices() -> list[AnswerChoice]:
        vocab = served.vocabs.target
        [ids] = vocab.encode([text])
        if vocab.reads_begin and len(ids) and ids[0] == vocab.begin_id:
            ids = ids[1:]  # the model reads it anyway
        prompt = ServedPrompt("messages", messages, ids)
        room = served.max_length - len(prompt.ids)
        return choices_of([prompt], body, served, default_max_tokens=max(room, 1))

    return await answer(request, await tokenize([text], body.n, choices), body, ChatForm())
