"""Decodes many requests in batches of few shapes, sorted by length."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from configs.errors import RunError
from data.vocab import EOS, PAD
from layouts.layout import Layout
from layouts.mesh import batch_shards
from models.api import Decodable
from models.decoding.generate import DecodeInputs, DecodeOutput, Search, generate, initial_cache
from trainer.feed import dispatch_ahead
from trainer.memory import check_cache_memory
from trainer.multihost import fetched

SHORTEST = 16
Ids = Sequence[int] | np.ndarray
trace_cache = jax.jit(initial_cache, static_argnums=(0, 1, 2))


class Request(NamedTuple):
    """Describes what to decode for one line, in tokens."""

    prompt: Ids
    """What the text begins with."""
    max_new_tokens: int
    """The maximum number of new tokens, EOS included."""
    seed: int = 0
    min_new_tokens: int = 1
    """The minimum number of new tokens, EOS included."""
    source: Ids | None = None
    """The text to translate, with its end token."""
    is_answer: bool = False
    """Whether the decoded text leaves out the prompt."""


class TokenHypothesis(NamedTuple):
    """Holds the tokens of one decoded text, with its scores."""

    tokens: list[int]
    """New tokens, without the end."""
    score: float
    log_probability: float


Hypotheses = list[TokenHypothesis]  # of one request, the best first


class BatchShape(NamedTuple):
    """Holds the number of rows of a batch, and the padded lengths of its texts; 0 for no texts."""

    rows: int
    source: int
    prompt: int
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes with a model, its weights and a search."""

    model: Decodable
    params: Any
    """Stored weights or, for faster steps, `prepared` ones."""
    mesh: Mesh
    search: Search
    batch_sequences: int
    begin_id: int = PAD
    """The token that the model reads before a text."""
    stop_ids: tuple[int, ...] = (EOS,)
    """Tokens that end a text; the first is the end token of the training data."""
    reads_begin: bool = True
    """Whether the model also reads `begin_id` before a prompt; if not, it reads only the prompt."""
    banned_ids: tuple[int, ...] = ()
    """Tokens that no text may have."""
    suffix: tuple[int, ...] = ()
    """Ranks samples by the likelihood of these tokens after each; if empty, by the samples' own."""

    def decode(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Hypotheses]]]:
        """Yields batches of request numbers with their hypotheses, the best first.

        A result depends only on its request, not on the batch.  The next batch starts before this
        one is fetched, so no device waits for the slowest one.
        """
        shards = batch_shards(self.model.layout, self.mesh.shape, rows_are_groups=True)
        batches = batches_of(requests, self.batch_sequences, shards)
        self.check_memory([shape for _, shape in batches])
        started = (
            (chosen, self._start([requests[i] for i in chosen], shape)) for chosen, shape in batches
        )
        for chosen, output in dispatch_ahead(started):
            texts = self._finish([requests[i] for i in chosen], output)
            yield list(zip(chosen, texts, strict=True))

    def decode_batch(self, requests: Sequence[Request], shape: BatchShape) -> list[Hypotheses]:
        """Returns the hypotheses of requests that fit in one batch of a given shape."""
        return self._finish(requests, self._start(requests, shape))

    def check_memory(self, shapes: Sequence[BatchShape]) -> None:
        """Raises if the cache of the largest batch does not fit."""
        largest = max(shapes, key=lambda shape: shape.rows * sum(shape[1:]), default=None)
        if largest is not None:
            rows, source, prompt, new_tokens = largest
            shape = (rows, source, prompt, len(self.suffix))
            inputs = abstract_inputs(self.model.layout, self.mesh, *shape)
            arguments = (self.model, self.search, new_tokens, self.params, inputs)
            with jax.set_mesh(self.mesh):
                cache = trace_cache.eval_shape(*arguments)
            check_cache_memory(self.params, cache, self.mesh)

    def _start(self, batch: Sequence[Request], shape: BatchShape) -> DecodeOutput:
        """Starts to decode a batch, padded to its shape with requests for a single token."""
        rows, source, prompt, new_tokens = shape
        filled = [*batch, *[Request([], 1)] * (rows - len(batch))]
        whole = [request.prompt for request in filled]
        begins, prompts = split_begins(whole, self.begin_id, reads_begin=self.reads_begin)

        def vector(values: Iterable[int], dtype: DTypeLike = np.int32) -> jax.Array:
            return self._put(np.array([*values], dtype), "B")

        has_minimum = any(request.min_new_tokens > 1 for request in filled)
        inputs = DecodeInputs(
            prompts_BL=self._put(rows_of(prompts, prompt), "Bl"),
            prompt_lengths_B=vector(map(len, prompts)),
            seeds_B=vector((request.seed for request in filled), np.uint32),
            max_new_tokens_B=vector(request.max_new_tokens for request in filled),
            min_new_tokens_B=vector(r.min_new_tokens for r in filled) if has_minimum else None,
            begins_B=None if self.reads_begin else vector(begins),
            suffix_L=self._put(np.array(self.suffix, np.int32), "l") if self.suffix else None,
            source=self._sources(filled, source) if source else None,
            begin_id=self.begin_id,
            stop_ids=self.stop_ids,
            banned_ids=self.banned_ids,
        )
        with jax.set_mesh(self.mesh):
            return generate(self.model, self.search, new_tokens, self.params, inputs)

    def _finish(self, batch: Sequence[Request], output: DecodeOutput) -> list[Hypotheses]:
        """Returns the hypotheses of each request, once the batch is decoded."""
        arrays = [array[: len(batch)] for array in fetched(output)]
        texts = []
        for request, tokens, scores, log_p in zip(batch, *arrays, strict=True):
            ended = [until_end(row[: request.max_new_tokens], self.stop_ids) for row in tokens]
            every = map(TokenHypothesis, ended, scores.tolist(), log_p.tolist())
            texts.append([one for one in every if math.isfinite(one.score)])
        return texts

    def _sources(self, batch: Sequence[Request], length: int) -> dict[str, jax.Array]:
        sources = [self.stop_ids[:1] if one.source is None else one.source for one in batch]
        inputs_BM = rows_of(sources, length)
        place_BM = np.tile(np.arange(length, dtype=np.int32), (len(batch), 1))
        inside_BM = place_BM < np.array([len(source) for source in sources])[:, None]
        segments_BM = inside_BM.astype(np.int32)
        arrays = {"inputs_BM": inputs_BM, "segments_BM": segments_BM, "positions_BM": place_BM}
        return {name: self._put(array, "Bm") for name, array in arrays.items()}

    def _put(self, array: np.ndarray, axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, self.model.layout.place(axes)))


def with_finite_score(hypotheses: Hypotheses) -> Hypotheses:
    """Returns the hypotheses of a text, all with finite scores; raises if there are none."""
    if not hypotheses:
        raise RunError("A text has no finite log-probability: the model computes NaN or infinity.")
    return hypotheses


def prepared(model: Decodable, params: Any, mesh: Mesh) -> Any:
    """Returns weights prepared for decoding, so batches need not prepare them again."""
    with jax.set_mesh(mesh):
        return jax.jit(model.prepare)(params)


def abstract_inputs(
    layout: Layout, mesh: Mesh | AbstractMesh, rows: int, source: int, prompt: int, suffix: int = 0
) -> DecodeInputs:
    """Returns the shapes of decoding inputs, with sources if `source` is not 0."""

    def array(axes: str, *shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.place(axes)))

    names = ("inputs_BM", "segments_BM", "positions_BM")
    return DecodeInputs(
        prompts_BL=array("Bl", rows, prompt),
        prompt_lengths_B=array("B", rows),
        seeds_B=array("B", rows, dtype=np.uint32),
        max_new_tokens_B=array("B", rows),
        suffix_L=array("l", suffix) if suffix else None,
        source={name: array("Bm", rows, source) for name in names} if source else None,
    )


def batches_of(
    requests: Sequence[Request], batch_size: int, shards: int
) -> list[tuple[list[int], BatchShape]]:
    """Batches requests of similar lengths, the longest first; returns their indices and shapes.

    Every second batch is reversed, so no device always gets the longest texts.
    """
    by_lengths: dict[tuple[int, int], list[int]] = {}
    for i, request in enumerate(requests):
        by_lengths.setdefault(shape_of(request), []).append(i)
    batches = []
    for lengths, same in sorted(by_lengths.items(), reverse=True):
        # The shortest texts are last, in the batch that is padded with empty rows.
        same.sort(key=lambda i: requests[i].max_new_tokens, reverse=True)
        # A single text needs no empty rows: its shape is compiled for it anyway.
        rows = shards if len(same) == 1 else rows_of_batch(len(same), batch_size, shards)
        shape = BatchShape(rows, *lengths, padded(requests[same[0]].max_new_tokens))
        starts = range(0, len(same), rows)
        batches += [(same[start : start + rows], shape) for start in starts]
    for chosen, _ in batches[1::2]:
        chosen.reverse()
    return batches


def rows_of_batch(requests: int, batch_sequences: int, shards: int) -> int:
    """Returns the rows of each batch: an eighth of `batch_sequences` if all requests fit in that.

    There are no sizes in between: compiling them would take longer than decoding empty rows.
    """
    few = -(-batch_sequences // (8 * shards)) * shards
    return few if requests <= few else batch_sequences


def padded(length: int) -> int:
    """Rounds a number of tokens up to one of few lengths, so there are few shapes to compile."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def shape_of(request: Request) -> tuple[int, int]:
    """Returns the padded lengths of source and prompt, 0 if there is none."""
    source = 0 if request.source is None else padded(len(request.source))
    return source, padded(len(request.prompt)) if len(request.prompt) else 0


def split_begins(
    prompts: Sequence[Ids], begin_id: int, *, reads_begin: bool
) -> tuple[list[int], list[Ids]]:
    """Returns the token that the model reads first for each prompt, and the rest of the prompts.

    That is `begin_id`, or the prompt's first token if the model reads no begin token.
    """
    if reads_begin:
        return [begin_id] * len(prompts), [*prompts]
    begins = [int(prompt[0]) if len(prompt) else begin_id for prompt in prompts]
    return begins, [prompt[1:] for prompt in prompts]


def rows_of(lists: Sequence[Ids], length: int) -> np.ndarray:
    """Writes tokens into rows, padded with zeros."""
    rows = np.zeros((len(lists), length), np.int32)
    for row, ids in zip(rows, lists, strict=True):
        row[: len(ids)] = ids
    return rows


def until_end(tokens: np.ndarray, stop_ids: Collection[int]) -> list[int]:
    """Returns the tokens before the first stop token, or all if there is none."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, tokens.tolist()))
