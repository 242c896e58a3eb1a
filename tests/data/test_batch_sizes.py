"""Sizes of batches that change at steps."""

from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_sizes import BatchSizes

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
