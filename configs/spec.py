"""Defines specs: frozen, validated settings that gin files can bind."""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import pydantic.dataclasses
from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from configs.errors import UserError, brief, did_you_mean, listed

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

T = TypeVar("T")


class Described(NamedTuple):
    """Describes in words which strings a pattern allows."""

    words: str


_CHECKS = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)
_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}
_BOUNDS = {
    "ge": "of at least",
    "gt": "above",
    "le": "of at most",
    "lt": "below",
    "multiple_of": "that is a multiple of",
    "min_length": "of at least length",
    "max_length": "of at most length",
}
_SPECS: dict[str, type[Any]] = {}
SPECS: Mapping[str, type[Any]] = MappingProxyType(_SPECS)
"""Every spec of the modules imported so far, by the name that gin files use."""
_ABSTRACT: dict[str, type[Any]] = {}
ABSTRACT: Mapping[str, type[Any]] = MappingProxyType(_ABSTRACT)
"""Every base class of specs, which gin files cannot name."""


class SpecError(UserError):
    """Reports all problems of one spec, by field; "" is the key of those that concern several."""

    def __init__(self, name: str, problems: Mapping[str, str]):
        super().__init__(listed(name, [*problems.values()]))
        self.problems = problems


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """Turns a class into a frozen, keyword-only dataclass with validated fields for gin files.

    Specs compare by value, and can be hashed and pickled.  Lists become tuples.  Checks that
    involve several fields go into `__post_init__`, which raises `UserError`.
    """
    made = _dataclass(cls)
    if missing := sorted(getattr(made, "__abstractmethods__", ())):
        raise UserError(
            f"{cls.__module__}.{cls.__name__} has no {', '.join(missing)}.  Define what its base "
            "class describes."
        )
    check = made.__init__

    @functools.wraps(check)
    def checked(self: T, *args: Any, **values: Any) -> None:
        try:
            check(self, *args, **{name: _tuples(value) for name, value in values.items()})
        except ValidationError as error:
            raise SpecError(cls.__name__, _problems(made, error)) from None

    made.__init__ = checked
    _register(made, _SPECS)
    return typing.cast(type[T], made)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def abstract_spec(cls: type[T]) -> type[T]:
    """Turns a class into a base class of specs, which neither gin files nor code can make."""
    made = _dataclass(cls)

    def refuse(self: T, *args: Any, **values: Any) -> None:
        raise UserError(cannot_make(made))

    made.__init__ = refuse
    _register(made, _ABSTRACT)
    return typing.cast(type[T], made)


def cannot_make(cls: type[Any]) -> str:
    """Describes that a spec is abstract, and which concrete specs are legal."""
    return f"{cls.__name__} is abstract.  Legal: {legal(cls) or 'none is imported'}."


def _dataclass(cls: type[Any]) -> Any:
    return pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=_CHECKS)


def is_spec(value: object) -> bool:
    """Returns whether a value is an instance of a spec class."""
    return SPECS.get(type(value).__name__) is type(value)


def names(cls: type[Any]) -> list[str]:
    """Returns the names of a spec's parameters."""
    return [field.name for field in dataclasses.fields(cls)]


def no_such_parameter(cls: type[Any], name: str) -> str:
    """Describes that a spec lacks a parameter, which specs have it, and which names are legal."""
    others = [kind for kind, other in SPECS.items() if name in names(other)]
    near = f"  Did you mean {others[0]}.{name}?" if others else did_you_mean(name, names(cls))
    legal_names = ", ".join(names(cls)) or "none, as it has no parameters"
    return f"{cls.__name__}.{name}: no such parameter.{near}  Legal: {legal_names}."


def legal(field_type: Any, bounds: tuple[Any, ...] = ()) -> str:
    """Describes the values that a field type allows."""
    origin, args = get_origin(field_type), get_args(field_type)
    if origin is Annotated:
        return legal(args[0], args[1:])
    if origin in (Union, UnionType):
        words = " or ".join(legal(arg) for arg in args)
    elif origin is Literal:
        words = " or ".join(repr(arg) for arg in args)
    elif origin is tuple:
        each = args[:1] if args[-1] is Ellipsis else args
        words = "a tuple, each item " if args[-1] is Ellipsis else "a tuple of "
        words += ", ".join(legal(arg) for arg in each)
    elif field_type is NoneType:
        words = "None"
    elif field_type in _WORDS:
        words = _WORDS[field_type]
    else:
        specs = [name for name, known in SPECS.items() if issubclass(known, field_type)]
        words = " or ".join(f"@{name}()" for name in specs)
    return " ".join([words, " and ".join(_bounds(bounds))]).strip()


def _bounds(marks: tuple[Any, ...]) -> list[str]:
    flat = [m for mark in marks for m in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    if described := [mark.words for mark in flat if isinstance(mark, Described)]:
        return described
    return [
        f"{words} {getattr(mark, bound)}"
        for mark in flat
        for bound, words in _BOUNDS.items()
        if getattr(mark, bound, None) is not None
    ]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _register(cls: type[Any], kind: dict[str, type[Any]]) -> None:
    """Registers a spec under its class name, which must be unique."""
    other = SPECS.get(cls.__name__) or ABSTRACT.get(cls.__name__) or cls
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(
            f"{cls.__module__}.{cls.__name__}: the name is taken by the spec of the same name in "
            f"{other.__module__}.  Rename one of them."
        )
    kind[cls.__name__] = cls


def _problems(cls: Any, error: ValidationError) -> dict[str, str]:
    """Translates pydantic's errors into one problem for each field."""
    by_field: dict[str, str] = {}
    for detail in error.errors():
        field = str(detail["loc"][0]) if detail["loc"] else ""
        by_field.setdefault(field, _text(cls, field, detail))
    return by_field


def _text(cls: Any, field: str, detail: Any) -> str:
    name = f"{cls.__name__}.{field}"
    cause = detail.get("ctx", {}).get("error")
    if not field:  # raised by __post_init__
        if isinstance(cause, AssertionError):
            raise cause
        return str(cause) if isinstance(cause, UserError) else f"{cls.__name__}: {cause}"
    if detail["type"] == "unexpected_keyword_argument":
        return no_such_parameter(cls, field)
    if field not in cls.__pydantic_fields__:
        return f"{cls.__name__}: give its parameters by name."
    info = cls.__pydantic_fields__[field]
    words = legal(info.annotation, tuple(info.metadata))
    if detail["type"] == "missing":
        return f"{name} is missing, legal: {words}."
    place = "".join(f"[{part}]" for part in detail["loc"][1:] if isinstance(part, int))
    kind = f"found {type(detail['input']).__name__}, " if "type" in detail["type"] else ""
    return f"{name}{place} = {brief(repr(detail['input']))}: {kind}legal: {words}."
