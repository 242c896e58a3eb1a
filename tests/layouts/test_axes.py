"""Letters are read off names alike everywhere, and the table has no double meaning."""

import pytest

from layouts.axes import ABSENT, AXES, BY_LETTER, BY_NAME, SYNONYMS, axes_of_path, letters_of


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
def test_only_a_suffix_of_capitals_in_the_table_counts(name: str, letters: str) -> None:
    assert letters_of(name) == letters


def test_a_path_joins_the_suffixes_of_its_parts() -> None:
    assert axes_of_path("decoder/layers_N/attention/wo_JQKD") == "NJQKD"
    assert axes_of_path("decoder/norm/scale_D") == "D"
