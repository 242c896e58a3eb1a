"""Reads gin files and flags into bindings, and finds undefined names in them.

gin's grammar and scope rules apply.  Its global registry and state are not used, so that two
configs can coexist, and every mistake is reported with its file and line.
"""

import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gin import config_parser

from configs.errors import brief, did_you_mean
from configs.imports import CHECKOUT, import_module
from configs.paths import is_remote, path_of
from configs.spec import ABSTRACT, SPECS, cannot_make, names, no_such_parameter

FLAG = "--gin_param"
MAX_FILES = 1_000
MAX_CHARACTERS = 1 << 24
MAX_PROBLEMS = 50
MAX_STRINGS = 1_000
MAX_DEPTH = 10
TOO_DEEP = f"Nested more than {MAX_DEPTH} deep."
# What gin's parser raises; those after the first two for odd values such as {[]: 1}.
PARSE_ERRORS = (SyntaxError, tokenize.TokenError, RecursionError, TypeError, ValueError,
                StopIteration)  # fmt: skip
PYTHON = {"true": "True", "false": "False", "none": "None", "null": "None"}


class Reference(str):
    """Holds the gin text of a reference, `@scope/Name()`, or of a macro, `%NAME`."""

    __slots__ = ()
    __repr__ = str.__str__

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(self[1:].split("/")[:-1])

    @property
    def target(self) -> str:
        """Returns the name of the spec or of the macro."""
        name = self[1:].removesuffix("()")
        return name if self[0] == "%" else name.split("/")[-1]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Holds one name bound by a gin file or flag."""

    name: str
    value: Any
    origin: str

    @property
    def spec(self) -> str:
        """Returns the name of the spec that has this setting; for a macro, its own name."""
        return self.name.rpartition("/")[2].partition(".")[0]


class Grammar:
    """Defines what gin's parser makes of references and macros."""

    def configurable_reference(self, name: str, evaluate: bool) -> Reference:
        return Reference(f"@{name}()" if evaluate else f"@{name}")

    def macro(self, name: str) -> Reference:
        return Reference(f"%{name}")


class TooLarge(SyntaxError):
    """Reports text that gin could parse, but that is longer or deeper than any setting needs."""


class Parser(config_parser.ConfigParser):
    """Parses like gin, but limits the strings in a row: gin's time is quadratic in their number."""

    strings = 0

    def _advance_one_token(self) -> None:
        super()._advance_one_token()
        if self.current_token.type == tokenize.STRING:
            self.strings += 1
        elif self.current_token.type not in (tokenize.NL, tokenize.COMMENT):
            self.strings = 0
        if self.strings > MAX_STRINGS:
            raise TooLarge(f"More than {MAX_STRINGS:,} strings in a row.")


class Reader:
    """Collects bindings and problems from files and flags."""

    def __init__(self) -> None:
        self.files = 0
        self.characters = 0
        self.bound: dict[str, Binding] = {}
        self.replaced_values: list[Any] = []
        self.imports: list[str] = []
        self.problems: list[str] = []
        self.lacks_modules = False  # a module that cannot be imported may define any spec
        self.statements: list[tuple[str, Any]] = []

    def file(self, name: str, origin: str = "", outer: tuple[Path, ...] = ()) -> None:
        path = next((p for p in _candidates(name) if _is_file(p)), None)
        self.files += 1
        if self.files > MAX_FILES:
            if self.files == MAX_FILES + 1:
                self.problems.append(f"{origin}more than {MAX_FILES:,} files and includes.")
        elif path is None:
            self.problems.append(f"{origin}{_no_such_file(name)}")
        elif path in outer:
            self.problems.append(f"{origin}{name} includes itself.")
        else:
            try:
                with path.open("rb") as raw:
                    file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace")
                    text = file.read(MAX_CHARACTERS + 1)
            except OSError as error:
                self.problems.append(f"{origin}{name}: cannot be read: {error.strerror}.")
            else:
                self.parse(text, name, (*outer, path))

    def check(self) -> None:
        """Finds undefined names, once all files and flags are read."""
        complete = not self.problems
        if len(self.problems) >= MAX_PROBLEMS:
            return
        macros = {name for name in self.bound if "." not in name}
        read = set()
        for origin, statement in self.statements:
            if statement.arg_name:
                self._check_parameter(origin, statement)
            for reference in references_in(statement.value):
                read.add(reference.target)
                self._check_reference(origin, reference, macros if complete else None)
        for origin, statement in self.statements:
            name = statement.selector
            if origin == FLAG and not statement.arg_name and name not in read:
                owners = [s for s, cls in SPECS.items() if name in names(cls)]
                near = f"  Did you mean {owners[0]}.{name}?" if owners else ""
                self.problems.append(f"{FLAG}: {name}: nothing reads %{name}.{near}")

    def _check_parameter(self, origin: str, statement: Any) -> None:
        name = f"{statement.selector}.{statement.arg_name}"
        if self._check_spec(f"{origin}: {name}", statement.selector):
            cls = SPECS[statement.selector]
            if statement.arg_name not in names(cls):
                scope = f"{statement.scope}/" if statement.scope else ""
                problem = no_such_parameter(cls, statement.arg_name)
                self.problems.append(f"{origin}: {scope}{problem}")

    def _check_reference(self, origin: str, reference: Reference, macros: set[str] | None) -> None:
        if reference[0] == "@":
            known = self._check_spec(f"{origin}: {reference}", reference.target)
            if known and not reference.endswith("()"):
                self.problems.append(f"{origin}: {reference}: legal: {reference}().")
        elif macros is not None and reference.target not in macros:
            near = did_you_mean(reference.target, macros)
            hint = near or f"  Set it, as in {reference.target} = ..., or name a file that does."
            self.problems.append(f"{origin}: {reference}: no such macro.{hint}")

    def _check_spec(self, origin: str, name: str) -> bool:
        if name in ABSTRACT:
            self.problems.append(f"{origin}: {cannot_make(ABSTRACT[name])}")
        elif name not in SPECS and not self.lacks_modules:
            near = did_you_mean(name, SPECS)
            known = ", ".join(sorted(SPECS))
            self.problems.append(f"{origin}: no spec is named {name}.{near}  Legal: {known}.")
        return name in SPECS

    def parse(self, text: str, file: str | None = None, files: tuple[Path, ...] = ()) -> None:
        """Parses the text of a file or of a flag."""
        self.characters += len(text)
        if self.characters > MAX_CHARACTERS:
            name = brief(file or FLAG)
            self.problems.append(f"{name}: too long: more than {MAX_CHARACTERS:,} characters.")
            return
        parser, line = None, 1
        while len(self.problems) < MAX_PROBLEMS:
            try:
                parser = parser or Parser(text, Grammar())
                statement = parser.parse_statement()
                if statement is None:
                    return
                _check_depth(getattr(statement, "value", None))
            except PARSE_ERRORS as error:
                self._cannot_read(text, error, line, file)
                return
            line = statement.location.line_num
            self._statement(statement, f"{file}:{line}" if file else FLAG, files)

    def _cannot_read(self, text: str, error: Exception, line: int, file: str | None) -> None:
        if isinstance(error, SyntaxError):
            line = error.lineno or line
        elif isinstance(error, tokenize.TokenError):
            line = error.args[1][0]
        # From Python 3.12 on, the tokenizer refuses more than 200 brackets.
        if isinstance(error, RecursionError) or "nested parentheses" in str(error):
            error = TooLarge(TOO_DEEP)
        lines = text.splitlines() or [""]
        wrong = lines[min(line, len(lines)) - 1].strip()
        origin = f"{file}:{line}" if file else FLAG
        remedy = _remedy(wrong, error, file)
        self.problems.append(f"{origin}: cannot read {brief(wrong)}\n  {remedy}")

    def _statement(self, statement: Any, origin: str, files: tuple[Path, ...]) -> None:
        match statement:
            case config_parser.IncludeStatement():
                self.file(statement.filename, f"{origin}: ", files)
            case config_parser.ImportStatement():
                if problem := import_module(statement.module):
                    self.problems.append(f"{origin}: import {statement.module}: {problem}")
                    self.lacks_modules = True
                self.imports.append(statement.module)
            case config_parser.BindingStatement():
                scope = f"{statement.scope}/" if statement.scope else ""
                dot = "." if statement.arg_name else ""
                name = f"{scope}{statement.selector}{dot}{statement.arg_name}"
                self.statements.append((origin, statement))
                if name in self.bound:
                    self.replaced_values.append(self.bound[name].value)
                self.bound[name] = Binding(name=name, value=statement.value, origin=origin)


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise TooLarge(TOO_DEEP)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            _check_depth(item, depth + 1)


def _is_file(path: Path) -> bool:
    # `Path.is_file` raises if the name is too long or the folder cannot be searched.
    return path.is_file() if is_remote(path) else os.path.isfile(path)


def _candidates(name: str) -> tuple[Path, ...]:
    path = path_of(name)
    return (path,) if is_remote(path) else (Path.cwd() / path, CHECKOUT / path)


def _no_such_file(name: str) -> str:
    """Describes where a file was searched for, and suggests a similar name in these folders."""
    folders = [path.parent for path in _candidates(name)]
    local = [folder for folder in folders if not is_remote(folder) and os.path.isdir(folder)]
    near = [file.name for folder in local for file in folder.glob("*.gin")]
    hint = did_you_mean(Path(name).name, near)
    looked = " and ".join(brief(str(folder)) for folder in dict.fromkeys(folders))
    shown = brief(name) or "''"
    return f"{shown}: no such file in {looked}.{hint}"


def _remedy(text: str, error: Exception, file: str | None) -> str:
    """Shows how to write a statement that gin cannot parse."""
    reason = str(error.args[0]) if error.args else "it ends too early"
    reason = re.sub("(unexpected )?EOF in multi-line statement", "A bracket is not closed", reason)
    reason = brief(reason.splitlines()[-1].strip().rstrip(".")) + "."
    name, equals, value = (part.strip() for part in text.partition("="))
    named = equals and re.fullmatch(r"[\w/.]+", name)
    if isinstance(error, TooLarge) or (named and value and value[0] in "([{@%"):
        return reason
    if not named or not value:
        name, value = name if named else "Name.parameter", "value"
    elif value.lower() in PYTHON:
        value = PYTHON[value.lower()]
    else:
        spec = f"; for a spec, write @{value}()" if re.fullmatch(r"[A-Z]\w*", value) else ""
        value = "'" + value.strip("'\"").replace("'", r"\'") + "'"
        reason = f"A string needs quotes{spec}."
    name, value = brief(name), brief(value)
    legal = f"{name} = {value}" if file else f'{FLAG}="{name}={value}"'
    return f"{reason}  Legal: {legal}"


def references_in(value: Any) -> Iterator[Reference]:
    """Yields the references and macros in a value."""
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references_in(item)
