"""What `meshloom prepare` prints of the pairs of each part."""

import numpy as np
import pytest

from data.packing.rows import Counts, Rows, RowsOfPart
from scripts.commands.training.prepare import print_parts


def test_a_rule_that_drops_no_pair_shows_zero(capsys: pytest.CaptureFixture[str]) -> None:
    none = np.zeros((0, 6), np.uint16)
    train = RowsOfPart(
        "de", range(2), Counts(lines=30, rows=2), {"a repeat": 0, "longer than a row": 10}
    )
    test = RowsOfPart("de", range(3), Counts(lines=9, rows=3), {"longer than a row": 0})
    print_parts({name: Rows(none, none, Counts(), parts=[part])
                 for name, part in (("train", train), ("test", test))})  # fmt: skip
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "not in the rows" and "a repeat" in head
    assert [row.split() for row in rows] == [
        ["train", "de", "30", "2", "0", "10", "25.00%"],
        ["test", "de", "9", "3", "0", "0.00%"],
    ]
    print_parts({"train": Rows(none, none, Counts())})  # of a text, which has no pairs
    assert capsys.readouterr().out == ""
