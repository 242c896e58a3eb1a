"""Defines the routes of the server, and answers all but `POST /v1/completions`."""

import asyncio
import dataclasses
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from configs.errors import UserError, brief
from data.sources.pairs import chosen_tag, tagged
from data.tokenizers.chat_template import RESERVED, BadMessages
from scripts.commands.serving import bodies, completions
from scripts.commands.serving.bodies import ApiError, bad_field, too_late
from scripts.commands.serving.completions import AnswerChoice, complete
from scripts.commands.serving.exchange import PendingAnswer, ServedModel, read_body, tokenize
from trainer.decoding.requests import Hypothesis, is_blank, to_hypothesis, translation_requests
from trainer.serving.service import Job

FAILED = ApiError(500, "The server failed; its log says why.")
PAGE = Path(__file__).with_name("page.html").read_text()
PAGE_HEADERS = {
    # Only code in the page itself runs, and it can connect only to this server.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
RENDERING = ThreadPoolExecutor(1, "chat")
"""One thread: a chat may still be rendered after its client's time is up."""


async def translate(request: Request) -> Response:
    """Answers `POST /v1/translate` with the best hypotheses for each text."""
    served: ServedModel = request.app.state.served
    if not served.translates:
        raise ApiError(404, f"{served.name} continues prompts.  Legal: POST /v1/completions.")
    body, served = await read_body(request, bodies.TranslationBody)
    if body.n > served.width:
        raise bad_field("n", body.n, f"an integer from 1 to {served.width}, the beam size")
    jobs = await tokenize(body.texts, 1, lambda: jobs_of(body, served))
    running = [job for job in jobs if not is_blank(job.request, served.vocabs)]
    if len(running) > (limit := served.service.queue_limit):
        raise bad_field("text", body.text, f"at most {limit} texts, not {len(running)}: --queue")
    async with PendingAnswer(request, served.service, running, served.time_limit_s) as exchange:
        async for _ in exchange.changes():
            pass  # until all jobs are done
    return JSONResponse(
        {
            "id": f"trans-{secrets.token_hex(12)}",
            "object": "translation",
            "model": served.name,
            "translations": [
                {
                    "source": text,
                    "hypotheses": [
                        to_hypothesis(job.request, one, served.vocabs)._asdict()
                        for one in job.hypotheses[: body.n]
                    ]
                    or [Hypothesis("", 0.0, 0.0)._asdict()],  # for an empty source
                }
                for text, job in zip(body.texts, jobs, strict=True)
            ],
            "system_fingerprint": served.fingerprint(running),
        }
    )


def jobs_of(body: bodies.TranslationBody, served: ServedModel) -> list[Job]:
    """Makes a job for each text."""
    task, vocabs = served.run.task, served.vocabs
    try:
        tag = chosen_tag(body.tag, task.tags)
    except UserError:
        legal = f"one of {', '.join(task.tags)}" if task.tags else "none: the task has no tags"
        raise bad_field("tag", body.tag, legal) from None
    encoded = vocabs.of_source.encode([tagged(text, tag) for text in body.texts])
    for text, ids in zip(body.texts, encoded, strict=True):
        if len(ids) + 1 > served.max_length:
            legal = f"a text of at most {served.max_length - 1} tokens, not {len(ids)}"
            raise bad_field("text", text, legal)
    if body.max_tokens is not None and body.max_tokens > (most := served.max_new_tokens):
        raise bad_field("max_tokens", body.max_tokens, f"an integer from 1 to {most}")
    options = dataclasses.replace(
        served.options, tag=body.tag, max_tokens=body.max_tokens or served.options.max_tokens
    )
    requests = translation_requests(body.texts, task, vocabs, options, served.run.model.max_length)
    return [Job(request) for request in requests]


async def chat(request: Request) -> Response:
    """Answers `POST /v1/chat/completions` with the next message of a chat."""
    served = completions.served_decoder(request)
    if (template := served.chat) is None:
        raise ApiError(404, f"{served.name} has no chat template.  Legal: POST /v1/completions.")
    body, served = await read_body(request, bodies.ChatBody)
    completions.check_count(1, "messages", body.messages, body, served)
    messages = [message.for_template() for message in body.messages]
    if taken := [name for name in RESERVED if name in body.chat_template_kwargs]:
        legal = f"variables of the chat template besides {', '.join(RESERVED)}"
        raise bad_field("chat_template_kwargs", taken[0], legal)
    variables = body.chat_template_kwargs | ({"tools": body.tools} if body.tools else {})
    if template.waiting >= (limit := served.service.queue_limit):
        raise ApiError(429, f"{limit:,} chats wait, --queue={limit}.  Try again later.")
    template.waiting += 1
    try:
        async with asyncio.timeout(served.time_limit_s), template.turn:
            if await request.is_disconnected():
                raise ClientDisconnect
            text = await asyncio.get_running_loop().run_in_executor(
                RENDERING, template.render, messages, variables
            )
    except TimeoutError:
        raise too_late(served.time_limit_s) from None
    except BadMessages as error:
        given = [name for name in ("chat_template_kwargs", "tools") if getattr(body, name)]
        field, value = ("messages", messages) if not given else (given[0], getattr(body, given[0]))
        raise bad_field(field, value, f"what the chat template accepts ({error})") from None
    finally:
        template.waiting -= 1

    def choices() -> list[AnswerChoice]:
        vocab = served.vocabs.target
        [ids] = vocab.encode([text])
        if vocab.reads_begin and len(ids) and ids[0] == vocab.begin_id:
            ids = ids[1:]  # the model reads it anyway
        prompt = completions.ServedPrompt("messages", messages, ids)
        room = served.max_length - len(prompt.ids)
        return completions.choices_of([prompt], body, served, default_max_tokens=max(room, 1))

    made = await tokenize([text], body.n, choices, is_long=bool(body.response_format))
    return await completions.answer(request, served, made, body, completions.ChatForm())


async def tokens_of(request: Request) -> Response:
    """Answers `POST /tokenize` with the tokens of a text, as a completion reads them."""
    body, served = await read_body(request, bodies.TokenizeBody)
    vocab = served.vocabs.of_source if served.translates else served.vocabs.target
    text = body.prompt if served.translates else served.run.task.prompt(body.prompt)
    [ids] = await tokenize([text], 1, lambda: vocab.encode([text]))
    answer = {"count": len(ids), "max_model_len": served.max_length, "tokens": [*map(int, ids)]}
    return JSONResponse(answer)


async def text_of(request: Request) -> Response:
    """Answers `POST /detokenize` with the text of tokens."""
    body, served = await read_body(request, bodies.DetokenizeBody)
    vocab = served.vocabs.target
    if unknown := [token for token in body.tokens if not 0 <= token < vocab.size]:
        raise bad_field("tokens", unknown[0], f"integers from 0 to {vocab.size - 1}")
    return JSONResponse({"prompt": vocab.text(body.tokens)})


async def page(request: Request) -> Response:
    """Returns the page for trying out the model."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


async def models(request: Request) -> Response:
    """Describes the model, and the model with each of its adapters."""
    served: ServedModel = request.app.state.served
    described = [each.describe() for each in (served, *served.adapted)]
    return JSONResponse({"object": "list", "data": described})


async def model(request: Request) -> Response:
    """Describes the model with a given name."""
    served: ServedModel = request.app.state.served
    return JSONResponse(served.named(request.path_params["name"]).describe())


async def health(request: Request) -> Response:
    """Returns 200 while the server answers requests."""
    served: ServedModel = request.app.state.served
    if served.service.failure is not None:
        raise ApiError(503, "The server failed; its log says why.")
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Returns the metrics that Prometheus reads."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def error_response(request: Request, error: Exception) -> Response:
    """Answers a request that failed; an error of the server itself also reaches its log."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, ClientDisconnect):  # nobody reads the answer; its status is counted
        return Response(status_code=499)
    if not isinstance(error, HTTPException):
        return FAILED.response()
    path = brief(f"{request.method} {request.scope['path']}")
    legal = ", ".join(
        f"{method} {route.path}"
        for route in ROUTES
        for method in sorted((route.methods or set()) - {"HEAD"})
    )
    problem = f"{path}: {error.detail}.  Legal: {legal.replace('{name:path}', 'NAME')}."
    return ApiError(error.status_code, problem).response(error.headers)


ROUTES = [
    Route("/", page),
    Route("/v1/completions", complete, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/translate", translate, methods=["POST"]),
    Route("/tokenize", tokens_of, methods=["POST"]),
    Route("/detokenize", text_of, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/health", health),
    Route("/metrics", metrics),
]


def application(served: ServedModel, registry: CollectorRegistry) -> Starlette:
    """Makes the application of a served model."""
    kinds: tuple[type[Exception], ...] = (ApiError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=ROUTES, exception_handlers=dict.fromkeys(kinds, error_response))
    app.state.served, app.state.registry = served, registry
    return app
