"""Answers `POST /v1/completions`, and continues prompts of other kinds, such as chats.

An answer is sent whole, or as a stream of server-sent events.
"""

import dataclasses
import heapq
import json
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from configs.errors import UserError
from data.vocab import Vocab
from models.decoding.sampling import Sampling
from scripts.commands.serving.bodies import ApiError, CompletionBody, SamplingBody, bad_field
from scripts.commands.serving.exchange import PendingAnswer, ServedModel, read_body, tokenize
from trainer.decoding.decoder import Ids
from trainer.decoding.decoder import Request as DecodeRequest
from trainer.decoding.requests import line_seed
from trainer.decoding.text_stream import TextStream
from trainer.serving.grammar import Grammar
from trainer.serving.service import Job

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
LINE_SEPARATORS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Characters that JSON may contain, but that clients take for the end of an event's line."""


@dataclasses.dataclass
class AnswerChoice:
    """Holds one text of an answer while it is generated."""

    index: int
    job: Job
    text: TextStream
    finish: str | None = None
    """Why the text ended; None while it is unfinished."""
    suffix_log_p: float | None = None
    """Mean log-probability per token of `rescore_suffix` after the text."""

    def update(self) -> str:
        """Returns the text that was added since the last call."""
        finish = self.job.finish  # read before the tokens, to which the service adds first
        added = self.text.add(self.job.tokens, is_done=finish is not None)
        self.finish = "stop" if self.text.is_stopped else finish
        return added

    @property
    def new_tokens(self) -> int:
        return len(self.job.tokens) if self.text.stopped_after is None else self.text.stopped_after

    @property
    def is_done(self) -> bool:
        return self.finish is not None

    @property
    def tokens(self) -> list[int]:
        """Returns the new tokens, including an end token."""
        ends = [] if self.job.end_id is None or self.text.is_stopped else [self.job.end_id]
        return [*self.job.tokens[: self.new_tokens], *ends]

    @property
    def score(self) -> float:
        """Returns the score that ranks the samples of a prompt."""
        if self.suffix_log_p is not None:
            return self.suffix_log_p
        return statistics.fmean(self.job.log_probabilities[: len(self.tokens)] or [0.0])


@dataclasses.dataclass(frozen=True)
class CompletionForm:
    """Writes choices in the format of `POST /v1/completions`."""

    body: CompletionBody
    vocab: Vocab
    id_prefix = "cmpl"
    whole = part = "text_completion"  # kind of a whole answer, and of a stream's event

    @property
    def begins(self) -> bool:
        """Returns whether a streamed choice has an event before its first text."""
        return self.body.echo

    def choice(self, choice: AnswerChoice, text: str) -> dict[str, Any]:
        """Returns a choice of a whole answer."""
        suffix_log_p = choice.suffix_log_p
        ranked = {} if suffix_log_p is None else {"suffix_log_probability": suffix_log_p}
        return self.delta(choice, text, first=True) | ranked

    def delta(self, choice: AnswerChoice, text: str, *, first: bool) -> dict[str, Any]:
        """Returns the part of an event that adds a text to a streamed choice."""
        is_scored = self.body.logprobs is not None and choice.is_done
        return {
            "index": choice.index,
            "text": choice.text.prompt_text + text if self.body.echo and first else text,
            "logprobs": self.logprobs(choice) if is_scored else None,
            "finish_reason": choice.finish,
        }

    def logprobs(self, choice: AnswerChoice) -> dict[str, Any]:
        """Returns the log-probabilities of all tokens, including an end token."""
        job, tokens = choice.job, choice.tokens
        log_p: list[float | None] = [*job.log_probabilities[: len(tokens)]]
        likeliest = job.likeliest[: len(tokens)]
        sent = self.body.prompts[choice.index // self.body.n]
        prompt = choice.text.prompt if isinstance(sent, str) else sent
        if self.body.echo and prompt:
            scored = slice(len(job.prompt_log_probabilities) - len(prompt) + 1, None)
            tokens = [*prompt, *tokens]
            log_p = [None, *job.prompt_log_probabilities[scored], *log_p]
            likeliest = [[], *job.prompt_likeliest[scored], *likeliest]
        pieces, top = self.vocab.pieces(tokens), list[dict[str, float] | None]()
        for piece, chosen_log_p, ranked in zip(pieces, log_p, likeliest, strict=True):
            # If several tokens have the same text, the chosen one wins, then the likeliest.
            names = self.vocab.pieces(token for token, _ in reversed(ranked))
            best = dict(zip(names, (value for _, value in reversed(ranked)), strict=True))
            top.append(None if chosen_log_p is None else {**best, piece: chosen_log_p})
        return {
            "tokens": pieces,
            "token_logprobs": log_p,
            "top_logprobs": top if self.body.logprobs else None,
            "text_offset": None,
        }


class ChatForm:
    """Writes choices in the format of `POST /v1/chat/completions`, as messages."""

    id_prefix = "chatcmpl"
    whole, part = "chat.completion", "chat.completion.chunk"
    begins = False

    def choice(self, choice: AnswerChoice, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._entry(choice, "message", message)

    def delta(self, choice: AnswerChoice, text: str, *, first: bool) -> dict[str, Any]:
        message = {"role": "assistant"} if first else {}
        return self._entry(choice, "delta", message | ({"content": text} if text else {}))

    def _entry(self, choice: AnswerChoice, name: str, message: dict[str, Any]) -> dict[str, Any]:
        entry = {"index": choice.index, name: message, "logprobs": None}
        return entry | {"finish_reason": choice.finish}


Form = CompletionForm | ChatForm


async def complete(request: Request) -> Response:
    """Answers `POST /v1/completions`: continues each prompt."""
    served_decoder(request)
    body, served = await read_body(request, CompletionBody)
    if body.max_tokens == 0 and not body.echo:
        raise bad_field("max_tokens", 0, "at least 1, or 0 with echo, to score the prompt")
    if body.samples < body.n or (body.samples > body.n and body.stream):
        raise bad_field("best_of", body.best_of, f"an integer from n = {body.n}, without stream")
    vocab, prompts = served.vocabs.target, list[ServedPrompt]()
    suffix: Ids = ()
    if (text := body.rescore_suffix) is not None:
        suffix = await tokenize([text], 1, lambda: vocab.encode_continuation(text))
        longest = served.max_length - 2
        if body.stream or not 0 < len(suffix) <= longest:
            raise bad_field("rescore_suffix", text, f"1 to {longest} tokens, without stream")

    def choices() -> list[AnswerChoice]:
        for prompt in body.prompts:
            if isinstance(prompt, str):
                [ids] = vocab.encode([served.run.task.prompt(prompt)])
                prompts.append(ServedPrompt("prompt", prompt, ids))
            elif all(0 <= token < vocab.size for token in prompt):
                begins = vocab.reads_begin and prompt[0] == vocab.begin_id  # the model reads it
                prompts.append(ServedPrompt("prompt", prompt, prompt[1:] if begins else prompt))
            else:
                raise bad_field("prompt", prompt, f"tokens from 0 to {vocab.size - 1:,}")
        choices = choices_of(prompts, body, served, DEFAULT_MAX_TOKENS, len(suffix))
        scores_prompt = body.max_tokens == 0 or (body.echo and body.logprobs is not None)
        for choice in choices:
            choice.job.candidates = body.logprobs or 0
            choice.job.scores_prompt = scores_prompt
        return choices

    check_count(len(body.prompts), "prompt", body.prompt, body, served)
    made = await tokenize(body.prompts, body.samples, choices, is_long=bool(body.response_format))
    return await answer(request, served, made, body, CompletionForm(body, vocab), suffix)


def served_decoder(request: Request) -> ServedModel:
    """Returns the served model; refuses one that translates."""
    served: ServedModel = request.app.state.served
    if served.translates:
        raise ApiError(404, f"{served.name} translates.  Legal: POST /v1/translate.")
    return served


async def answer(
    request: Request,
    served: ServedModel,
    choices: Sequence[AnswerChoice],
    body: SamplingBody,
    form: Form,
    suffix: Ids = (),
) -> Response:
    """Answers with choices, whole or streamed; a suffix ranks whole ones."""
    jobs = [choice.job for choice in choices]
    exchange = PendingAnswer(request, served.service, jobs, served.time_limit_s)
    head = {
        "id": f"{form.id_prefix}-{secrets.token_hex(12)}",
        "object": form.part if body.stream else form.whole,
        "created": int(time.time()),
        "model": served.name,
    }
    if body.stream:
        await exchange.__aenter__()
        return EventStream(exchange, events(exchange, choices, head, body, served, form))
    start_s = time.monotonic()
    async with exchange:
        await finish(exchange, choices)
    if len(suffix):
        left_s = served.time_limit_s - (time.monotonic() - start_s)
        scored = [scored_suffix(choice, suffix) for choice in choices]
        async with PendingAnswer(request, served.service, scored, left_s) as exchange:
            async for _ in exchange.changes():
                pass
        for choice, job in zip(choices, scored, strict=True):
            log_p = job.prompt_log_probabilities[-len(suffix) :]
            choice.suffix_log_p = statistics.fmean(log_p or [0.0])
        jobs = [*jobs, *scored]  # perhaps by newer weights
    best = likeliest_of(choices, body.samples, body.n)
    return JSONResponse(
        head
        | {
            "choices": [form.choice(choice, choice.text.text) for choice in best],
            "usage": usage(choices, body.samples),
            "system_fingerprint": served.fingerprint(jobs),
        }
    )


def likeliest_of(choices: Sequence[AnswerChoice], samples: int, n: int) -> list[AnswerChoice]:
    """Returns each prompt's n samples with the highest scores, or all if nothing ranks them."""
    if samples == n and all(choice.suffix_log_p is None for choice in choices):
        return [*choices]
    best = list[AnswerChoice]()
    for start in range(0, len(choices), samples):
        best += heapq.nlargest(n, choices[start : start + samples], lambda x: x.score)
    return [dataclasses.replace(choice, index=index) for index, choice in enumerate(best)]


def scored_suffix(choice: AnswerChoice, suffix: Ids) -> Job:
    """Makes a job that scores a suffix after the text of a choice, without its stop."""
    text: Ids = choice.job.tokens
    if choice.text.is_stopped:  # its tokens include the stop
        text = choice.text.vocab.encode_continuation(choice.text.text)[: choice.new_tokens]
    request = DecodeRequest([*choice.job.request.prompt, *text, *suffix], 0)
    return Job(request, adapter=choice.job.adapter, scores_prompt=True)


class ServedPrompt(NamedTuple):
    """Holds the ids of a prompt, and the field of the request that it comes from."""

    field: str
    value: object
    ids: Ids


def check_count(
    prompts: int, field: str, value: object, body: SamplingBody, served: ServedModel
) -> None:
    """Refuses more texts than may wait in the queue."""
    texts, limit = prompts * body.samples, served.service.queue_limit
    if texts > limit:
        if body.samples > 1:
            field, value = "n" if body.samples == body.n else "best_of", body.samples
        raise bad_field(field, value, f"at most {limit} texts in all, not {texts}: --queue")


def choices_of(
    prompts: Sequence[ServedPrompt],
    body: SamplingBody,
    served: ServedModel,
    default_max_tokens: int,
    suffix: int = 0,
) -> list[AnswerChoice]:
    """Makes the jobs of a request, with the seeds that `decode` uses for the lines of a file.

    `suffix` tokens of `max_length` stay free after each text.
    """
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = served.options.max_tokens or default_max_tokens
    if body.min_tokens > max_tokens:
        legal = f"an integer from 0 to max_tokens, here {max_tokens}"
        raise bad_field("min_tokens", body.min_tokens, legal)
    seed = secrets.randbits(31) if body.seed is None else body.seed
    options = dataclasses.replace(
        served.options, seed=seed, max_tokens=max_tokens, min_tokens=body.min_tokens
    )
    top_k, top_p = body.top_k or None, None if body.top_p == 1 else body.top_p
    sampling = Sampling(body.temperature, top_k, top_p, min_p=body.min_p)
    vocab = served.vocabs.target
    needs_text = body.stream or bool(body.stops or body.stop_token_ids)
    for name in ("logit_bias", "stop_token_ids"):
        if max(map(int, getattr(body, name)), default=0) >= vocab.size:
            raise bad_field(name, getattr(body, name), f"tokens from 0 to {vocab.size - 1:,}")
    grammar = grammar_of(body, vocab)
    choices = list[AnswerChoice]()
    for prompt in prompts:
        length, room = len(prompt.ids), served.max_length - suffix - len(prompt.ids)
        longest = served.max_length - suffix - (body.max_tokens != 0)
        if length > longest:
            raise bad_field(prompt.field, prompt.value, f"at most {longest} tokens, not {length}")
        if body.max_tokens is not None and body.max_tokens > room:
            legal = f"1 to {room} tokens for a prompt of {length}"
            newer = getattr(body, "max_completion_tokens", None)
            name = "max_tokens" if newer is None else "max_completion_tokens"
            raise bad_field(name, body.max_tokens, legal)
        if body.min_tokens > room:
            legal = f"0 to {room} tokens for a prompt of {length}"
            raise bad_field("min_tokens", body.min_tokens, legal)
        for _ in range(body.samples):
            seed = line_seed(options, len(choices))
            request = DecodeRequest(prompt.ids, min(max_tokens, room), seed, body.min_tokens + 1)
            text = TextStream(vocab, prompt.ids, body.stops, apart=served.run.task.has_answers)
            text.stop_ids = body.stop_token_ids
            matcher = grammar and grammar.copy()
            job = Job(request, sampling, body.penalties, matcher, served.adapter, needs_text)
            choices.append(AnswerChoice(len(choices), job, text))
    return choices


def grammar_of(body: SamplingBody, vocab: Vocab) -> Grammar | None:
    """Returns the grammar that restricts the texts of a request to JSON, if any."""
    if (schema := body.answer_schema) is None:
        return None
    if body.min_tokens:
        raise bad_field("min_tokens", body.min_tokens, "0 with response_format")
    try:
        return Grammar(vocab, schema)
    except UserError as error:
        raise ApiError(422, f"response_format: {error}", "response_format") from None


async def finish(exchange: PendingAnswer, choices: Sequence[AnswerChoice]) -> None:
    """Waits for all choices; a choice that reaches a stop frees its slot."""
    async for _ in exchange.changes():
        for choice in choices:
            if not choice.is_done and (choice.job.streams or choice.job.is_done):
                choice.update()
                drop_stopped(exchange, choice)


def drop_stopped(exchange: PendingAnswer, choice: AnswerChoice) -> None:
    if choice.text.is_stopped and not choice.job.is_done:
        exchange.service.cancel([choice.job])


class EventStream(StreamingResponse):
    """Sends events, and ends the exchange however sending ends."""

    media_type = "text/event-stream"

    def __init__(self, exchange: PendingAnswer, events: AsyncIterator[str]):
        super().__init__(events, headers={"Cache-Control": "no-store"})
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)  # the exchange notices a client that disconnects
        finally:
            await self.exchange.__aexit__()


async def events(
    exchange: PendingAnswer,
    choices: Sequence[AnswerChoice],
    head: dict[str, Any],
    body: SamplingBody,
    served: ServedModel,
    form: Form,
) -> AsyncIterator[str]:
    """Yields the events of a stream: texts as they are generated, how each ends, and token usage.

    Changes that arrive together are sent together.
    """
    begun, ended, last = set[int](), set[int](), ""
    if body.stream_options.include_usage:
        head = {**head, "usage": None}
    try:
        async for _ in exchange.changes():
            new = list[str]()
            for choice in choices:
                if choice.index in ended or choice.job.checkpoint is None:
                    continue
                added = choice.update()
                drop_stopped(exchange, choice)
                first = choice.index not in begun
                if added or choice.is_done or (first and form.begins):
                    part = form.delta(choice, added, first=first)
                    fingerprint = served.fingerprint([choice.job])
                    new.append(event(head | {"choices": [part], "system_fingerprint": fingerprint}))
                    begun.add(choice.index)
                if choice.is_done:
                    ended.add(choice.index)
            if len(ended) == len(choices):
                last += "".join(new)
            elif new:
                yield "".join(new)
    except ApiError as error:
        yield last + event(error.body())
        return
    except ClientDisconnect:  # nobody reads the rest
        return
    if body.stream_options.include_usage:
        last += event(head | {"choices": [], "usage": usage(choices, body.n)})
    yield last + "data: [DONE]\n\n"


def event(content: dict[str, Any]) -> str:
    text = json.dumps(content, ensure_ascii=False).translate(LINE_SEPARATORS)
    return f"data: {text}\n\n"


def usage(choices: Sequence[AnswerChoice], n: int) -> dict[str, Any]:
    """Counts the tokens of an answer; a prompt's tokens count once for its n choices."""
    prompt_tokens = sum(len(choice.job.request.prompt) for choice in choices[::n])
    cached_tokens = sum(choice.job.cached_tokens for choice in choices[::n])
    new_tokens = sum(choice.new_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
