"""Describes the model that a server serves."""

import dataclasses
import time
from collections.abc import Sequence

from configs.errors import brief
from data.tokenizers.chat_template import ChatTemplate
from data.vocabs import Vocabs
from scripts.commands.serving.errors import ApiError
from scripts.commands.serving.exchange import Limits
from trainer.decoding.requests import DecodeOptions
from trainer.run import Run
from trainer.serving.service import Job, Service


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Holds what the answers to requests follow from."""

    name: str
    run: Run
    vocabs: Vocabs
    service: Service
    options: DecodeOptions
    """What a request does not set."""
    limits: Limits
    width: int
    """Texts that a beam search keeps; 1 of a model that continues prompts."""
    max_length: int
    """Tokens of a prompt and its continuation; of a translation model, those of a source."""
    max_new_tokens: int
    """Tokens of the longest continuation or translation."""
    chat: ChatTemplate | None = None
    """How messages of a chat become a prompt."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def translates(self) -> bool:
        return self.run.task.has_source

    def check_name(self, name: str | None) -> None:
        """Refuses a request for another model."""
        if name not in (None, self.name):
            raise ApiError(404, f"model = {brief(repr(name))}.  Legal: {self.name!r}.", "model")

    def fingerprint(self, jobs: Sequence[Job]) -> str:
        """Names the weights of an answer: of both checkpoints where they changed meanwhile."""
        steps = {job.checkpoint for job in jobs if job.checkpoint is not None}
        return "step-" + ",".join(map(str, sorted(steps or {self.service.checkpoint})))

    def describe(self) -> dict[str, object]:
        """Returns the entry of `GET /v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "meshloom",
            "kind": "translation" if self.translates else "completion",
            "step": self.service.checkpoint,
            "max_length": self.max_length,
            "max_new_tokens": self.max_new_tokens,
            "beam": self.width,
            "chat": self.chat is not None,
            "tags": list(self.run.task.tags),
        }
