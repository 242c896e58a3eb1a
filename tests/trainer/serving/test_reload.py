"""Newer checkpoints: one that cannot be read is tried again, but not for ever."""

import contextlib
from typing import Any

import jax.numpy as jnp
import pytest

from configs.errors import UserError
from layouts.mesh import make_mesh
from tests.toys import WHOLE
from tests.trainer.serving.test_service import Failing
from trainer.checkpoints.restore import TrainedModel
from trainer.serving.reload import TRIES, CheckpointWatcher, check_finite


def trained(params: Any, step: int = 2) -> TrainedModel:
    missing: Any = None
    return TrainedModel(missing, params, missing, missing, make_mesh(WHOLE), step)


@pytest.mark.parametrize("failures", [1, TRIES])
def test_a_checkpoint_that_cannot_be_read_is_tried_again(failures: int) -> None:
    tried = list[int]()

    def restore(step: int) -> TrainedModel:
        tried.append(step)
        if len(tried) <= failures:
            raise OSError("no route to host")
        return trained(None, step)

    service = Failing(make_mesh(WHOLE), 1, queue=9, slots=1)
    watcher = CheckpointWatcher(service, lambda: 2, lambda step: 0, restore, every_s=0)
    for _ in range(2 * TRIES):
        try:
            watcher.look()
        except OSError:
            assert len(tried) <= failures
    assert tried == [2] * min(failures + 1, TRIES)
    assert (service._next_weights is not None) == (failures < TRIES)


def test_each_checkpoint_has_its_own_tries() -> None:
    steps, tried = iter([2, 2, 3, 3, 3, 3]), list[int]()

    def restore(step: int) -> TrainedModel:
        tried.append(step)
        raise OSError("no route to host")

    service = Failing(make_mesh(WHOLE), 1, queue=9, slots=1)
    watcher = CheckpointWatcher(service, lambda: next(steps), lambda step: 0, restore, every_s=0)
    for _ in range(6):
        with contextlib.suppress(OSError):
            watcher.look()
    assert tried == [2, 2, *[3] * TRIES]


def test_a_checkpoint_that_is_copied_slowly_is_served_when_it_is_whole() -> None:
    copied, whole = [0], 9

    def restore(step: int) -> TrainedModel:
        tried.append(copied[0])
        if copied[0] < whole:
            raise ValueError("a file is missing")
        return trained(None, step)

    tried = list[int]()
    service = Failing(make_mesh(WHOLE), 1, queue=9, slots=1)
    watcher = CheckpointWatcher(service, lambda: 2, lambda step: copied[0], restore, every_s=0)
    for copied[0] in [*range(whole), *[whole] * 3]:
        with contextlib.suppress(ValueError):
            watcher.look()
    assert tried == [0, whole]  # at first, then not while its files change
    assert service._next_weights is not None


def test_weights_that_are_not_finite_are_refused() -> None:
    fine = {"mlp": {"wi_DF": jnp.ones((1, 2)), "wo_FD": jnp.zeros((2, 1))}}
    bad = {"mlp": {**fine["mlp"], "wi_DF": jnp.array([[1, jnp.nan]])}}

    check_finite(trained(fine))
    with pytest.raises(UserError, match="checkpoint 2: NaN or infinity in mlp/wi_DF"):
        check_finite(trained(bad))
