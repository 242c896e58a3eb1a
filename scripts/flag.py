"""Describes a field of a dataclass of flags beyond its name, type and default."""

import dataclasses
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """Describes a flag: what the name, type and default of its field do not say."""

    help: str
    metavar: str | None = None
    min: float | None = None
    above: float | None = None
    """What a number is larger than."""
    max: float | None = None
    name: str | None = None
    """Of the flag, where it is not the field's."""
    off: str | None = None
    """Name of the flag that says no, of a field that is True unless it is given."""
    is_argument: bool = False
    names_output: bool = False
    """Whether the value names a file to write; it is checked before the work begins."""
    variable: str | None = None
    """Environment variable that gives the value where the command line does not."""


def given_flags(flags: Any) -> list[str]:
    """Names the flags of a dataclass whose values are not their defaults, without its groups."""
    hints, names = typing.get_type_hints(type(flags), include_extras=True), []
    for field in dataclasses.fields(flags):
        flag = next((mark for mark in getattr(hints[field.name], "__metadata__", ())
                     if isinstance(mark, Flag)), None)  # fmt: skip
        value = getattr(flags, field.name)
        if flag is not None and value != field.default:
            names.append(f"--{flag.off}" if flag.off and not value else
                         f"--{flag.name or field.name}")  # fmt: skip
    return names
