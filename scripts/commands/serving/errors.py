"""Makes the answers to requests that cannot be served."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from configs.errors import brief, did_you_mean
from scripts.commands.serving.bodies import NEUTRAL

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclasses.dataclass
class ApiError(Exception):
    """Reports a request that is not served, as the API of OpenAI does."""

    status: int
    message: str
    param: str | None = None
    """The field that is wrong."""

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        headers = {**(headers or {})}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status in (500, 504):  # clients of OpenAI's repeat these, which would take as long
            headers["X-Should-Retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def bad_field(name: str, value: object, legal: str) -> ApiError:
    """Reports a field whose value is not legal."""
    return ApiError(422, f"{name} = {brief(repr(value))}.  Legal: {legal}.", name)


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
        if name in NEUTRAL:
            neutral = " or ".join(map(repr, NEUTRAL[name]))
            return bad_field(name, first["input"], f"{neutral}, which changes nothing")
        if name == "best_of":
            return bad_field(name, first["input"], "as many as n")
        hint = did_you_mean(name, body.model_fields)
        return ApiError(422, f"{brief(name)}: no such field.{hint}", brief(name))
    legal = body.model_fields[name].description or first["msg"]
    if kind == "missing" and len(path) == 1:
        return ApiError(422, f"{name} is missing.  Legal: {legal}.", name)
    if name == "messages":  # behind the field of a message, the path names types of a union
        legal = "null, which changes nothing" if kind == "extra_forbidden" else legal
        place = path[:2] if kind == "missing" else path[:3]
        return bad_field(".".join(map(str, place)), first["input"], legal)
    name = ".".join(map(str, path)) if name == "stream_options" else name
    return bad_field(name, first["input"], legal)
