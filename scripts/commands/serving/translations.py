"""Answers `POST /v1/translate`."""

import dataclasses
import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.errors import UserError
from data.sources.pairs import chosen_tag, tagged
from scripts.commands.serving.bodies import ApiError, TranslationBody, bad_field
from scripts.commands.serving.exchange import PendingAnswer, ServedModel, read_body, tokenize
from trainer.decoding.requests import Hypothesis, is_blank, to_hypothesis, translation_requests
from trainer.serving.service import Job


async def translate(request: Request) -> Response:
    """Translates each text, and answers with its best hypotheses."""
    served: ServedModel = request.app.state.served
    if not served.translates:
        raise ApiError(404, f"{served.name} continues prompts.  Legal: POST /v1/completions.")
    body = await read_body(request, TranslationBody, served)
    served.check_name(body.model)
    if body.n > served.width:
        raise bad_field("n", body.n, f"an integer from 1 to {served.width}, the beam size")
    jobs = await tokenize(body.texts, 1, lambda: jobs_of(body, served))
    blank = [is_blank(job.request, served.vocabs) for job in jobs]
    running = [job for job, is_blank in zip(jobs, blank, strict=True) if not is_blank]
    if len(running) > (limit := served.service.queue_limit):
        raise bad_field("text", body.text, f"at most {limit} texts, not {len(running)}: --queue")
    async with PendingAnswer(request, served.service, running, served.time_limit_s) as exchange:
        async for _ in exchange.changes():
            pass  # until the end of all jobs
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
                    or [Hypothesis("", 0.0, 0.0)._asdict()],  # of an empty source
                }
                for text, job in zip(body.texts, jobs, strict=True)
            ],
            "system_fingerprint": served.fingerprint(running),
        }
    )


def jobs_of(body: TranslationBody, served: ServedModel) -> list[Job]:
    """Makes a job for each text."""
    task, vocabs = served.run.task, served.vocabs
    try:
        tag = chosen_tag(body.tag, task.tags)
    except UserError:
        legal = f"one of {', '.join(task.tags)}" if task.tags else "none: the task has no tags"
        raise bad_field("tag", body.tag, legal) from None
    for text, ids in zip(
        body.texts, vocabs.of_source.encode([tagged(text, tag) for text in body.texts]), strict=True
    ):
        if len(ids) + 1 > served.max_length:
            legal = f"a text of at most {served.max_length - 1} tokens, not {len(ids)}"
            raise bad_field("text", text, legal)
    if body.max_tokens is not None and body.max_tokens > served.max_new_tokens:
        raise bad_field(
            "max_tokens", body.max_tokens, f"an integer from 1 to {served.max_new_tokens}"
        )
    options = dataclasses.replace(
        served.options, tag=body.tag, max_tokens=body.max_tokens or served.options.max_tokens
    )
    requests = translation_requests(body.texts, task, vocabs, options, served.run.model.max_length)
    return [Job(request) for request in requests]
