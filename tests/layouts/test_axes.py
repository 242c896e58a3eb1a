"""Every letter and every name means one axis, also with those that a part declares."""

import pytest

from configs.errors import UserError
from layouts.axes import ABSENT, AXES, SYNONYMS, Axis, alphabet, axes_of_path, letters_of

BY_LETTER, BY_NAME = alphabet()


def test_each_letter_and_each_name_means_one_axis() -> None:
    assert len(BY_LETTER) == len(BY_NAME) == len(AXES)
    assert all(axis.letter.isupper() and len(axis.letter) == 1 for axis in AXES)
    assert all(name.islower() for name in BY_NAME)


def test_axes_meet_in_pairs() -> None:
    meetings = {(axis.letter, other) for axis in AXES for other in axis.meets}
    assert meetings == {("L", "M"), ("M", "L"), ("E", "G"), ("G", "E")}


def test_mesh_tensorflow_names_hide_no_axis_of_ours() -> None:
    assert not {*SYNONYMS, *ABSENT} & set(BY_NAME)
    assert set(SYNONYMS.values()) <= set(BY_NAME)


@pytest.mark.parametrize(
    ("name", "letters"),
    [("wi_DF", "DF"), ("layers_N", "N"), ("attention", ""), ("mlp_norm", ""), ("x_BLd", "")],
)
def test_only_a_suffix_of_capitals_counts(name: str, letters: str) -> None:
    assert letters_of(name) == letters


def test_a_path_joins_the_suffixes_of_its_parts() -> None:
    assert axes_of_path("decoder/layers_N/attention/wo_JQKD") == "NJQKD"
    assert axes_of_path("decoder/norm/scale_D") == "D"


def test_a_declared_letter_means_its_axis_inside_the_part_alone() -> None:
    latent = Axis("C", "latent", pads=True)
    inside = alphabet((latent,))
    assert inside.by_letter["C"] == latent and BY_LETTER["C"].name == "capacity"
    assert inside.by_letter["B"] == BY_LETTER["B"]


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        ([Axis("r", "latent")], "Legal: one capital letter"),
        ([Axis("RS", "latent")], "Legal: one capital letter"),
        ([Axis("R", "two words")], "without spaces"),
        ([Axis("R", "memory_length")], "another name"),
        ([Axis("R", "batch")], "batch has the letter B"),
        ([Axis("R", "latent"), Axis("R", "other")], "two axes have one letter"),
        ([Axis("R", "latent"), Axis("S", "latent")], "two axes have one name"),
    ],
)
def test_an_axis_that_cannot_be_told_from_another_is_an_error(
    axes: list[Axis], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        alphabet(tuple(axes))


def test_an_axis_may_be_declared_as_it_is_everywhere() -> None:
    assert alphabet((Axis("B", "batch", pads=True),)).by_letter["B"].name == "batch"
