"""Tests how `meshloom rescore` ranks."""

import json
import math

from scripts.commands.decoding.score import rank
from trainer.decoding.score import Score


def test_a_text_without_a_score_is_last_and_valid_json() -> None:
    """Of a pair that is longer than a row; no order is defined with its score, which is NaN."""
    hypotheses = [{"text": text, "log_probability": -1.0} for text in ("a", "long", "b")]
    scores = iter([Score(-4.0, 1, 1, 1), Score(math.nan, 9, 0, 0), Score(-2.0, 1, 1, 1)])
    ranked = rank(hypotheses, scores, weight=0.5, alpha=0.6)
    assert [(one["text"], one["rescored"]) for one in ranked] == [
        ("b", -2.0), ("a", -3.0), ("long", None),
    ]  # fmt: skip
    json.dumps(ranked, allow_nan=False)
