"""Describes the served model, reads requests for it, and waits for the jobs that answer them."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from configs.errors import brief
from data.vocabs import Vocabs
from scripts.commands.serving.bodies import ApiError, Body, invalid, too_late
from scripts.commands.serving.rendering import ChatRenderer
from trainer.decoding.requests import DecodeOptions
from trainer.run import Run
from trainer.serving.service import DeadEnd, Job, NoFiniteScore, QueueFull, Service, Stopped

B = TypeVar("B", bound=Body)
T = TypeVar("T")
SHORT_CHARACTERS, TEXT_CHARACTERS = 2000, 50
"""Texts of up to SHORT_CHARACTERS are tokenized in the event loop; each text adds TEXT_CHARACTERS.

This takes at most a millisecond; another thread would cost half of one.
"""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Holds what determines the answers to requests."""

    name: str
    run: Run
    vocabs: Vocabs
    service: Service
    options: DecodeOptions
    """Options that a request does not set."""
    body_bytes: int
    """Size limit of a request's body."""
    time_limit_s: float
    """Seconds that a request may take."""
    width: int
    """Texts that a beam search keeps; 1 for a model that continues prompts."""
    max_length: int
    """Tokens of a prompt and its continuation; for a translation model, of a source."""
    max_new_tokens: int
    """Tokens of the longest continuation or translation."""
    chat: ChatRenderer | None = None
    """Renders the messages of a chat as a prompt."""
    adapter: int = 0
    """Number of the adapter that is used; 0 is none."""
    adapter_step: int | None = None
    """Step of the adapter's checkpoint."""
    adapted: "Sequence[ServedModel]" = ()
    """The same model with adapters."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def translates(self) -> bool:
        return self.run.task.has_source

    def named(self, name: str | None) -> "ServedModel":
        """Returns the model with a given name; refuses a name that is not served."""
        models = {served.name: served for served in (self, *self.adapted)}
        if name is not None and name not in models:
            legal = ", ".join(map(repr, models))
            raise ApiError(404, f"model = {brief(repr(name))}.  Legal: {legal}.", "model")
        return models[name or self.name]

    def fingerprint(self, jobs: Sequence[Job]) -> str:
        """Names the weights that made an answer: both checkpoints if they changed meanwhile."""
        steps = {job.checkpoint for job in jobs if job.checkpoint is not None}
        of_adapter = "" if self.adapter_step is None else f"+{self.adapter_step}"
        return "step-" + ",".join(map(str, sorted(steps or {self.service.checkpoint}))) + of_adapter

    def describe(self) -> dict[str, object]:
        """Returns the entry of `GET /v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "meshloom",
            "kind": "translation" if self.translates else "completion",
            "step": self.service.checkpoint,
            **({} if self.adapter_step is None else {"adapter_step": self.adapter_step}),
            "max_length": self.max_length,
            "max_new_tokens": self.max_new_tokens,
            "beam": self.width,
            "chat": self.chat is not None,
            "tags": list(self.run.task.tags),
        }


async def read_body(request: Request, kind: type[B]) -> tuple[B, ServedModel]:
    """Reads and checks the body of a request; returns it and the model that it names."""
    served: ServedModel = request.app.state.served
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # else other sites could post without a preflight
        raise ApiError(415, f"Content-Type = {content_type!r}.  Legal: application/json.")
    too_long = ApiError(413, f"The body is longer than {served.body_bytes:,} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > served.body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(served.time_limit_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > served.body_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {served.time_limit_s:g} s.") from None
    try:
        checked = kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise invalid(error, kind) from None
    return checked, served.named(checked.model)


async def tokenize(
    texts: Sequence[str | list[int]], n: int, call: Callable[[], T], *, is_long: bool = False
) -> T:
    """Calls a function that tokenizes each text n times; in a thread if that takes long."""
    characters = n * sum(len(text) + TEXT_CHARACTERS for text in texts)
    is_long |= characters > SHORT_CHARACTERS
    return await run_in_threadpool(call) if is_long else call()


class PendingAnswer:
    """Waits for jobs while their client is connected, for at most time_s seconds."""

    def __init__(self, request: Request, service: Service, jobs: Sequence[Job], time_s: float):
        self.request, self.service, self.jobs, self.time_s = request, service, jobs, time_s
        self._changed = asyncio.Event()
        self._is_left = self._is_late = False
        for job in jobs:
            job.on_change = self._changed.set

    async def __aenter__(self) -> "PendingAnswer":
        try:
            self.service.submit(self.jobs)
        except QueueFull:
            waiting, limit = self.service.waiting, self.service.queue_limit
            problem = f"{waiting:,} texts wait; {len(self.jobs):,} more exceed --queue={limit}."
            raise ApiError(429, f"{problem}  Try again later.") from None
        except Stopped:
            reason = "is stopping." if self.service.failure is None else "failed; its log says why."
            raise ApiError(503, f"The server {reason}") from None
        self._deadline = asyncio.get_running_loop().call_later(self.time_s, self._note_deadline)
        self._watch = asyncio.create_task(self._watch_client())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._deadline.cancel()
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        if not self.is_done:
            self.service.cancel([job for job in self.jobs if not job.is_done])

    @property
    def is_done(self) -> bool:
        return all(job.is_done for job in self.jobs)

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever jobs have changed, and a last time when all are done."""
        while True:
            is_done = self.is_done
            failed = next((job.failure for job in self.jobs if job.failure is not None), None)
            if isinstance(failed, NoFiniteScore):
                raise ApiError(500, "The model computes NaN or infinite log-probabilities.")
            if isinstance(failed, DeadEnd):
                raise ApiError(422, "response_format: no token of the vocab continues the text.")
            if failed is not None:
                raise ApiError(500, "The server failed; its log says why.")
            yield
            if is_done:
                return
            if self.is_done:  # while the caller used the last change
                continue
            await self._changed.wait()
            self._changed.clear()
            if self._is_left:
                raise ClientDisconnect
            if self._is_late and not self.is_done:
                raise too_late(self.time_s)

    def _note_deadline(self) -> None:
        self._is_late = True
        self._changed.set()

    async def _watch_client(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self._is_left = True
        self._changed.set()
