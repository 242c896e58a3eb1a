"""A service: which jobs begin together, and what they hear when it fails."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from layouts.mesh import make_mesh
from tests.toys import WHOLE
from trainer.decoding.decoder import Request
from trainer.serving import service as service_module
from trainer.serving.service import Job, Service, Stopped


class Failing(Service):
    """Takes one job at a time, forgets it, and fails at the third."""

    taken = 0

    def warm_up(self) -> None:
        pass

    def running(self) -> Collection[Job]:
        return []

    def next_jobs(self) -> list[Job]:
        return [self._waiting.popleft()] if self._waiting else []

    def advance(self, jobs: Sequence[Job]) -> None:
        self.taken += 1
        if self.taken == 3:
            raise RuntimeError("out of memory")

    def set_weights(self, params: Any) -> None:
        raise AssertionError


def test_every_job_without_an_answer_hears_of_a_failure() -> None:
    service = Failing(make_mesh(WHOLE), 0, queue=9, slots=1)
    heard = list[Job]()
    service.notify = heard.extend
    jobs = [Job(Request([4], 9)) for _ in range(5)]
    jobs[1].is_cancelled = True
    service.start()
    service.submit(jobs)
    service.stop()
    assert {job for job in jobs if isinstance(job.failure, RuntimeError)} == {*heard}
    assert {*heard} == {*jobs} - {jobs[1]}
    with pytest.raises(Stopped):
        service.submit([Job(Request([4], 9))])


class Recording(Failing):
    """Begins all waiting jobs, and records how many."""

    began: tuple[int, ...] = ()

    def next_jobs(self) -> list[Job]:
        jobs = [*self._waiting]
        self._waiting.clear()
        return jobs

    def advance(self, jobs: Sequence[Job]) -> None:
        self.began = (*self.began, len(jobs))


def test_jobs_that_come_one_after_another_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Recording(make_mesh(WHOLE), 0, queue=9, slots=3)
    service.start()
    monkeypatch.setattr(service_module, "TOGETHER_S", 60)
    start_s = time.monotonic()
    for _ in range(service.slots):  # no more fit, so the last one waits for no other
        service.submit([Job(Request([4], 9))])
        time.sleep(0.05)
    while not service.began and time.monotonic() - start_s < 30:
        time.sleep(0.01)
    assert service.began == (3,)
    monkeypatch.setattr(service_module, "TOGETHER_S", 0.3)
    service.slots = service.queue_limit = 99
    for _ in range(20):  # each one that comes later does not prolong the wait
        service.submit([Job(Request([4], 9))])
        time.sleep(0.05)
    assert len(service.began) > 1
    service.stop()
    assert sum(service.began) == 23
