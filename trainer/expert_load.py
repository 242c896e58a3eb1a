"""What the routers of a step did, layer by layer, for people."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from models.moe.routing import Load

DROPPED_BOUND = 0.25  # of the choices of a layer
LOAD_BOUND = 8.0  # times the even share that one expert gets

Layer = dict[str, Any]


def by_layer(loads: dict[str, Any]) -> dict[str, Layer]:
    """The numbers of each layer with experts, by its stack and its number: "decoder 1"."""
    return {
        f"{stack} {number}": numbers(load)
        for stack, turns in sorted(loads.items())
        for number, load in layers(turns)
    }


def layers(turns: Any) -> Iterator[tuple[int, Load]]:
    """Loads by the number of their layer, from 0, of the stacked loads of a stack."""
    blocks = turns if isinstance(turns, dict) else {"block0": turns}
    found = {}
    for block, stacked in blocks.items():
        if stacked is not None:
            for turn in range(len(stacked.tokens)):
                own = Load(*(np.asarray(field)[turn] for field in stacked))
                found[turn * len(blocks) + int(block.removeprefix("block"))] = own
    yield from sorted(found.items())


def numbers(load: Load) -> Layer:
    """Shares and means of one layer.

    load: each expert's part of the choices that found a place; dropped: the share of first,
    second, ... choices that found none; idle: experts without a token; entropy in nats.
    """
    tokens = max(float(load.tokens), 1.0)
    kept_e, chosen_I = np.asarray(load.kept_e), np.maximum(load.chosen_I, 1)
    return {
        "load": (kept_e / max(float(kept_e.sum()), 1.0)).tolist(),
        "dropped": (1 - load.kept_I / chosen_I).tolist() if load.tokens else [],
        "idle": int((kept_e == 0).sum()),
        "entropy": float(load.entropy) / tokens,
        "aux": float(load.aux) / tokens,
        "z": float(load.z) / tokens,
    }


def scalars(layers: dict[str, Layer]) -> dict[str, float]:
    """The same as single numbers, for curves."""
    found: dict[str, float] = {}
    for name, layer in layers.items():
        found |= {f"{name}/{key}": float(layer[key]) for key in ("idle", "entropy", "aux", "z")}
        found[f"{name}/largest_load"] = max(layer["load"])
        found |= {f"{name}/dropped_{i}": share for i, share in enumerate(layer["dropped"], 1)}
    return found


def warnings(layers: dict[str, Layer]) -> list[str]:
    """Says which layers drop too much or use their experts too unevenly."""
    said = []
    for name, layer in layers.items():
        for i, share in enumerate(layer["dropped"], 1):
            if share > DROPPED_BOUND:
                said.append(f"{name}: {share:.0%} of the choices number {i} found no place.")
        times = max(layer["load"]) * len(layer["load"])
        if times > LOAD_BOUND:
            said.append(f"{name}: one expert has {times:.1f} times its even share of the tokens.")
    return said
