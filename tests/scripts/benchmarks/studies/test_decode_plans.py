"""Planned decoding is never faster than its memory."""

import pytest

from scripts.benchmarks.studies.decode_plans import TOPOLOGIES, least_token_s, plan_of, row


@pytest.mark.parametrize(
    ("model", "topology", "rows"), [("1.3B", "v6e:1x1", 1), ("70B", "v5e:4x4", 64)]
)
def test_a_token_takes_at_least_as_long_as_reading_weights_and_cache(
    model: str, topology: str, rows: int
) -> None:
    assert topology in TOPOLOGIES[model]
    plan = plan_of(model, topology, rows)
    assert plan.token_s is not None and plan.token_s > least_token_s(plan) > 0
    bits = 16 * plan.parameters / plan.devices  # of the weights, were all of them split evenly
    assert 8 * plan.step.array_bytes["parameters"] == pytest.approx(bits, rel=0.25)
    assert f"{1e3 * plan.token_s:.2f} ms" in row(model, topology, rows)
