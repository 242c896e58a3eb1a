"""Real training steps on the devices at hand, with random tokens, to be timed."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from layouts.layout import Layout
from layouts.mesh import make_mesh
from trainer.feed import place, placement
from trainer.run import Run, program_of
from trainer.step import init_state, train_step

TURN_S = 0.5  # far longer than another process gets a core for
Turn = dict[str, float]  # seconds of each in one round
FIRST_TOKEN = 2  # smaller ids have a meaning


class Trial:
    """A run's step under one layout, compiled."""

    def __init__(
        self, run: Run, layout: Layout, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._mesh, self._program = make_mesh(layout), program_of(run, layout)
        where = placement(layout, self._mesh, run.microbatches)
        self._batch = place(where, random_batch(run), run.batch_sequences, run.microbatches)
        self._state = init_state(self._program, self._mesh)
        self.seconds(1)
        self._steps = math.ceil(TURN_S / self.seconds(1))

    def turn(self) -> float:
        """Seconds of a step, from as many as fill a turn."""
        return self.seconds(self._steps) / self._steps

    def seconds(self, steps: int) -> float:
        """Takes so many steps."""
        start = self._clock()
        with jax.set_mesh(self._mesh):
            for _ in range(steps):
                self._state, metrics = train_step(self._program, self._state, self._batch)
                jax.block_until_ready((self._state, metrics))
        return self._clock() - start


def random_batch(run: Run) -> dict[str, np.ndarray]:
    """Rows of one full segment each."""
    rng, rows = np.random.default_rng(0), run.batch_sequences
    vocab = min(run.model.vocab, run.model.source_rows or run.model.vocab)

    def array(name: str, length: int) -> np.ndarray:
        if name.startswith("segments"):
            return np.ones((rows, length), np.int32)
        if name.startswith("positions"):
            return np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        return rng.integers(FIRST_TOKEN, vocab, (rows, length)).astype(np.int32)

    return {name: array(name, length) for name, length in run.task.array_lengths.items()}


def take_turns(
    trials: Mapping[str, Trial], rounds: int, report: Callable[[str], None] = lambda text: None
) -> list[Turn]:
    """Seconds of a step of each, so many rounds; every other round goes backwards."""
    turns = []
    for number in range(rounds):
        order = list(trials)[:: 1 if number % 2 == 0 else -1]
        turns.append({name: trials[name].turn() for name in order})
        report(f"round {number + 1} of {rounds}: {sum(turns[-1].values()):.1f} s")
    return turns


def median_s(turns: Sequence[Turn], name: str) -> float:
    return statistics.median(turn[name] for turn in turns)


def slowness(turns: Sequence[Turn], name: str) -> float:
    """How many times as long as the fastest of the same round one takes: the median of rounds."""
    return statistics.median(turn[name] / min(turn.values()) for turn in turns)
