"""A service: what its jobs hear when it fails."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from layouts.mesh import make_mesh
from tests.toys import WHOLE
from trainer.decoding.decoder import Request
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
