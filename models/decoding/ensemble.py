"""Decodes with an ensemble: several sets of weights of one model."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from models.api import Batch, Cache, Decodable, Params

Members = tuple[Params, ...]


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Decodes with the mean of the members' probabilities.  Its params are a tuple of params."""

    model: Decodable

    @property
    def layout(self) -> Layout:
        return self.model.layout

    def with_layout(self, layout: Layout) -> "Ensemble":
        return Ensemble(self.model.with_layout(layout))

    def prepare(self, params: Members, *, for_one_call: bool = False) -> Members:
        return tuple(self.model.prepare(member, for_one_call=for_one_call) for member in params)

    def init_cache(
        self, prepared: Members, source: Batch | None, batch_sequences: int, cache_length: int
    ) -> Cache:
        sizes = batch_sequences, cache_length
        return {"members": [self.model.init_cache(member, source, *sizes) for member in prepared]}

    def step(self, prepared: Members, cache: Cache, *inputs: Array) -> tuple[Cache, Array]:
        members = zip(prepared, cache["members"], strict=True)
        stepped = [self.model.step(*member, *inputs) for member in members]
        total_BLV = functools.reduce(jnp.add, (jax.nn.softmax(logits) for _, logits in stepped))
        return {"members": [cache for cache, _ in stepped]}, jnp.log(total_BLV / len(stepped))


def as_ensemble(model: Decodable, params: Sequence[Params]) -> tuple[Decodable, Any]:
    """Returns the model with its only weights, or an ensemble with all weights."""
    return (model, params[0]) if len(params) == 1 else (Ensemble(model), tuple(params))
