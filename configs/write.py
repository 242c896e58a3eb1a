"""Writes specs as gin text, and finds the differences between two specs."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from configs.read import Reference
from configs.spec import is_spec, names

_PLAIN = (int, float, str, type(None))


def dump(specs: Iterable[Any], imports: Iterable[str] = ()) -> str:
    """Writes these specs and all specs nested in them as gin text without includes."""
    labels = _labels(specs)
    lines = [f"import {module}\n" for module in imports]
    for made, label in labels.items():
        lines += ["\n"] if lines else []
        lines += [f"{label}.{name} = {shown(value, labels)}\n" for name, value in _fields(made)]
    return "".join(lines)


def values(specs: Iterable[Any]) -> dict[str, Any]:
    """Returns every setting of these specs and of all specs nested in them, by its gin name.

    Numbers, strings and None stay as they are.  Other values are written as in a gin file.
    """
    labels = _labels(specs)
    return {
        f"{label}.{name}": value if isinstance(value, _PLAIN) else shown(value, labels)
        for made, label in labels.items()
        for name, value in _fields(made)
    }


def diff(a: Any, b: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Lists (name, value in a, value in b) for each parameter in which two specs differ.

    `name` is the parameter that holds both specs, if there is one.
    """
    kind = type(a).__name__
    if is_spec(a) and type(a) is type(b):
        fields = zip(_fields(a), _fields(b), strict=True)
        pairs = [pair for (key, x), (_, y) in fields for pair in diff(x, y, f"{kind}.{key}")]
    elif type(a) is type(b) is tuple and len(a) == len(b) and any(map(is_spec, a)):
        pairs = [pair for x, y in zip(a, b, strict=True) for pair in diff(x, y, name)]
    else:
        pairs = [] if a == b else [(name or kind, a, b)]
    return [pair for i, pair in enumerate(pairs) if pair not in pairs[:i]]


def shown(value: Any, labels: Mapping[Any, str] | None = None) -> str:
    """Writes a value as in a gin file; a spec becomes a reference to its label or its class."""
    return repr(with_references(value, labels))


def with_references(value: Any, labels: Mapping[Any, str] | None = None) -> Any:
    """Replaces the specs in a value with references to their labels or to their classes."""
    if isinstance(value, tuple):
        return tuple(with_references(item, labels) for item in value)
    if not is_spec(value):
        return value
    return Reference(f"@{labels[value] if labels else type(value).__name__}()")


def _fields(made: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(made, name)) for name in names(type(made))]


def _labels(specs: Iterable[Any]) -> dict[Any, str]:
    """Labels each distinct spec with its class name, and with a scope where that name is taken.

    No scope is used twice, so that no setting leaks from a spec into one that is nested in it.  A
    run that continues reads its original gin files on top of this text, where a setting without a
    scope reaches every spec of the class.  So among several specs of a class in tuples, which such
    files tell apart by scopes, only one with default settings goes without a scope.
    """
    labels: dict[Any, str] = {}
    tops = list(dict.fromkeys(specs))
    nested = [spec for made in tops for spec in _nested(made, in_tuple=False)]
    kinds = Counter(type(made) for made in {*tops, *(made for _, made, _ in nested)})
    for field, made, in_tuple in [*(("", made, False) for made in tops), *nested]:
        if made not in labels:
            name = type(made).__name__
            free = name not in labels.values()
            assert free or field, f"two top-level specs of the class {name}"
            bare = free and not (in_tuple and kinds[type(made)] > 1 and not is_default(made))
            labels[made] = name if bare else f"{field}_{len(labels)}/{name}"
    return labels


def _nested(made: Any, *, in_tuple: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yields (field, spec, whether it is inside a tuple) for all specs nested in a spec."""
    for name, value in _fields(made):
        is_tuple = isinstance(value, tuple)
        for item in value if is_tuple else (value,):
            if is_spec(item):
                yield name, item, in_tuple or is_tuple
                yield from _nested(item, in_tuple=in_tuple or is_tuple)


def is_default(made: Any) -> bool:
    """Returns whether all settings of a spec have their default values."""
    return all(field.default == getattr(made, field.name) for field in dataclasses.fields(made))
