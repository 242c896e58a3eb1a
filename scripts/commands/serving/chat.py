"""Answers `POST /v1/chat/completions`: the next message of a chat."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response

from data.tokenizers.chat_template import BadMessages
from scripts.commands.serving import completions
from scripts.commands.serving.bodies import ApiError, ChatBody, bad_field
from scripts.commands.serving.completions import AnswerChoice
from scripts.commands.serving.exchange import read_body, tokenize

RENDERING = ThreadPoolExecutor(1, "chat")
"""One thread, as a template renders one chat at a time: the others wait for no other thread."""


async def chat(request: Request) -> Response:
    """Writes the next message of a chat."""
    served = completions.served_decoder(request)
    template = served.chat
    if template is None:
        raise ApiError(404, f"{served.name} has no chat template.  Legal: POST /v1/completions.")
    body = await read_body(request, ChatBody, served)
    served.check_name(body.model)
    completions.check_count(1, "messages", body.messages, body, served)
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
        prompt = completions.ServedPrompt("messages", messages, ids)
        room = served.max_length - len(prompt.ids)
        return completions.choices_of([prompt], body, served, default_max_tokens=max(room, 1))

    made = await tokenize([text], body.n, choices)
    return await completions.answer(request, made, body, completions.ChatForm())
