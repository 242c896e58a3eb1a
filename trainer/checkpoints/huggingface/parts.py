"""Reads the parts of a Transformer for formats whose layers are all of one kind."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from configs.errors import UserError
from configs.write import shown
from models.parts import Block
from models.transformer import Transformer

T = TypeVar("T")

ONE_KIND = (Block(),)
"""The pattern of a model whose layers have the parts of the Transformer."""


def with_parts_of_its_block(spec: Transformer) -> Transformer:
    """Returns the same model, where the only block of a pattern names what the Transformer can."""
    if spec.encoder_pattern == spec.pattern:
        spec = dataclasses.replace(spec, encoder_pattern=None)
    if len(spec.pattern) != 1 or spec.encoder_pattern is not None:
        return spec
    [block] = spec.pattern
    parts = [name for name in ("attention", "feed_forward") if getattr(block, name)]
    same = [name for name in ("positions", "norm") if getattr(block, name) == getattr(spec, name)]
    return dataclasses.replace(
        spec,
        **{name: getattr(block, name) for name in parts},
        pattern=(dataclasses.replace(block, **dict.fromkeys([*parts, *same])),),
    )


def refuse_changes(
    changed: Sequence[tuple[str, Any, Any]], owner: str, place: str, free: Sequence[str]
) -> None:
    """Refuses settings under which the weights of an imported model would be another model."""
    if changed:
        rows = "".join(
            f"\n  {name}: {shown(old)} {place}, {shown(new)} set" for name, old, new in changed
        )
        raise UserError(
            f"these settings are not the {owner}'s:{rows}\n"
            f"  Unset them.  Free to choose: {', '.join(free)}."
        )


def of_kind(part: object, kind: type[T]) -> T:
    """Returns a part if it is of a kind, else one of the kind with its defaults."""
    return part if isinstance(part, kind) else kind()
