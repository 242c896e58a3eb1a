"""Summarizes how the routers of a step distributed tokens, by layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.feed_forward.moe.routing import Load

Layer = dict[str, Any]


def stats_by_layer(loads: Mapping[str, Any]) -> dict[str, Layer]:
    """Returns the statistics of each MoE layer, by stack and number: "decoder 1"."""
    stats = dict[str, Layer]()
    for stack, stacked in sorted(loads.items()):
        first = sum(path.startswith("first/") for path in stacked)
        layers = dict[int, Layer]()
        for path, load in stacked.items():
            place, _, block = path.partition("/")
            index = int(block.removeprefix("block") or 0) + (0 if place == "first" else first)
            for repeat in range(0 if load is None else len(load.tokens)):
                number = index + repeat * (len(stacked) - first)
                layers[number] = layer_stats(Load(*(np.asarray(x)[repeat] for x in load)))
        stats |= {f"{stack} {number}": layers[number] for number in sorted(layers)}
    return stats


def layer_stats(load: Load) -> Layer:
    """Returns shares and means of one layer.

    load: each expert's share of the choices that got a slot; dropped: the share of first, second,
    ... choices that got none; idle: experts without a token; entropy in nats.
    """
    tokens = max(float(load.tokens), 1.0)
    kept_e, chosen_i = np.asarray(load.kept_e), np.maximum(load.chosen_i, 1)
    return {
        "load": (kept_e / max(float(kept_e.sum()), 1.0)).tolist(),
        "dropped": (1 - load.kept_i / chosen_i).tolist() if load.tokens else [],
        "idle": int((kept_e == 0).sum()),
        "entropy": float(load.entropy) / tokens,
        "aux": float(load.aux) / tokens,
        "z": float(load.z) / tokens,
    }


def scalars(layers: dict[str, Layer]) -> dict[str, float]:
    """Returns the same statistics as scalars, for curves."""
    numbers: dict[str, float] = {}
    for name, layer in layers.items():
        numbers |= {f"{name}/{key}": float(layer[key]) for key in ("idle", "entropy", "aux", "z")}
        numbers[f"{name}/largest_load"] = max(layer["load"])
        numbers |= {f"{name}/dropped_{i}": share for i, share in enumerate(layer["dropped"], 1)}
    return numbers
