"""Sizes of batches that change at steps."""

from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_sizes import BatchSizes, value_at

STAGES = st.dictionaries(st.integers(1, 40), st.integers(1, 9), max_size=4)


@given(st.integers(1, 9), STAGES)
@settings(max_examples=20, deadline=None)
def test_each_place_belongs_to_one_step(rows: int, stages: dict[int, int]) -> None:
    sizes = BatchSizes(rows, tuple(sorted(stages.items())))
    expected, size = list[int](), rows
    for step in range(45):
        size = stages.get(step, size)
        assert (sizes.at(step), sizes.before(step)) == (size, len(expected))
        expected += [step] * size
    assert [sizes.step_of(place) for place in range(len(expected))] == expected
    assert sizes.step_of(10**15) > 10**13


def test_a_stage_begins_after_its_number_of_steps() -> None:
    values = [value_at(step, 32, [(3, 64), (5, 128)]) for step in range(7)]
    assert values == [32, 32, 32, 64, 64, 128, 128]
