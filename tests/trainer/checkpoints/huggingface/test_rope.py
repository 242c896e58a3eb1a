"""Rotary positions: where the files of Hugging Face's versions have them."""

from typing import Any

import pytest

from models.positions.rotary import DynamicScaling, LinearScaling, Rotary
from tests.toys import TOY
from trainer.checkpoints.huggingface import rope
from trainer.checkpoints.huggingface.families import DEFAULTS

PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"type": "linear", "factor": 2.0}


def given(**settings: Any) -> dict[str, Any]:
    return {**DEFAULTS, "max_position_embeddings": 32, **settings}


@pytest.mark.parametrize(
    "settings",
    [
        given(rope_theta=500.0, rope_scaling=LINEAR),
        given(rope_parameters={**LINEAR, "rope_theta": 500.0}),
        given(rope_parameters=PLAIN, rope_scaling=LINEAR),  # as people extend a context
        given(rope_parameters=PLAIN, rope_scaling={**LINEAR, "rope_theta": 500.0}),
    ],
)
def test_both_places_are_read(settings: dict[str, Any]) -> None:
    assert not [*rope.problems(settings)]
    assert rope.parameters(settings)["rope_theta"] == 500.0
    assert rope.rotary_of(settings) == Rotary(theta=500.0, scaling=LinearScaling(factor=2))


def test_the_first_name_of_longrope_is_read() -> None:
    scaling = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "attention_factor": 1.5}
    old, new = (
        given(rope_scaling={"type": name, **scaling}, original_max_position_embeddings=8)
        for name in ("su", "longrope")
    )
    assert not [*rope.problems(old)] and rope.rotary_of(old) == rope.rotary_of(new)
    assert rope.rotary_of(old).max_length(TOY) == 8


def test_a_dynamic_scaling_has_the_length_of_the_model() -> None:
    """Another one in the file has no effect in transformers."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    settings = given(rope_theta=500.0, rope_scaling=scaling)
    assert not [*rope.problems(settings)]
    rotary = rope.rotary_of(settings)
    assert rotary == Rotary(theta=500.0, scaling=DynamicScaling(factor=2, original_length=32))
    assert rotary.max_length(TOY) == 32
    written = rope.settings_of(rotary)
    assert written == {"rope_theta": 500.0, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}


def test_places_that_contradict_each_other_are_refused() -> None:
    scaling = {**LINEAR, "rope_theta": 600.0}
    [problem] = rope.problems(given(rope_parameters=PLAIN, rope_scaling=scaling))
    assert problem.startswith("rope_theta = 500.0 in rope_parameters, 600.0 in rope_scaling")
    yarn = {"rope_type": "yarn", "factor": 2.0}
    [problem] = rope.problems(given(rope_parameters=yarn, rope_scaling=LINEAR))
    assert problem.startswith("rope_type = 'yarn' in rope_parameters, 'linear' in rope_scaling")


def test_whole_numbers_of_a_file_are_integers() -> None:
    assert [rope.as_field(value) for value in (8.0, 0.5, [1, 2.5])] == [8, 0.5, (1, 2.5)]
    assert isinstance(rope.as_field(8.0), int) and rope.as_field(True) is True
