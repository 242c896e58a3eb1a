"""Reads the parts of a Transformer for formats that name none."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from configs.errors import UserError
from configs.write import shown
from models.parts import Block, BlockParts
from models.transformer import Transformer

T = TypeVar("T")


def with_parts_of_first_block(spec: Transformer) -> Transformer:
    """Returns the same model with the shortest pattern, whose blocks name only parts that the first
    lacks: the Transformer names those."""
    if spec.encoder_pattern == spec.pattern:
        spec = dataclasses.replace(spec, encoder_pattern=None)
    if spec.encoder_pattern is not None:
        return spec
    blocks, positions = spec.blocks, spec.positions
    turns = range(1, len(blocks) + 1)
    turn = next(n for n in turns if blocks[:n] * (len(blocks) // n) == blocks)
    names = ["attention", "feed_forward"]
    if not (positions.changes_embeddings or positions.shares_bias):
        names.append("positions")
    named = {name: getattr(blocks[0], name) for name in names}

    def renamed(block: Block, parts: BlockParts) -> Block:
        every = {"norm": spec.norm, "positions": positions, **named}
        resolved = {name: (getattr(parts, name), part) for name, part in every.items()}
        others: dict[str, Any] = {
            name: None if mine == part else mine for name, (mine, part) in resolved.items()
        }
        return dataclasses.replace(block, **others)

    pattern = tuple(map(renamed, spec.pattern[:turn], blocks))
    return dataclasses.replace(spec, **named, pattern=pattern)


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
