"""The benchmark of decoding runs, and counts what a token reads."""

import pytest

from scripts.benchmarks import generate
from scripts.benchmarks.generate import Flags, measure
from scripts.benchmarks.language_model import SHAPES


def test_each_token_reads_the_weights_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "BYTES", 1 << 20)
    shape, prompt, new_tokens, rows = SHAPES["toy"], 4, 3, 2
    flags = Flags(shape="toy", batch_sizes=(rows,), prompt=prompt, new_tokens=new_tokens)
    result = measure(flags)
    measured = result["batch_sizes"][str(rows)]
    layer = 4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff + 2 * shape.d_model
    weights = shape.layers * layer + (shape.vocab + shape.length + 1) * shape.d_model
    assert result["weight_bytes"] == 4 * weights
    keys_and_values = 2 * shape.layers * rows * (prompt + new_tokens) * shape.d_model
    assert 4 * (weights + keys_and_values) <= measured["bytes_a_token"]
    assert measured["bytes_a_token"] <= 1.1 * 4 * (weights + keys_and_values)
