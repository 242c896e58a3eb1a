"""Decodes many requests in batches of few shapes, sorted by length."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from data.vocab import EOS
from layouts.layout import Layout
from models.api import Decodable
from models.decoding.generate import DecodeInputs, Search, generate, initial_cache
from trainer.memory import check_cache_memory
from trainer.multihost import fetched

SHORTEST = 16
Ids = Sequence[int] | np.ndarray
trace_cache = jax.jit(initial_cache, static_argnums=(0, 1, 2))


class Request(NamedTuple):
    """Holds what to decode for one line, in tokens."""

    prompt: Ids
    """What the text begins with."""
    max_new_tokens: int
    """The maximum number of new tokens, EOS included."""
    seed: int = 0
    min_new_tokens: int = 1
    """The minimum number of new tokens, EOS included."""
    source: Ids | None = None
    """What is translated, with its end."""


class TokenHypothesis(NamedTuple):
    """Holds the tokens of one decoded text, with its scores."""

    tokens: list[int]
    """New tokens, without the end."""
    score: float
    log_probability: float


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes with a model, its weights and a search."""

    model: Decodable
    params: Any
    mesh: Mesh
    search: Search
    batch_sequences: int

    def decode(
        self, requests: Sequence[Request]
    ) -> Iterator[list[tuple[int, list[TokenHypothesis]]]]:
        """Yields, batch by batch, some of the requests with their hypotheses, the best first.

        What a request gets follows from itself alone, not from its batch.
        """
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, request in enumerate(requests):
            by_shape.setdefault(shape_of(request), []).append(i)
        self._check_memory(requests)
        for shape, same in sorted(by_shape.items(), reverse=True):
            new_tokens = padded(max(requests[i].max_new_tokens for i in same))
            same.sort(key=lambda i: requests[i].max_new_tokens)
            for start in range(0, len(same), self.batch_sequences):
                batch = same[start : start + self.batch_sequences]
                hypotheses = self._decode([requests[i] for i in batch], *shape, new_tokens)
                yield list(zip(batch, hypotheses, strict=True))

    def _check_memory(self, requests: Sequence[Request]) -> None:
        """Raises where the cache of the longest request does not fit."""

        def tokens(request: Request) -> int:
            return sum(shape_of(request)) + padded(request.max_new_tokens)

        longest = max(requests, key=tokens, default=None)
        if longest is not None:
            inputs = abstract_inputs(
                self.model.layout, self.mesh, self.batch_sequences, *shape_of(longest)
            )
            static = (self.model, self.search, padded(longest.max_new_tokens))
            with jax.set_mesh(self.mesh):
                cache = trace_cache.eval_shape(*static, self.params, *inputs)
            check_cache_memory(self.params, cache, self.mesh)

    def _decode(
        self, batch: Sequence[Request], source: int, prompt: int, new_tokens: int
    ) -> Iterator[list[TokenHypothesis]]:
        """Decodes one batch of these lengths; requests for a single token fill it up."""
        filled = [*batch, *[Request([], 1)] * (self.batch_sequences - len(batch))]
        prompts = [request.prompt for request in filled]
        min_new_tokens = max(request.min_new_tokens for request in filled)
        min_new_tokens_B = np.array([request.min_new_tokens for request in filled], np.int32)
        inputs = DecodeInputs(
            prompts_BL=self._put(rows_of(prompts, prompt), "Bl"),
            prompt_lengths_B=self._put(np.array(list(map(len, prompts)), np.int32), "B"),
            seeds_B=self._put(np.array([r.seed for r in filled], np.uint32), "B"),
            max_new_tokens_B=self._put(np.array([r.max_new_tokens for r in filled], np.int32), "B"),
            min_new_tokens_B=self._put(min_new_tokens_B, "B") if min_new_tokens > 1 else None,
        )
        with jax.set_mesh(self.mesh):
            output = generate(
                self.model,
                self.search,
                new_tokens,
                self.params,
                self._sources(filled, source) if source else None,
                inputs,
            )
        arrays = [array[: len(batch)] for array in fetched(output)]
        for texts, scores, log_probabilities in zip(*arrays, strict=True):
            yield [
                TokenHypothesis(until_end(tokens), float(score), float(log_probability))
                for tokens, score, log_probability in zip(
                    texts, scores, log_probabilities, strict=True
                )
                if np.isfinite(score)
            ]

    def _sources(self, batch: Sequence[Request], length: int) -> dict[str, jax.Array]:
        sources = [[EOS] if request.source is None else request.source for request in batch]
        inputs_BM = rows_of(sources, length)
        place_BM = np.tile(np.arange(length, dtype=np.int32), (len(batch), 1))
        inside_BM = place_BM < np.array([len(source) for source in sources])[:, None]
        arrays = {
            "inputs_BM": inputs_BM,
            "segments_BM": inside_BM.astype(np.int32),
            "positions_BM": place_BM,
        }
        return {name: self._put(array, "BM") for name, array in arrays.items()}

    def _put(self, array: np.ndarray, axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, self.model.layout.place(axes)))


def abstract_inputs(
    layout: Layout, mesh: Mesh | AbstractMesh, rows: int, source: int, prompt: int
) -> tuple[dict[str, Any] | None, DecodeInputs]:
    """Returns the shapes of sources, where they have a length, and of what is decoded from them."""

    def array(axes: str, *shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.place(axes)))

    names = ("inputs_BM", "segments_BM", "positions_BM")
    inputs = DecodeInputs(
        prompts_BL=array("Bl", rows, prompt),
        prompt_lengths_B=array("B", rows),
        seeds_B=array("B", rows, dtype=np.uint32),
        max_new_tokens_B=array("B", rows),
    )
    return {name: array("BM", rows, source) for name in names} if source else None, inputs


def padded(length: int) -> int:
    """Returns the length in which rows of so many tokens are decoded: few to compile.

    >>> padded(3), padded(16), padded(17)
    (16, 16, 32)
    """
    return max(SHORTEST, 1 << (length - 1).bit_length())


def shape_of(request: Request) -> tuple[int, int]:
    """Returns the padded lengths of source and prompt; 0 where there is none."""
    source = 0 if request.source is None else padded(len(request.source))
    return source, padded(len(request.prompt)) if len(request.prompt) else 0


def rows_of(lists: Sequence[Ids], length: int) -> np.ndarray:
    """Writes tokens into rows, padded with zeros."""
    rows = np.zeros((len(lists), length), np.int32)
    for row, ids in zip(rows, lists, strict=True):
        row[: len(ids)] = ids
    return rows


def until_end(tokens: np.ndarray) -> list[int]:
    """Returns the tokens before EOS, or before the padding of a text that was cut."""
    kept = [int(token) for token in tokens]
    if EOS in kept:
        return kept[: kept.index(EOS)]
    while kept and kept[-1] == 0:
        kept.pop()
    return kept
