"""Answers beam search requests in batches of few fixed shapes.

The hypotheses of a beam search stop and move together, so a batch runs as a unit.  When it ends,
the next batch takes jobs that are waiting.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from layouts.mesh import batch_shards
from trainer.decoding.decoder import BatchShape, Decoder, Request, padded, prepared, rows_of_batch
from trainer.decoding.requests import DecodeOptions
from trainer.serving.service import Job, NoFiniteScore, Service
from trainer.serving.slot_engine import powers


class BatchService(Service):
    """Decodes waiting jobs of the same shape together, in order, up to a full batch."""

    def __init__(self, decoder: Decoder, step: int, queue: int, *, shapes: Sequence[BatchShape]):
        super().__init__(decoder.mesh, step, queue, decoder.batch_sequences)
        self.decoder, self.shapes = decoder, shapes
        layout, sizes = decoder.model.layout, decoder.mesh.shape
        self.shards = batch_shards(layout, sizes, rows_are_groups=True)
        self._running: list[Job] = []

    def warm_up(self) -> None:
        rows = self.decoder.batch_sequences
        shapes = {self.with_rows(shape, count) for shape in self.shapes for count in (1, rows)}
        self.decoder.check_memory([*shapes])
        for shape in sorted(shapes):
            self.decoder.decode_batch([], shape)

    def with_rows(self, shape: BatchShape, jobs: int) -> BatchShape:
        """Returns a shape with the rows of a batch for this number of jobs."""
        rows = rows_of_batch(jobs, self.decoder.batch_sequences, self.shards)
        return shape._replace(rows=rows)

    def shape_of(self, request: Request) -> BatchShape:
        """Returns the shortest shape that holds a request."""
        assert request.source is not None
        source, new = len(request.source), request.max_new_tokens
        return next(n for n in self.shapes if source <= n.source and new <= n.new_tokens)

    def running(self) -> Collection[Job]:
        return self._running

    def next_jobs(self) -> list[Job]:
        """Takes the first waiting job, and later ones that fit in its batch."""
        if not self._waiting:
            return []
        shape = self.shape_of(self._waiting[0].request)
        fitting = [job for job in self._waiting if self.shape_of(job.request) == shape]
        jobs = fitting[: self.decoder.batch_sequences]
        for job in jobs:
            self._waiting.remove(job)
        return jobs

    def set_weights(self, params: Any) -> None:
        params = prepared(self.decoder.model, params, self.mesh)
        self.decoder = dataclasses.replace(self.decoder, params=params)

    def advance(self, jobs: Sequence[Job]) -> None:
        self._running = list(jobs)
        requests = [job.request for job in jobs]
        shape = self.with_rows(self.shape_of(requests[0]), len(requests))
        answers = self.decoder.decode_batch(requests, shape)
        self.counts.steps += 1
        self._running = []
        for job, hypotheses in zip(jobs, answers, strict=True):
            if not hypotheses:
                job.failure = NoFiniteScore()
                continue
            best = len(hypotheses[0].tokens)
            self.counts.new_tokens += best
            job.hypotheses = hypotheses
            job.finish = "length" if best == job.request.max_new_tokens else "stop"
        self.notify([*jobs])


def batch_shapes(
    rows: int, longest: int, prefix: int, options: DecodeOptions, room: int
) -> list[BatchShape]:
    """Returns the shapes of full batches for sources of at most `longest` tokens.

    A translation has at most `length_factor` tokens per source token plus `length_extra`, or
    `max_tokens` if that is more; always at most `room`.
    """
    factor, extra, least = options.length_factor, options.length_extra, options.max_tokens or 0
    sources = powers(2, padded(1), padded(longest))
    news = [min(max(int(source * factor) + extra, least), room) for source in sources]
    prompt = padded(prefix) if prefix else 0
    return [BatchShape(rows, n, prompt, padded(new)) for n, new in zip(sources, news, strict=True)]
