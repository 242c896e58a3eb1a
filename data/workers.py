"""Computes jobs in processes on this machine, and returns their results in order."""

import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from data import vocab
from data.storage.files import Unfinished

Job = tuple[Any, ...]
Compute = Callable[..., Any]

_start: Callable[[], Compute]  # of a worker


def in_order(jobs: Iterator[Job], start: Callable[[], Compute], workers: int) -> Iterator[Any]:
    """Yields the results of jobs in order; each worker calls `start` once, then computes.

    A single job, or a single worker, runs in this process.
    """
    first = [*itertools.islice(jobs, 2)]
    jobs = itertools.chain(first, jobs)
    if len(first) < 2 or workers == 1:
        if first:
            compute = start()
            yield from (compute(*job) for job in jobs)
        return
    earlier = {*multiprocessing.active_children()}
    # A forked process would inherit the locks of this one's threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (start,))
    pending: deque[Future[Any]] = deque()
    try:
        for job in jobs:
            if len(pending) == 2 * workers:
                yield pending.popleft().result()
            # Shields the processes that start here from Ctrl-C: this process ends them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                pending.append(pool.submit(compute_job, *job))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from (future.result() for future in pending)
    except BrokenProcessPool as error:
        raise Unfinished(
            "a worker died, perhaps for lack of memory.  Run the command again with fewer "
            "--workers; it resumes where it stopped."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in {*multiprocessing.active_children()} - earlier:
            process.kill()


def start_worker(start: Callable[[], Compute]) -> None:
    """Prepares a worker process, which ends when its parent does."""
    global _start
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; one handles it
    threading.Thread(target=end_with_parent, daemon=True).start()
    vocab.limit_threads(1)
    _start = functools.cache(start)  # the first job calls it, and passes on its errors


def end_with_parent() -> None:
    """Ends this process when its parent is gone, however the parent ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def compute_job(*job: Any) -> Any:
    """Computes a job in a worker."""
    return _start()(*job)
