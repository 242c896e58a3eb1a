"""A profile of some steps: written with the model's names, and only of steps that come."""

import gzip
from pathlib import Path

import pytest

from configs.errors import UserError
from tests.trainer.test_loop import RUN, job
from trainer.loop import train
from trainer.metrics.writers import PROFILE_FOLDER, Profile, parse_profile_steps


def test_a_profile_names_the_steps_and_the_parts_of_the_model(tmp_path: Path) -> None:
    train(job(tmp_path), [Profile(tmp_path, range(2, 4))])
    (xplane,) = (tmp_path / PROFILE_FOLDER).rglob("*.xplane.pb")
    names = xplane.read_bytes()
    for name in (b"attention", b"mlp", b"softmax_loss", b"optimizer", b"norm"):
        assert name in names, name
    (events,) = (tmp_path / PROFILE_FOLDER).rglob("*.trace.json.gz")
    timeline = gzip.decompress(events.read_bytes()).decode()
    assert [step for step in range(1, 6) if f'"step_num":"{step}"' in timeline] == [2, 3, 4]
    assert '"data"' in timeline and '"device"' in timeline and '"checkpoints"' in timeline


def test_a_profile_ends_with_a_run_that_fails(tmp_path: Path) -> None:
    for _ in range(2):  # a second profile cannot start while one runs
        profile = Profile(tmp_path, range(1, 5))
        profile.before_step(1)
        profile.close()


@pytest.mark.parametrize("text", ["", "3", "3:", "a:b", "0:2", "4:3", "3:6", "-1:2", "1:2:3"])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--profile_steps=.* from 1 to 5 "):
        parse_profile_steps(text, RUN.steps)
