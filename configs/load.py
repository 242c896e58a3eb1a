"""Loads gin files into a `Config`, which makes specs and records where each value came from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from configs import write
from configs.errors import UserError, listed
from configs.read import FLAG, Binding, Reader, Reference, references_in
from configs.spec import SPECS, SpecError, is_spec, names

T = TypeVar("T")

MAX_REFERENCES = 10_000
MAX_CHAIN = 100

_FAILED = object()
_Chain = tuple[tuple[Reference, tuple[str, ...]], ...]  # references being followed, with scopes


class Maker:
    """Makes specs from bindings, and records every parameter and binding that it uses.

    The origin of a parameter is "default" if no file or flag binds it.
    """

    def __init__(self, bound: Mapping[str, Binding]) -> None:
        self.bound = bound
        self.noted: dict[tuple[str, str, str], Binding] = {}
        self.references = 0
        self.used: set[str] = set()
        self.problems: list[str] = []

    def make(self, cls: type[T]) -> T:
        made = self._spec(cls, (), (), None)
        self._raise_problems(cls.__name__)
        assert isinstance(made, cls)
        return made

    def make_value(self, binding: Binding, scopes: tuple[str, ...] = ()) -> Any:
        made = self._value(binding.value, scopes, (), binding.origin)
        self._raise_problems(binding.name)
        return made

    def binding(self, name: str, scopes: tuple[str, ...]) -> Binding | None:
        """Finds the binding of a setting in a scope.  Inner scopes override outer ones."""
        inner_first = ("/".join((*scopes[:n], name)) for n in range(len(scopes), -1, -1))
        return next((self.bound[name] for name in inner_first if name in self.bound), None)

    def _raise_problems(self, name: str) -> None:
        if self.problems:
            raise UserError(listed(name, list(dict.fromkeys(self.problems))))

    def _spec(self, cls: Any, scopes: tuple[str, ...], chain: _Chain, base: Any) -> Any:
        """Makes one spec.  Returns `_FAILED` after a problem, so that what holds it is checked.

        base: the default instance of a field, whose settings bindings override.
        """
        bound = {name: self.binding(f"{cls.__name__}.{name}", scopes) for name in names(cls)}
        values = {}
        for field in dataclasses.fields(cls):
            if binding := bound.get(field.name):
                self.used.add(binding.name)
                self._note(binding)
                values[field.name] = self._value(binding.value, scopes, chain, binding.origin)
                continue
            default = field.default if base is None else getattr(base, field.name)
            if default is not dataclasses.MISSING:
                name = "/".join((*scopes, f"{cls.__name__}.{field.name}"))
                shown = write.with_references(default)
                self._note(Binding(name=name, value=shown, origin="default"))
                values[field.name] = self._value(default, scopes, chain, "default")
        failed = {name for name, value in values.items() if value is _FAILED}
        try:
            return cls(**values)
        except SpecError as error:
            for field_name, problem in error.problems.items():
                if field_name not in failed:
                    name = "/".join((*scopes, cls.__name__))
                    self._problem(name, field_name, problem, bound.get(field_name), values)
            return _FAILED

    def _problem(
        self, spec_name: str, field: str, text: str, binding: Binding | None, values: Any
    ) -> None:
        """Records a problem.  Names the setting with its scope, as the gin file does."""
        setting = f"{spec_name}.{field}"
        if not field:
            text = f"@{spec_name}(): {text}" if "/" in spec_name else text
        elif binding:
            text = f"{binding.origin}: {_renamed(text, binding.name)}"
        else:
            text = _renamed(text, setting)
            if field not in values:
                text += f'  Set it in a gin file or with {FLAG}="{setting}=...".'
        self.problems.append(text)

    def _value(self, value: Any, scopes: tuple[str, ...], chain: _Chain, at: str) -> Any:
        """Resolves references and macros, and rebuilds default specs with their own bindings."""
        if isinstance(value, list | tuple):
            items = tuple(self._value(item, scopes, chain, at) for item in value)
            return _FAILED if any(item is _FAILED for item in items) else items
        if is_spec(value):
            return self._spec(type(value), scopes, chain, value)
        if not isinstance(value, Reference):
            return value
        if (value, scopes) in chain:
            path = " -> ".join([link for link, _ in chain] + [value])
            self.problems.append(f"{at}: {path}: refers to itself.")
            return _FAILED
        chain = (*chain, (value, scopes))
        self.references += 1
        if self.references > MAX_REFERENCES or len(chain) > MAX_CHAIN:
            raise UserError(f"{at}: {value}: too many references to follow.")
        if value[0] == "@":
            return self._spec(SPECS[value.target], value.scopes or scopes, chain, None)
        macro = self.bound[value.target]
        self.used.add(macro.name)
        return self._value(macro.value, scopes, chain, macro.origin)

    def _note(self, setting: Binding) -> None:
        self.noted.setdefault((setting.name, setting.origin, repr(setting.value)), setting)


def _renamed(text: str, setting: str) -> str:
    """Adds the scope of a setting to a problem that starts with the setting's name."""
    bare = setting.rpartition("/")[2]
    return setting + text.removeprefix(bare) if text.startswith(bare) else text


@dataclass(frozen=True, kw_only=True, eq=False)
class Config:
    """Holds everything that gin files and flags bind.  Later bindings override earlier ones."""

    bound: Mapping[str, Binding]
    imports: tuple[str, ...] = ()
    replaced_values: tuple[Any, ...] = ()

    def make(self, cls: type[T]) -> T:
        """Makes a spec, and all specs nested in it, from the bindings."""
        return Maker(self.bound).make(cls)

    def value(self, name: str, scopes: tuple[str, ...] = ()) -> Any:
        """Returns the value of a setting, with its references resolved; None if it is unset."""
        maker = Maker(self.bound)
        binding = maker.binding(name, scopes)
        return maker.make_value(binding, scopes) if binding else None

    @property
    def origins(self) -> dict[str, str]:
        """Returns which file or flag set each value."""
        return {binding.name: binding.origin for binding in self.bound.values()}

    def table(self, *classes: type[Any]) -> tuple[Binding, ...]:
        """Lists every parameter of these specs and of all specs nested in them."""
        return tuple(self._made(classes).noted.values())

    def unused(self, *parts: type[Any] | str) -> tuple[Binding, ...]:
        """Lists the bindings that these specs and settings, with the specs in them, do not use."""
        used = self._made(parts).used
        return tuple(binding for binding in self.bound.values() if binding.name not in used)

    def replaced(self) -> set[str]:
        """Returns the specs and macros that overridden values name, also through settings."""
        names = [reference.target for reference in references_in(self.replaced_values)]
        for name in names:  # the loop appends the names in their settings
            of_name = [b.value for b in self.bound.values() if b.spec == name]
            targets = {reference.target for value in of_name for reference in references_in(value)}
            names += targets - set(names)
        return set(names)

    def _made(self, parts: Iterable[type[Any] | str]) -> "Maker":
        maker = Maker(self.bound)
        for part in parts:
            maker.make_value(self.bound[part]) if isinstance(part, str) else maker.make(part)
        return maker


def load(gin_files: Sequence[str], gin_params: Sequence[str] = ()) -> Config:
    """Reads gin files, then `--gin_param` bindings.  The last value that is bound to a name wins.

    Files and includes are searched for in the current folder, then in the checkout.  A spec is
    known once its module is imported, by the caller or by an `import` line in a file.
    """
    reader = Reader()
    for name in gin_files:
        reader.file(str(name))
    for param in gin_params:
        reader.parse(param)
    reader.check()
    if reader.problems:
        raise UserError(listed("Configuration", list(dict.fromkeys(reader.problems))))
    imports = tuple(dict.fromkeys(reader.imports))
    return Config(
        bound=reader.bound, imports=imports, replaced_values=tuple(reader.replaced_values)
    )
