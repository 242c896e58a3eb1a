"""Decodes with several sets of weights of one model together."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from layouts.layout import Layout
from models.api import Batch, Cache, Decodable, Params, Step

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Decodes with the mean of the members' probabilities.  Its params are a tuple of theirs."""

    model: Decodable

    @property
    def layout(self) -> Layout:
        return self.model.layout

    def with_layout(self, layout: Layout) -> "Ensemble":
        return Ensemble(self.model.with_layout(layout))

    def prepare(self, params: tuple[Params, ...]) -> tuple[Params, ...]:
        return tuple(map(self.model.prepare, params))

    def start(
        self,
        params: tuple[Params, ...],
        source: Batch | None,
        batch_sequences: int,
        cache_length: int,
    ) -> tuple[Step, Cache]:
        started = [
            self.model.start(member, source, batch_sequences, cache_length) for member in params
        ]

        def step(
            cache: Cache, tokens_BL: Array, positions_BL: Array, mask_BLM: Array, cache_index: Array
        ) -> tuple[Cache, Array]:
            fed = [
                feed(member, tokens_BL, positions_BL, mask_BLM, cache_index)
                for (feed, _), member in zip(started, cache["members"], strict=True)
            ]
            total_BLV = functools.reduce(jnp.add, (jax.nn.softmax(logits) for _, logits in fed))
            return {"members": [member for member, _ in fed]}, jnp.log(total_BLV / len(fed))

        return step, {"members": [cache for _, cache in started]}


def as_ensemble(model: Decodable, params: Sequence[Params]) -> tuple[Decodable, Any]:
    """Returns the model with its weights, or several weights of it as an ensemble."""
    return (model, params[0]) if len(params) == 1 else (Ensemble(model), tuple(params))
