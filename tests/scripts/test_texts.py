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


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"), (0.0000123, "s", "12.3 µs"), (2.25e-10, "s", "0.225 ns"),
        (1.5, "s", "1.5 s"), (0.9996, "s", "0.9996 s"), (None, "s", "unknown"),
        (0.5, "share", "50.0 %"), (1234.5, "hours", "1,234 hours"), (0.01, "hours", "36 s"),
        (3.2e15, "FLOPs", "3.2 PFLOPs"), (True, "", "yes"),
    ],
)  # fmt: skip
def test_figures_have_units(value: object, unit: str, text: str) -> None:
    assert with_unit(value, unit) == text


def test_cells_are_short() -> None:
    values = (0.123456, 1234567, "decoder 1", None)
    assert [cell(value) for value in values] == ["0.1235", "1,234,567", "decoder 1", ""]
