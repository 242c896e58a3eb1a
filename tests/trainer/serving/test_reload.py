"""Newer checkpoints: one that cannot be read is tried again, but not for ever."""

import contextlib

import pytest

from layouts.mesh import make_mesh
from tests.toys import WHOLE
from tests.trainer.serving.test_service import Failing
from trainer.serving.reload import TRIES, CheckpointWatcher
from trainer.serving.service import ServedWeights


@pytest.mark.parametrize("failures", [1, TRIES])
def test_a_checkpoint_that_cannot_be_read_is_tried_again(failures: int) -> None:
    tried = list[int]()

    def restore(step: int) -> ServedWeights:
        tried.append(step)
        if len(tried) <= failures:
            raise OSError("no route to host")
        return ServedWeights(None, step)

    service = Failing(make_mesh(WHOLE), ServedWeights(None, 1), queue=9)
    watcher = CheckpointWatcher(service, lambda: 2, restore, every_s=0)
    for _ in range(2 * TRIES):
        try:
            watcher.look()
        except OSError:
            assert len(tried) <= failures
    assert tried == [2] * min(failures + 1, TRIES)
    assert (service._next_weights is not None) == (failures < TRIES)


def test_each_checkpoint_has_its_own_tries() -> None:
    steps, tried = iter([2, 2, 3, 3, 3, 3]), list[int]()

    def restore(step: int) -> ServedWeights:
        tried.append(step)
        raise OSError("no route to host")

    service = Failing(make_mesh(WHOLE), ServedWeights(None, 1), queue=9)
    watcher = CheckpointWatcher(service, lambda: next(steps), restore, every_s=0)
    for _ in range(6):
        with contextlib.suppress(OSError):
            watcher.look()
    assert tried == [2, 2, *[3] * TRIES]
