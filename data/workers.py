"""Computes jobs in processes of this machine, and returns their results in order."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from data import vocab
from data.storage.errors import Unfinished

Job = tuple[Any, ...]
Compute = Callable[..., Any]


def in_order(jobs: Iterator[Job], start: Callable[[], Compute], workers: int) -> Iterator[Any]:
    """Yields the results of jobs in their order; each worker calls `start` once, then computes.

    A single job, or a single worker, needs no other process.
    """
    first, second = next(jobs, None), next(jobs, None) if workers > 1 else None
    if first is None:
        return
    if second is None:
        compute = start()
        yield compute(*first)
        yield from (compute(*job) for job in jobs)
        return
    with _Workers(start, workers) as processes:
        yield from processes.compute(_chained(first, second, jobs))


def _chained(first: Job, second: Job, rest: Iterator[Job]) -> Iterator[Job]:
    yield first
    yield second
    yield from rest


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keeps Ctrl-C from processes that start here: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Workers:
    """Holds processes of which each has one job at a time; they end when this one does."""

    def __init__(self, start: Callable[[], Compute], limit: int):
        self._start, self._limit = start, limit
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}
        self._jobs: dict[Connection, int] = {}  # the number of the job that a worker has

    def compute(self, jobs: Iterator[Job]) -> Iterator[Any]:
        results: dict[int, Any] = {}
        due = 0
        for number, job in enumerate(jobs):
            # Results that wait for an earlier one take memory, too.
            while (idle := self._idle()) is None or number >= due + 2 * self._limit:
                results |= self._received()
                while due in results:
                    yield results.pop(due)
                    due += 1
            self._jobs[idle] = number
            self._send(idle, job)
        while self._jobs or results:
            while due in results:
                yield results.pop(due)
                due += 1
            if self._jobs:
                results |= self._received()

    def _idle(self) -> Connection | None:
        """Returns a worker without a job, a new one if need be; None where all have one."""
        for connection in self._processes:
            if connection not in self._jobs:
                return connection
        if len(self._processes) == self._limit:
            return None
        # A forked process would inherit the locks of this one's threads.
        context = multiprocessing.get_context("spawn")
        connection, child_end = context.Pipe()
        process = context.Process(target=_work, args=(child_end, self._start), daemon=True)
        with _without_interrupts():
            process.start()
        child_end.close()
        self._processes[connection] = process
        return connection

    def _send(self, connection: Connection, job: Job) -> None:
        try:
            connection.send(job)
        except OSError:
            self._raise_lost(connection)

    def _received(self) -> dict[int, Any]:
        """Waits for results, and returns them by the numbers of their jobs."""
        results = {}
        for connection in wait(list(self._jobs)):
            assert isinstance(connection, Connection)
            try:
                result = connection.recv()
            except (EOFError, OSError):
                self._raise_lost(connection)
            if isinstance(result, Exception):
                raise result
            results[self._jobs.pop(connection)] = result
        return results

    def _raise_lost(self, connection: Connection) -> None:
        process = self._processes[connection]
        process.join()
        raise Unfinished(
            f"a worker ended by itself (exit code {process.exitcode}), perhaps for lack of memory."
            "  Run the command again, with fewer --workers: it goes on where it was."
        )

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for connection, process in self._processes.items():
            process.join()
            connection.close()


def _work(connection: Connection, start: Callable[[], Compute]) -> None:
    """Computes jobs until the other end is closed, as it is by the end of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; one handles it
    vocab.limit_threads(1)
    compute: Compute | None = None
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            compute = compute or start()
            result = compute(*job)
        except Exception as error:
            result = error
        try:
            connection.send(result)
        except OSError:
            return
