"""Describes the fields of a dataclass of flags."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple


@dataclasses.dataclass(frozen=True)
class Flag:
    """Describes what the name, type, default and docstring of a flag's field do not."""

    help: str = ""
    """Help of a flag that several dataclasses share; the docstring of a field replaces it."""
    metavar: str | None = None
    min: float | None = None
    above: float | None = None
    """Exclusive minimum of a number."""
    max: float | None = None
    choices: tuple[str, ...] = ()
    """Legal names, for one value or for each value of a tuple."""
    name: str | None = None
    """Name of the flag, if it differs from the field's."""
    off: str | None = None
    """Name of the flag that turns off a field that is True by default."""
    is_argument: bool = False
    is_hidden: bool = False
    names_output: bool = False
    """Whether the value names a file to write; it is checked before the work begins."""
    has_variable: bool = False
    """Whether MESHLOOM_NAME in the environment gives the value if the command line does not."""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class FlagGroup:
    """Turns each derived class of flags into a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class FlagField(NamedTuple):
    """Holds a field of a dataclass of flags: a flag, or a group of them."""

    name: str
    kind: Any
    flag: Flag
    default: Any
    """`dataclasses.MISSING` if the flag is required."""

    @property
    def is_group(self) -> bool:
        return dataclasses.is_dataclass(self.kind)


def flag_fields(flags: type) -> Iterator[FlagField]:
    """Yields the fields of a dataclass of flags."""
    hints, helps = typing.get_type_hints(flags, include_extras=True), field_docstrings(flags)
    for field in dataclasses.fields(flags):
        kind, flag = hints[field.name], Flag()
        if typing.get_origin(kind) is Annotated:
            kind, flag = typing.get_args(kind)
        flag = dataclasses.replace(flag, help=helps.get(field.name, flag.help))
        yield FlagField(field.name, kind, flag, field.default)


def given_flags(flags: Any) -> dict[str, Any]:
    """Returns a dataclass's flags that are not at their defaults, without those of its groups."""
    given = {}
    for name, _, flag, default in (f for f in flag_fields(type(flags)) if not f.is_group):
        if (value := getattr(flags, name)) != default:
            given[f"--{flag.off}" if flag.off and not value else f"--{flag.name or name}"] = value
    return given


@functools.cache
def field_docstrings(cls: type) -> Mapping[str, str]:
    """Returns the docstrings that follow fields of a class or of its bases, each on one line."""
    bases = [base for base in reversed(cls.__bases__) if base is not object]
    texts = {name: text for base in bases for name, text in field_docstrings(base).items()}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for statements in itertools.pairwise(tree.body):
        match statements:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts
