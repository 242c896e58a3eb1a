"""Reads gin files into a `Config`, and makes specs from it.

gin's grammar and its rules for scopes are kept; its global registry and state are not used, so that
two configs can live side by side and every mistake is found and reported with its place.
"""

import dataclasses
import importlib
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gin import config_parser

from configs.errors import UserError, did_you_mean, listed
from configs.spec import SPECS, SpecError, is_spec, no_such_parameter

CHECKOUT = Path(__file__).resolve().parent.parent
FLAG = "--gin_param"

T = TypeVar("T")

_FAILED = object()
_PYTHON = {"true": "True", "false": "False", "none": "None", "null": "None"}
_Chain = tuple[
    tuple["Reference", tuple[str, ...]], ...
]  # references being followed, each in a scope


class Reference(str):
    """Holds the gin text of a reference, `@scope/Name()`, or of a macro, `%NAME`."""

    __slots__ = ()
    __repr__ = str.__str__

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(self[1:].split("/")[:-1])

    @property
    def target(self) -> str:
        """Name of the spec or of the macro."""
        name = self[1:].removesuffix("()")
        return name if self[0] == "%" else name.split("/")[-1]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Holds one name bound by a gin file or flag, and what it replaced, oldest first."""

    name: str
    value: Any
    where: str
    overridden: tuple[tuple[Any, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds one parameter of a spec in use; `where` is "default" for a value nobody bound."""

    name: str
    value: Any
    where: str

    @property
    def default(self) -> bool:
        return self.where == "default"


@dataclass(frozen=True, kw_only=True, eq=False)
class Config:
    """Holds everything that the gin files and flags bound, later ones over earlier ones."""

    bound: Mapping[str, Binding]
    imports: tuple[str, ...] = ()

    def make(self, cls: type[T]) -> T:
        """Makes a spec, and all specs nested in it, from what is bound."""
        return _Maker(self.bound).make(cls)

    def bindings(self) -> tuple[Binding, ...]:
        return tuple(self.bound.values())

    def table(self, *classes: type[Any]) -> tuple[Row, ...]:
        """Lists every parameter of these specs and of all specs nested in them."""
        return tuple(self._made(classes).rows)

    def unused(self, *classes: type[Any]) -> tuple[Binding, ...]:
        """Lists the bindings that none of these specs, nor any nested in them, reads."""
        used = self._made(classes).used
        return tuple(binding for binding in self.bindings() if binding.name not in used)

    def dump(self, specs: Iterable[Any], exclude: Collection[str] = ()) -> str:
        """Spells these specs and all nested in them out as one gin text without includes.

        exclude: parameters to leave out, such as "Run.directory".
        """
        labels = _labels(specs)
        lines = [f"import {module}\n" for module in self.imports]
        for made, label in labels.items():
            lines += ["\n"] if lines else []
            for name, value in _fields(made):
                if f"{type(made).__name__}.{name}" not in exclude:
                    lines.append(f"{label}.{name} = {_spelt(value, labels)}\n")
        return "".join(lines)

    def _made(self, classes: Iterable[type[Any]]) -> "_Maker":
        maker = _Maker(self.bound)
        for cls in classes:
            maker.make(cls)
        return maker


def load(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> Config:
    """Reads gin files, then `--gin_param` bindings; of two values for one name the later wins.

    Files and their includes are looked for from the current folder, then from the checkout.  A spec
    is known once its module is imported, by the caller or by an `import` line in a file.
    """
    reader = _Reader()
    for name in gin_files:
        reader.file(str(name))
    for param in gin_params:
        reader.param(param)
    reader.check()
    if reader.problems:
        raise UserError(listed("Configuration", list(dict.fromkeys(reader.problems))))
    return Config(bound=reader.bound, imports=tuple(dict.fromkeys(reader.imports)))


def diff(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Lists (name, value in a, value in b) for each parameter in which two specs differ."""
    if type(a) is not type(b):
        return [(type(a).__name__, a, b)]
    found = [
        difference
        for (name, x), (_, y) in zip(_fields(a), _fields(b), strict=True)
        for difference in _differences(f"{type(a).__name__}.{name}", x, y)
    ]
    return [difference for i, difference in enumerate(found) if difference not in found[:i]]


class _Grammar:
    """Tells gin's parser what references and macros become."""

    def configurable_reference(self, name: str, evaluate: bool) -> Reference:
        return Reference(f"@{name}()" if evaluate else f"@{name}")

    def macro(self, name: str) -> Reference:
        return Reference(f"%{name}")


class _Reader:
    """Collects bindings and problems from files and flags."""

    def __init__(self) -> None:
        self.bound: dict[str, Binding] = {}
        self.imports: list[str] = []
        self.problems: list[str] = []
        self.statements: list[tuple[str, Any]] = []

    def file(self, name: str, where: str = "", outer: tuple[Path, ...] = ()) -> None:
        path = next((p for p in _candidates(name) if p.is_file()), None)
        if path is None:
            self.problems.append(f"{where}{_not_found(name)}")
        elif path in outer:
            self.problems.append(f"{where}{name} includes itself.")
        else:
            self._parse(path.read_text(encoding="utf-8", errors="replace"), name, (*outer, path))

    def param(self, text: str) -> None:
        self._parse(text, None, ())

    def check(self) -> None:
        """Finds names that lead nowhere; what is known is settled only at the end."""
        complete = not self.problems
        macros = {name for name in self.bound if "." not in name}
        read = set()
        for where, statement in self.statements:
            if statement.arg_name:
                self._check_parameter(where, statement)
            for reference in _references(statement.value):
                read.add(reference.target)
                self._check_reference(where, reference, macros if complete else None)
        for where, statement in self.statements:
            name = statement.selector
            if where == FLAG and not statement.arg_name and name not in read:
                owners = [s for s, cls in SPECS.items() if name in _names(cls)]
                near = f"  Did you mean {owners[0]}.{name}?" if owners else ""
                self.problems.append(f"{FLAG}: {name}: nothing reads %{name}.{near}")

    def _check_parameter(self, where: str, statement: Any) -> None:
        name = f"{statement.selector}.{statement.arg_name}"
        if self._check_spec(f"{where}: {name}", statement.selector):
            cls = SPECS[statement.selector]
            if statement.arg_name not in _names(cls):
                self.problems.append(f"{where}: {no_such_parameter(cls, statement.arg_name)}")

    def _check_reference(
        self, where: str, reference: Reference, macros: Collection[str] | None
    ) -> None:
        if reference[0] == "@":
            known = self._check_spec(f"{where}: {reference}", reference.target)
            if known and not reference.endswith("()"):
                self.problems.append(f"{where}: {reference}: legal: {reference}().")
        elif macros is not None and reference.target not in macros:
            near = did_you_mean(reference.target, macros)
            self.problems.append(f"{where}: {reference}: no such macro.{near}")

    def _check_spec(self, where: str, name: str) -> bool:
        if name not in SPECS:
            near = did_you_mean(name, SPECS)
            known = ", ".join(sorted(SPECS))
            self.problems.append(f"{where}: no spec is named {name}.{near}  Legal: {known}.")
        return name in SPECS

    def _parse(self, text: str, file: str | None, files: tuple[Path, ...]) -> None:
        line = 1
        try:
            parser = config_parser.ConfigParser(text, _Grammar())
            while statement := parser.parse_statement():
                line = statement.location.line_num
                self._statement(statement, f"{file}:{line}" if file else FLAG, files)
        except (SyntaxError, tokenize.TokenError) as error:
            line = (error.lineno or line) if isinstance(error, SyntaxError) else error.args[1][0]
            lines = text.splitlines() or [""]
            where = f"{file}:{line}" if file else FLAG
            wrong = lines[min(line, len(lines)) - 1].strip() if file else text
            self.problems.append(f"{where}: cannot read {wrong}\n  {_remedy(wrong, error, file)}")

    def _statement(self, statement: Any, where: str, files: tuple[Path, ...]) -> None:
        match statement:
            case config_parser.IncludeStatement():
                self.file(statement.filename, f"{where}: ", files)
            case config_parser.ImportStatement():
                self._import(statement.module, where)
            case config_parser.BindingStatement():
                self._bind(statement, where)

    def _import(self, module: str, where: str) -> None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and its own imports are broken
            self.problems.append(f"{where}: import {module}: no module named {error.name}.")
        self.imports.append(module)

    def _bind(self, statement: Any, where: str) -> None:
        scope = f"{statement.scope}/" if statement.scope else ""
        dot = "." if statement.arg_name else ""
        name = f"{scope}{statement.selector}{dot}{statement.arg_name}"
        self.statements.append((where, statement))
        old = self.bound.get(name)
        overridden = (*old.overridden, (old.value, old.where)) if old else ()
        self.bound[name] = Binding(
            name=name, value=statement.value, where=where, overridden=overridden
        )


class _Maker:
    """Makes specs from bindings; notes each parameter's origin and each binding read."""

    def __init__(self, bound: Mapping[str, Binding]) -> None:
        self.bound = bound
        self.rows: list[Row] = []
        self.used: set[str] = set()
        self.problems: list[str] = []

    def make(self, cls: type[T]) -> T:
        made = self._spec(cls, (), (), None)
        if self.problems:
            raise UserError(listed(cls.__name__, list(dict.fromkeys(self.problems))))
        assert isinstance(made, cls)
        return made

    def _spec(self, cls: Any, scopes: tuple[str, ...], chain: _Chain, base: Any) -> Any:
        """Makes one spec; `_FAILED` after a problem, so that what holds it is still checked.

        base: the instance that stands as a default in a field; what is bound goes on top of it.
        """
        bound, values = self._bound(cls, scopes), {}
        for field in dataclasses.fields(cls):
            if binding := bound.get(field.name):
                self.used.add(binding.name)
                self._note(binding.name, binding.value, binding.where)
                values[field.name] = self._value(binding.value, scopes, chain, binding.where)
                continue
            default = _default(field) if base is None else getattr(base, field.name)
            if default is not dataclasses.MISSING:
                shown = Reference(f"@{type(default).__name__}()") if is_spec(default) else default
                self._note("/".join((*scopes, f"{cls.__name__}.{field.name}")), shown, "default")
                values[field.name] = self._default(default, scopes, chain)
        failed = {name for name, value in values.items() if value is _FAILED}
        try:
            return cls(**values)
        except SpecError as error:
            for problem in error.problems:
                if problem.field not in failed:
                    self._problem(cls, problem, bound.get(problem.field), values)
            return _FAILED

    def _problem(self, cls: Any, problem: Any, binding: Binding | None, values: Any) -> None:
        text = problem.text
        if binding:
            text = f"{binding.where}: {text}"
        elif problem.field and problem.field not in values:
            text += f'  Set it in a gin file or with {FLAG}="{cls.__name__}.{problem.field}=...".'
        self.problems.append(text)

    def _bound(self, cls: Any, scopes: tuple[str, ...]) -> dict[str, Binding]:
        """Finds the bindings of a spec in a scope; an inner scope goes before an outer one."""
        found = {}
        for depth in range(len(scopes) + 1):
            for field in _names(cls):
                name = "/".join((*scopes[:depth], f"{cls.__name__}.{field}"))
                if name in self.bound:
                    found[field] = self.bound[name]
        return found

    def _value(self, value: Any, scopes: tuple[str, ...], chain: _Chain, at: str) -> Any:
        """Follows references and macros."""
        if isinstance(value, list | tuple):
            items = tuple(self._value(item, scopes, chain, at) for item in value)
            return _FAILED if any(item is _FAILED for item in items) else items
        if not isinstance(value, Reference):
            return value
        if (value, scopes) in chain:
            path = " -> ".join([link for link, _ in chain] + [value])
            self.problems.append(f"{at}: {path}: refers to itself.")
            return _FAILED
        chain = (*chain, (value, scopes))
        if value[0] == "@":
            return self._spec(SPECS[value.target], value.scopes or scopes, chain, None)
        macro = self.bound[value.target]
        self.used.add(macro.name)
        return self._value(macro.value, scopes, chain, macro.where)

    def _default(self, value: Any, scopes: tuple[str, ...], chain: _Chain) -> Any:
        if isinstance(value, tuple):
            items = tuple(self._default(item, scopes, chain) for item in value)
            return _FAILED if any(item is _FAILED for item in items) else items
        return self._spec(type(value), scopes, chain, value) if is_spec(value) else value

    def _note(self, name: str, value: Any, where: str) -> None:
        row = Row(name=name, value=value, where=where)
        if row not in self.rows:
            self.rows.append(row)


def _candidates(name: str) -> tuple[Path, ...]:
    return (Path.cwd() / name, CHECKOUT / name)


def _not_found(name: str) -> str:
    """Says where a file was looked for, and which neighbour was perhaps meant."""
    folders = [path.parent for path in _candidates(name)]
    near = [p.name for folder in folders if folder.is_dir() for p in folder.glob("*.gin")]
    hint = did_you_mean(Path(name).name, near)
    looked = " and ".join(str(folder) for folder in dict.fromkeys(folders))
    return f"{name}: no such file in {looked}.{hint}"


def _remedy(text: str, error: Exception, file: str | None) -> str:
    """Shows how a statement that gin cannot read is to be written."""
    reason = str(error.args[0]).splitlines()[-1].strip().rstrip(".") + "."
    name, equals, value = (part.strip() for part in text.partition("="))
    named = equals and re.fullmatch(r"[\w/.]+", name)
    if named and value and value[0] in "([{@%":
        return reason
    if not named or not value:
        name, value = name if named else "Name.parameter", "value"
    elif value.lower() in _PYTHON:
        value = _PYTHON[value.lower()]
    else:
        value = "'" + value.strip("'\"").replace("'", r"\'") + "'"
        reason = "A string needs quotes."
    legal = f"{name} = {value}" if file else f'{FLAG}="{name}={value}"'
    return f"{reason}  Legal: {legal}"


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _fields(made: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(made, name)) for name in _names(type(made))]


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _references(value: Any) -> Iterator[Reference]:
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


def _labels(specs: Iterable[Any]) -> dict[Any, str]:
    """Names each distinct spec: its bare class name, or a scope of its own where that is taken.

    No scope is used twice, so nothing leaks from one spec into another that is nested in it.
    """
    labels: dict[Any, str] = {}
    tops = list(dict.fromkeys(specs))
    pairs = [("", made) for made in tops] + [pair for made in tops for pair in _nested(made)]
    for field, made in pairs:
        if made not in labels:
            name = type(made).__name__
            free = name not in labels.values()
            assert free or field, f"two top-level specs of the class {name}"
            labels[made] = name if free else f"{field}_{len(labels)}/{name}"
    return labels


def _nested(made: Any) -> Iterator[tuple[str, Any]]:
    """Walks all specs below one, with the field that holds each."""
    for name, value in _fields(made):
        for item in value if isinstance(value, tuple) else (value,):
            if is_spec(item):
                yield name, item
                yield from _nested(item)


def _spelt(value: Any, labels: Mapping[Any, str]) -> str:
    if isinstance(value, tuple):
        items = [_spelt(item, labels) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return f"@{labels[value]}()" if is_spec(value) else repr(value)


def _differences(name: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if is_spec(a) and type(a) is type(b):
        return diff(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and any(map(is_spec, a)):
        return [d for x, y in zip(a, b, strict=True) for d in _differences(name, x, y)]
    return [] if a == b else [(name, a, b)]
