"""Numbers as people read them."""

import pytest

from scripts.texts import cell, with_unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.99996, "1 s"), (0.9994, "999 ms"), (0.00099996, "1 ms"), (9.9996e-7, "1 µs")],
)
def test_a_time_that_rounds_up_has_the_next_unit(seconds: float, text: str) -> None:
    assert with_unit(seconds, "s") == text


def test_a_number_of_a_table_that_rounds_up_is_written_whole() -> None:
    assert [cell(9999.4), cell(9999.96), cell(-9999.96)] == ["9,999", "10,000", "-10,000"]
