"""Rates of rotary positions, as Hugging Face's transformers 5.23 computes them."""

import numpy as np
import pytest

from configs.errors import UserError
from models.positions.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    plain_rates,
)

THETA, WIDTH = 500.0, 16
RECORDED: list[tuple[RopeScaling, list[float], float]] = [
    (
        LinearScaling(factor=2.5),
        [0.4, 0.1839453, 0.0845897, 0.0388997, 0.01788854, 0.008226285, 0.003782966, 0.001739647],
        1.0,
    ),
    (
        Llama3Scaling(factor=8.0, original_length=64),
        [1, 0.4598633, 0.09761663, 0.01215616, 0.00559017, 0.002570714, 0.001182177, 0.0005436398],
        1.0,
    ),
    (
        DynamicScaling(factor=4.0, original_length=64),
        [1, 0.4598633, 0.2114742, 0.09724925, 0.04472136, 0.02056571, 0.009457416, 0.004349119],
        1.0,
    ),
    (
        DynamicScaling(factor=4.0, original_length=64, length=150),
        [1, 0.3529417, 0.1245679, 0.0439652, 0.01551715, 0.005476651, 0.001932939, 0.0006822147],
        1.0,
    ),
    (
        YarnScaling(factor=4.0, original_length=64, beta_fast=8.0),
        [1, 0.3448974, 0.1057371, 0.02431231, 0.01118034, 0.005141428, 0.002364354, 0.00108728],
        1.138629436111989,
    ),
    (
        YarnScaling(
            factor=4.0, original_length=64, beta_fast=8.0, truncate=False, attention_factor=0.7
        ),
        [1, 0.3710845, 0.1113971, 0.02431231, 0.01118034, 0.005141428, 0.002364354, 0.00108728],
        0.7,
    ),
]


@pytest.mark.parametrize(("scaling", "rates", "magnitude"), RECORDED, ids=str)
def test_rates_are_those_recorded(
    scaling: RopeScaling, rates: list[float], magnitude: float
) -> None:
    scaled_k = scaling.scaled(plain_rates(THETA, WIDTH), THETA)
    np.testing.assert_allclose(scaled_k, rates, rtol=1e-6)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)


def test_fast_rates_turn_more_than_slow_ones() -> None:
    with pytest.raises(
        UserError, match=r"high_freq_factor = 1.0: found low_freq_factor = 1.0.  Legal: above"
    ):
        Llama3Scaling(factor=8.0, original_length=64, high_freq_factor=1.0)
    with pytest.raises(UserError, match=r"beta_fast = 1.0: found beta_slow = 1.0.  Legal: above"):
        YarnScaling(factor=8.0, original_length=64, beta_fast=1.0)
