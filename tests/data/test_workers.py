"""Jobs in processes: results in order, errors passed on, lost processes noticed."""

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import UserError
from data import workers
from data.storage.files import Unfinished


def start(power: int) -> Callable[[int], tuple[int, int]]:
    if power < 0:
        raise UserError("a power below zero is not legal")

    def compute(number: int) -> tuple[int, int]:
        if number == 90:
            raise UserError("ninety is not legal")
        if number == 91:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 92:  # Ctrl-C in a terminal reaches each of its processes
            os.kill(os.getpid(), signal.SIGINT)
        if number == 93:  # another worker computes 94 at the same time
            for _ in range(600):
                if Path("94").exists():
                    break
                time.sleep(0.1)
            else:
                raise UserError("ninety-four comes too late")
        if number == 94:
            Path("94").touch()
        return number**power, os.getpid()

    return compute


def computed(numbers: list[int], worker_count: int, power: int = 3) -> list[tuple[int, int]]:
    jobs = ((number,) for number in numbers)
    return list(workers.in_order(jobs, functools.partial(start, power), worker_count))


def test_results_come_in_order_and_jobs_are_read_when_there_is_room() -> None:
    read: list[int] = []
    jobs = ((number,) for number in range(20) if read.append(number) is None)
    results = workers.in_order(jobs, functools.partial(start, 3), 2)
    first = next(results)
    assert len(read) <= 6
    both = [first, *results]
    assert [cube for cube, _ in both] == [n**3 for n in range(20)]
    assert os.getpid() not in {process for _, process in both}


def test_workers_compute_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [power for power, _ in computed([93, 94], 2)] == [93**3, 94**3]


@pytest.mark.parametrize(("numbers", "worker_count"), [([], 3), ([5], 3), ([5, 6, 7], 1)])
def test_a_single_job_or_worker_needs_no_process(numbers: list[int], worker_count: int) -> None:
    assert computed(numbers, worker_count) == [(n**3, os.getpid()) for n in numbers]


def test_errors_and_lost_processes_end_the_work() -> None:
    with pytest.raises(UserError, match="ninety is not legal"):
        computed([1, 90, 2, 3, 4, 5], 2)
    with pytest.raises(Unfinished, match=r"a worker died.*fewer --workers"):
        computed([1, 91, 2, 3, 4, 5], 2)
    with pytest.raises(UserError, match="a power below zero"):
        computed([1, 2, 3], 2, power=-1)


def test_workers_leave_an_interrupt_to_the_process_that_they_work_for() -> None:
    assert [power for power, _ in computed([1, 92, 3], 2)] == [1, 92**3, 27]
