"""The sizes of the programs that slots compile."""

from trainer.serving.slot_engine import next_rows, powers


def test_programs_have_sizes_in_few_steps() -> None:
    assert powers(2, 64, 300) == [64, 128, 256, 300]
    assert powers(2, 64, 20) == [20]
    rows = [next_rows(count, [1, 4, 16]) for count in (1, 2, 3, 8, 9, 17)]
    assert rows == [1, 1, 4, 4, 16, 16]
