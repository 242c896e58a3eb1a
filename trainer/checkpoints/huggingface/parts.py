"""Reads the parts of a Transformer for formats that name none."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from models.parts import Block, BlockParts
from models.transformer import Transformer

T = TypeVar("T")


def with_shortest_pattern(spec: Transformer) -> Transformer:
    """Returns the same model with the fewest blocks, which name only parts that the first of its
    pattern lacks: the Transformer names those."""
    if spec.encoder_pattern == spec.pattern:
        spec = dataclasses.replace(spec, encoder_pattern=None)
    if spec.encoder_pattern is not None or (spec.has_encoder and spec.first_blocks):
        return spec
    layers, positions = spec.blocks_by_layer, spec.positions
    first, turn = shortest_repeat(layers)
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
    blocks = tuple(map(renamed, every[: first + turn], layers))
    return dataclasses.replace(spec, **named, first_blocks=blocks[:first], pattern=blocks[first:])


def shortest_repeat(layers: Sequence[object]) -> tuple[int, int]:
    """Returns how many layers come first and how many repeat after them, the fewest together."""
    best = len(layers), 0, len(layers)  # blocks, those that come first, those that repeat
    for turn in range(1, len(layers)):
        if turn > best[0]:
            break
        first = len(layers) - turn
        while first and layers[first - 1] == layers[first - 1 + turn]:
            first -= 1
        first += (len(layers) - first) % turn  # whole repeats only
        best = min(best, (first + turn, first, turn))
    return best[1:]


def of_kind(part: object, kind: type[T]) -> T:
    """Returns a part if it is of a kind, else one of the kind with its defaults."""
    return part if isinstance(part, kind) else kind()
