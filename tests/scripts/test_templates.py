"""What templates do with values."""

from scripts.templates import columns


def test_a_table_has_the_columns_of_all_its_rows() -> None:
    assert columns([{"step": 1}, {"step": 2, "loss": 3.5}]) == ["step", "loss"]
