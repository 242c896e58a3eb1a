"""Reads and checks JSON, and signs what is written with a checksum."""

import functools
import json
import zlib
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from configs.errors import UserError, brief

CHECKSUM = "crc32"

T = TypeVar("T")
_adapter = functools.cache(TypeAdapter)


def read_json(text: str | bytes, kind: type[T], name: object) -> T:
    """Parses JSON text as a `kind`.  Raises a `UserError` that starts with `name` if it is not one.

    An integer of more than 20 digits becomes a float, perhaps an infinite one.
    """
    try:
        value = json.loads(text, parse_int=lambda n: int(n) if len(n) <= 20 else float(n))
    except RecursionError:
        raise UserError(f"{name}: is not JSON: its values are nested too deeply.") from None
    except ValueError as error:
        raise UserError(f"{name}: is not JSON: {error}.") from None
    return checked(value, kind, name)


def checked(value: Any, kind: type[T], name: object) -> T:
    """Validates a value parsed from JSON as a `kind`; raises `UserError` if it is not one."""
    try:
        return cast(T, _adapter(cast(Any, kind)).validate_python(value))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        problem = first["msg"].removeprefix("Input ").replace("a valid dictionary", "an object")
        shown = brief(repr(first["input"]))
        raise UserError(f"{name}: {brief(place)}{problem} (found {shown}).") from None


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON object per line, up to the first cut or damaged one; [] for a missing file."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_bytes().decode("utf-8", "replace").split("\n"):
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError):
                break
    return lines


def sign(fields: dict[str, Any]) -> dict[str, Any]:
    """Adds a checksum to the fields."""
    return {**fields, CHECKSUM: zlib.crc32(json.dumps(fields).encode())}


def verified(signed: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields without their checksum; raises ValueError if they have changed."""
    fields = {name: value for name, value in signed.items() if name != CHECKSUM}
    if CHECKSUM in signed and sign(fields) != signed:
        raise ValueError("its checksum differs")
    return fields
