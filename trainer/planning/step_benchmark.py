"""Times real training steps on the devices at hand, with random tokens."""

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from layouts.hlo.compilation import compile_program
from layouts.layout import Layout
from layouts.mesh import make_mesh
from trainer.feed import BatchSharding
from trainer.run import Run
from trainer.step import init_state, train_step, train_step_spec

logger = logging.getLogger(__name__)
BURST_S = 0.5  # far longer than another process gets a core for
FIRST_TOKEN = 2  # smaller ids have a meaning
RoundTimes = dict[str, float]  # seconds of a step of each benchmark in one round


class StepBenchmark:
    """Compiles a run's step under one layout and times it."""

    def __init__(self, run: Run, layout: Layout) -> None:
        self._mesh, step_spec = make_mesh(layout), train_step_spec(run, layout)
        sharding = BatchSharding(layout, self._mesh, run.batch_sequences, run.microbatches)
        self._batch = sharding.to_global_arrays(random_batch(run))
        self._state = init_state(step_spec, self._mesh)
        with jax.set_mesh(self._mesh):
            traced = train_step.trace(step_spec, self._state, self._batch)
            self._step = compile_program(traced, self._mesh, run.compiler_options)
        self.run_steps(1)
        self._steps = math.ceil(BURST_S / self.run_steps(1))

    def time_step(self) -> float:
        """Returns the seconds of a step: the mean of a burst that takes `BURST_S`."""
        return self.run_steps(self._steps) / self._steps

    def run_steps(self, steps: int) -> float:
        """Runs steps and returns their total seconds."""
        start = time.perf_counter()
        with jax.set_mesh(self._mesh):
            for _ in range(steps):
                self._state, metrics = self._step(self._state, self._batch)
                jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start


def random_batch(run: Run) -> dict[str, np.ndarray]:
    """Makes rows of one full segment each."""
    rng, rows = np.random.default_rng(0), run.batch_sequences
    vocab = min(run.model.vocab_rows, run.model.source_vocab_size or run.model.vocab_rows)

    def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.startswith("segments"):
            return np.ones((rows, *shape), np.int32)
        if name.startswith("positions"):
            return np.tile(np.arange(*shape, dtype=np.int32), (rows, 1))
        return rng.integers(FIRST_TOKEN, vocab, (rows, *shape)).astype(np.int32)

    return {name: array(name, shape) for name, shape in run.task.array_shapes.items()}


def time_rounds(benchmarks: Mapping[str, StepBenchmark], count: int) -> list[RoundTimes]:
    """Times a step of each benchmark in every round; every other round goes backwards."""
    rounds = []
    for number in range(count):
        order = list(benchmarks)[:: 1 if number % 2 == 0 else -1]
        rounds.append({name: benchmarks[name].time_step() for name in order})
        logger.info("round %d of %d: %.1f s", number + 1, count, sum(rounds[-1].values()))
    return rounds


def median_s(rounds: Sequence[RoundTimes], name: str) -> float:
    return statistics.median(times[name] for times in rounds)


def slowdown(rounds: Sequence[RoundTimes], name: str) -> float:
    """Returns the median over rounds of a step's time over that of the fastest in its round."""
    return statistics.median(times[name] / min(times.values()) for times in rounds)
