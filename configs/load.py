"""Loads gin files into a `Config`, which makes specs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from configs import write
from configs.errors import UserError, listed
from configs.make import Maker, SettingValue
from configs.read import Binding, Reader, references_in

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Config:
    """Holds everything that the gin files and flags bound, later ones over earlier ones."""

    bound: Mapping[str, Binding]
    imports: tuple[str, ...] = ()

    def make(self, cls: type[T]) -> T:
        """Makes a spec, and all specs nested in it, from what is bound."""
        return Maker(self.bound).make(cls)

    def value(self, name: str, scopes: tuple[str, ...] = ()) -> Any:
        """Returns the value of a setting, with the specs that it refers to; None if unset."""
        names = ["/".join((*scopes[:depth], name)) for depth in range(len(scopes) + 1)]
        bound = [self.bound[name] for name in names if name in self.bound]  # the inner last
        return Maker(self.bound).make_value(bound[-1], scopes) if bound else None

    def bindings(self) -> tuple[Binding, ...]:
        return tuple(self.bound.values())

    def table(self, *classes: type[Any]) -> tuple[SettingValue, ...]:
        """Lists every parameter of these specs and of all specs nested in them."""
        return tuple(self._made(classes).noted.values())

    def unused(self, *parts: type[Any] | str) -> tuple[Binding, ...]:
        """Lists the bindings that none of these specs or settings, nor any spec in them, reads."""
        used = self._made(parts).used
        return tuple(binding for binding in self.bindings() if binding.name not in used)

    def replaced(self) -> set[str]:
        """Names the specs and macros in values that later ones replace, and in their settings."""
        values = [value for binding in self.bindings() for value, _ in binding.overridden]
        names = [reference.target for value in values for reference in references_in(value)]
        for name in names:  # to which those of its settings are added
            of_name = [b.value for b in self.bindings() if b.spec == name]
            targets = {reference.target for value in of_name for reference in references_in(value)}
            names += targets - set(names)
        return set(names)

    def dump(self, specs: Iterable[Any], exclude: Collection[str] = ()) -> str:
        """Writes specs as one gin text that needs no other file."""
        return write.dump(specs, self.imports, exclude)

    def _made(self, parts: Iterable[type[Any] | str]) -> "Maker":
        maker = Maker(self.bound)
        for part in parts:
            maker.make_value(self.bound[part]) if isinstance(part, str) else maker.make(part)
        return maker


def load(
    gin_files: Sequence[str],
    gin_params: Sequence[str] = (),
    edits: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
) -> Config:
    """Reads gin files, then `--gin_param` bindings; of two values for one name the later wins.

    Files and their includes are looked for from the current folder, then from the checkout.  A spec
    is known once its module is imported, by the caller or by an `import` line in a file.

    edits: by the name of a file, what its text goes through before it is read.
    """
    reader = Reader(edits)
    for name in gin_files:
        reader.file(str(name))
    for param in gin_params:
        reader.param(param)
    reader.check()
    if reader.problems:
        raise UserError(listed("Configuration", list(dict.fromkeys(reader.problems))))
    return Config(bound=reader.bound, imports=tuple(dict.fromkeys(reader.imports)))
