"""Normalizes the parts of a Transformer, for formats that do not name parts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from models.parts import Block, BlockParts
from models.transformer import Transformer

T = TypeVar("T")


def with_shortest_pattern(spec: Transformer) -> Transformer:
    """Returns the same model with the fewest blocks.  The Transformer gets the parts of the
    pattern's first block; a block keeps only the parts that differ."""
    if spec.encoder_pattern == spec.pattern:
        spec = dataclasses.replace(spec, encoder_pattern=None)
    if spec.encoder_pattern is not None or (spec.has_encoder and spec.first_blocks):
        return spec
    layers, positions = spec.blocks_by_layer, spec.positions
    first, period = shortest_repeat(layers)
    names = ["attention", "feed_forward"]
    if not (positions.changes_embeddings or positions.shares_bias):
        names.append("positions")
    named = {name: getattr(layers[first], name) for name in names}

    def renamed(block: Block, parts: BlockParts) -> Block:
        every = {"norm": spec.norm, "positions": positions, **named}
        resolved = {name: (getattr(parts, name), part) for name, part in every.items()}
        others: dict[str, Any] = {
            name: None if mine == part else mine for name, (mine, part) in resolved.items()
        }
        return dataclasses.replace(block, **others)

    every = spec.first_blocks + spec.pattern * len(layers)
    blocks = tuple(map(renamed, every[: first + period], layers))
    return dataclasses.replace(spec, **named, first_blocks=blocks[:first], pattern=blocks[first:])


def shortest_repeat(layers: Sequence[object]) -> tuple[int, int]:
    """Returns how many layers come first and how many repeat after them, with the least sum."""
    best = len(layers), 0, len(layers)  # the sum, layers that come first, layers that repeat
    for period in range(1, len(layers)):
        if period > best[0]:
            break
        first = len(layers) - period
        while first and layers[first - 1] == layers[first - 1 + period]:
            first -= 1
        first += (len(layers) - first) % period  # complete repeats only
        best = min(best, (first + period, first, period))
    return best[1:]


def of_kind(part: object, kind: type[T]) -> T:
    """Returns a part if it is of a kind, else one of that kind with its defaults."""
    return part if isinstance(part, kind) else kind()
