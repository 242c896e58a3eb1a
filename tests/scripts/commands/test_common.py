"""What several commands write."""

import json
import math
from pathlib import Path

from scripts.commands.common import write_json


def test_json_has_null_where_a_number_is_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json(str(file), [{"loss": math.nan, "range": (1.5, math.inf), "name": "a"}])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(file.read_text(), parse_constant=refuse)
    assert read == [{"loss": None, "range": [1.5, None], "name": "a"}]
