"""Which checkpoints a command reads."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from configs.errors import UserError
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import chosen_steps


def saved(folder: Path, metrics: dict[int, float | None]) -> Checkpoints:
    with Checkpoints(folder, keep_last=9, higher_is_better=True) as checkpoints:
        for step, metric in metrics.items():
            checkpoints.save(step, {"step": jnp.asarray(step)}, metric)
    return Checkpoints(folder)


def test_checkpoints_are_chosen_by_name_or_step(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {2: 0.5, 5: 9.0, 7: None})
    assert chosen_steps(checkpoints, "latest") == [None]
    assert chosen_steps(checkpoints, "best") == [5]
    assert chosen_steps(checkpoints, "all") == [2, 5, 7]
    assert chosen_steps(checkpoints, "7,2") == [7, 2]
    with pytest.raises(UserError, match=r"--checkpoint=3: no such checkpoint.*2, 5, 7"):
        chosen_steps(checkpoints, "3")


def test_without_a_metric_no_checkpoint_is_the_best(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {2: None, 5: None})
    with pytest.raises(UserError, match=r"no checkpoint in .* has a metric.*Legal: latest.*2, 5"):
        chosen_steps(checkpoints, "best")
