"""Defines the bodies of requests, and makes the answers to requests that cannot be served."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import JSONResponse, Response

from configs.errors import brief, did_you_mean
from trainer.serving.service import MAX_CANDIDATES, TokenPenalties

LARGEST_SEED = 2**63 - 1
LARGEST_K = 2**31 - 1
LARGEST_TEMPERATURE = 1_000_000  # long before it, all tokens are equally likely
MAX_CHOICES, MAX_MESSAGES = 128, 1024
MAX_BIASES, MAX_STOPS, LONGEST_STOP = 1024, 32, 1000
MAX_VARIABLES, MAX_TOOLS = 32, 1024
"""Maximum numbers for a chat template."""
FORMATS = '{"type": "text" or "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}'
CONTENT = 'a text, or a list of one or more {"type": "text", "text": a text}'
OPENAI = tomllib.loads(Path(__file__).with_name("openai.toml").read_text())
"""Fields of OpenAI's API that do not change an answer."""

Token = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
Tokens = Annotated[list[int], Field(min_length=1, max_length=2**20)]
Text = Annotated[str, Field(max_length=2**20)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def between(default: Any, low: float, high: float, what: str, more: str = "") -> Any:
    """Returns a field that checks the bounds of its value, and describes them."""
    return Field(default, ge=low, le=high, description=f"{what} from {low} to {high}{more}")


class Body(BaseModel):
    """Checks the type and range of each field; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = Field(None, description="the name that GET /v1/models gives")
    user: str | None = Field(None, description="a text, which is not used")

    @model_validator(mode="before")
    @classmethod
    def without_neutral(cls, fields: Any) -> Any:
        """Drops fields that have no effect."""
        if not isinstance(fields, Mapping):
            return fields
        neutral = OPENAI["neutral"] | {"best_of": [fields.get("n") or 1]}

        def has_effect(name: str, value: Any) -> bool:
            same = (x == value and isinstance(x, bool) == isinstance(value, bool)
                    for x in neutral.get(name, ()))  # fmt: skip
            return value is not None and name not in OPENAI["unused"] and not any(same)

        return {name: value for name, value in fields.items() if has_effect(name, value)}


class Part(BaseModel):
    """Checks the fields of a part of a body; drops empty ones."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_empty(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if value is not None and (value or value != OPENAI["empty"].get(name))
        }


class StreamOptions(Part):
    """Describes the options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Has no effect: streams are not padded."""


class SamplingBody(Body):
    """Describes how texts are sampled and sent."""

    max_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    min_tokens: int = Field(0, ge=0, description="an integer from 0 to max_tokens")
    temperature: float = between(1.0, 0, LARGEST_TEMPERATURE, "a number")
    top_k: int = between(0, 0, LARGEST_K, "an integer", "; 0 is no limit")
    top_p: float = between(1.0, 0, 1, "a number", "; 1 is no limit")
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 (no limit) to 1")
    repetition_penalty: float = Field(1.0, gt=0, le=100, description="a number above 0, up to 100")
    presence_penalty: float = between(0.0, -2, 2, "a number")
    frequency_penalty: float = between(0.0, -2, 2, "a number")
    logit_bias: dict[Token, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=MAX_BIASES,
        description=f"an object of at most {MAX_BIASES} tokens and numbers from -100 to 100",
    )  # fmt: skip
    response_format: dict[str, Any] | None = Field(None, description=FORMATS)
    n: int = between(1, 1, MAX_CHOICES, "an integer")
    seed: int | None = between(None, 0, LARGEST_SEED, "an integer")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(
        [],
        description=f"a text of 1 to {LONGEST_STOP:,} characters, or a list of at most {MAX_STOPS}",
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        [], max_length=MAX_BIASES, description=f"a list of at most {MAX_BIASES} integers, tokens"
    )
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(
        StreamOptions(), description='{"include_usage": true or false}'
    )

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Returns the JSON Schema that the answer must follow, if there is one."""
        match self.response_format:
            case None:
                return None
            case {"type": "json_object"} if len(self.response_format) == 1:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict()}}:
                schema: dict[str, Any] = self.response_format["json_schema"]["schema"]
                return schema
        raise bad_field("response_format", self.response_format, FORMATS)

    @property
    def penalties(self) -> TokenPenalties:
        """Returns the penalties, which change the logits."""
        return TokenPenalties(
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty,
            {int(token): bias for token, bias in self.logit_bias.items() if bias},
        )  # fmt: skip

    @property
    def samples(self) -> int:
        """Returns how many texts to generate for each prompt."""
        return self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(SamplingBody):
    """Describes a request to continue prompts."""

    prompt: (
        Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    ) = Field(description=f"a text or its tokens, or a list of 1 to {MAX_CHOICES} of them")
    max_tokens: int | None = Field(
        None, ge=0, description="an integer of at least 1, or 0 with echo"
    )
    logprobs: int | None = between(None, 0, MAX_CANDIDATES, "an integer")
    echo: bool = Field(False, description="true or false")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description=f"an integer from n to {MAX_CHOICES}"
    )
    rescore_suffix: Text | None = Field(None, description="a text, without stream")

    @property
    def samples(self) -> int:
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [p for p in self.prompt if not isinstance(p, int)]


class TextPart(Part):
    """Describes a part of a message."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None
    """Has no effect: clients of Anthropic's API send it."""


class Message(Part):
    """Describes a message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None

    @model_validator(mode="after")
    def needs_content(self) -> Self:
        """Refuses a message without content, unless it is an answer, whose text is then empty."""
        if self.content is None and self.role != "assistant":
            raise ValueError
        return self

    def for_template(self) -> dict[str, str]:
        """Returns the fields that a chat template reads."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatBody(SamplingBody):
    """Describes a request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description=f'a list of 1 to {MAX_MESSAGES} of {{"role": "user", "content": a text}}'
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] = Field(
        {}, description="an object of variables that the chat template reads"
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = Field(
        [], description=f"a list of at most {MAX_TOOLS} objects, which the chat template reads"
    )
    logprobs: Literal[False] = Field(False, description="false")

    @model_validator(mode="after")
    def one_maximum(self) -> Self:
        """Uses max_completion_tokens, the newer name of max_tokens, if it is given."""
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self


class TokenizeBody(Body):
    """Describes a request for the tokens of a text."""

    prompt: Text = Field(description="a text")


class DetokenizeBody(Body):
    """Describes a request for the text of tokens."""

    tokens: Annotated[list[int], Field(max_length=2**20)] = Field(
        description="a list of integers, the tokens"
    )


class TranslationBody(Body):
    """Describes a request to translate texts."""

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] = Field(
        description=f"a text, or a list of 1 to {MAX_CHOICES} texts"
    )
    n: int = Field(1, ge=1, description="an integer from 1 to the beam size")
    stream: Literal[False] = Field(False, description="false")
    max_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    tag: str | None = Field(None, description="a language tag that GET /v1/models lists")

    @property
    def texts(self) -> list[str]:
        return [self.text] if isinstance(self.text, str) else self.text


TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclasses.dataclass
class ApiError(Exception):
    """Reports a request that is not served, in the format of OpenAI's API."""

    status: int
    message: str
    param: str | None = None
    """The name of the wrong field."""

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        headers = {**(headers or {})}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status in (500, 504):  # OpenAI's clients retry these, which takes as long again
            headers["X-Should-Retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def bad_field(name: str, value: object, legal: str) -> ApiError:
    """Reports a field whose value is not legal."""
    return ApiError(422, f"{name} = {brief(repr(value))}.  Legal: {legal}.", name)


def too_late(limit_s: float) -> ApiError:
    """Reports that an answer takes longer than the server waits."""
    return ApiError(504, f"No answer after {limit_s:g} s.  Ask for less.")


def invalid(error: ValidationError, body: type[BaseModel]) -> ApiError:
    """Reports the first problem of a body."""
    first = error.errors(include_url=False)[0]
    kind, path = first["type"], first["loc"]
    if kind == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first['ctx']['error']}.")
    if not path:
        return ApiError(422, "The body is not a JSON object.")
    name = str(path[0])
    if kind == "extra_forbidden" and len(path) == 1:
        if values := OPENAI["neutral"].get(name):
            neutral = " or ".join(map(repr, values))
            return bad_field(name, first["input"], f"{neutral}, which changes nothing")
        if name == "best_of":
            return bad_field(name, first["input"], "as many as n")
        hint = did_you_mean(name, body.model_fields)
        return ApiError(422, f"{brief(name) or repr('')}: no such field.{hint}", brief(name))
    legal = body.model_fields[name].description or first["msg"]
    if kind == "missing" and len(path) == 1:
        return ApiError(422, f"{name} is missing.  Legal: {legal}.", name)
    if name == "messages":  # after the field of a message, the path names types of a union
        legal = CONTENT if path[2:3] == ("content",) else legal
        legal = "null, which changes nothing" if kind == "extra_forbidden" else legal
        place = path[:2] if kind == "missing" else path[:3]
        return bad_field(".".join(map(str, place)), first["input"], legal)
    name = ".".join(map(str, path)) if name == "stream_options" else name
    return bad_field(name, first["input"], legal)
