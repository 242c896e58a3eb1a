"""The sizes of the programs that slots compile."""

from tests.trainer.serving.test_continuous import new_engine
from trainer.serving.slot_engine import next_rows, powers


def test_programs_have_sizes_in_few_steps() -> None:
    assert powers(2, 64, 300) == [64, 128, 256, 300]
    assert powers(2, 64, 20) == [20]
    rows = [next_rows(count, [1, 4, 16]) for count in (1, 2, 3, 8, 9, 17)]
    assert rows == [1, 1, 4, 4, 16, 16]


def test_short_prompts_share_a_pass() -> None:
    engine = new_engine(12, 256)
    rows = {length: engine.joining_rows(length) for length in (16, 32, 64, 128, 256)}
    assert rows == {16: [1, 4, 8, 12], 32: [1, 4, 8, 12], 64: [1, 4, 8], 128: [1], 256: [1]}
