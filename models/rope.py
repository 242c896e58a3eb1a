"""Sets the rates of rotary positions, and slows them for rows longer than those of training.

Rates are the angles per position, the fastest first: theta to the power of 0, -2/d, -4/d, ...
"""

import math

import numpy as np

from configs.errors import UserError
from configs.spec import Count, Positive, abstract_spec, spec

Rates = np.ndarray


def plain_rates(theta: float, d_kv: int) -> Rates:
    """Returns the rate of each pair of columns.  Su et al. 2021 (RoFormer), section 3.2.2."""
    half = d_kv // 2
    return theta ** (-np.arange(half) / half)


@abstract_spec
class RopeScaling:
    """Slows rotary positions down."""

    @property
    def magnitude(self) -> float:
        """Returns what multiplies rotated queries and keys."""
        return 1.0

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        """Returns the rates in place of the plain ones."""
        raise NotImplementedError


@spec
class LinearScaling(RopeScaling):
    """Slows all rates alike: positions lie closer.  Chen et al. 2023."""

    factor: Positive
    """Divides the rates: how many times longer rows become."""

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        return rates_k / self.factor


@spec
class Llama3Scaling(RopeScaling):
    """Slows the slow rates alone.  Grattafiori et al. 2024 (Llama 3.1)."""

    factor: Positive
    """Divides the slow rates."""
    original_length: Count
    """Tokens in the rows of the first training."""
    low_freq_factor: Positive = 1.0
    """Rotations in such a row up to which a rate is slowed in full."""
    high_freq_factor: Positive = 4.0
    """Rotations in such a row from which a rate stays; between the two, a mean of both."""

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"Llama3Scaling.high_freq_factor = {self.high_freq_factor}: found "
                f"low_freq_factor = {self.low_freq_factor}.  Legal: above it."
            )

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        rotations_k = rates_k * self.original_length / (2 * math.pi)
        kept_k = (rotations_k - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return mean_of(rates_k, rates_k / self.factor, np.clip(kept_k, 0, 1))


@spec
class YarnScaling(RopeScaling):
    """Slows the slow rates alone, by a ramp over their numbers.  Peng et al. 2023 (YaRN)."""

    factor: Positive
    """Divides the slow rates."""
    original_length: Count
    """Tokens in the rows of the first training."""
    beta_fast: Positive = 32.0
    """Rotations in such a row from which a rate stays."""
    beta_slow: Positive = 1.0
    """Rotations in such a row up to which a rate is slowed in full."""
    truncate: bool = True
    """Begins and ends the ramp at whole numbers of a rate."""
    attention_factor: Positive | None = None
    """Multiplies rotated queries and keys. None: 0.1 ln(factor) + 1."""

    @property
    def magnitude(self) -> float:
        """Returns what multiplies rotated queries and keys (equation 22)."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        width = 2 * len(rates_k)

        def number(rotations: float) -> float:
            """Returns the number of the rate with so many rotations in a row (section 3.2)."""
            rate = rotations * 2 * math.pi / self.original_length
            return -width * math.log(rate) / (2 * math.log(theta))

        first, last = number(self.beta_fast), number(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        ramp_k = (np.arange(len(rates_k)) - first) / (last - first or 0.001)
        return mean_of(rates_k, rates_k / self.factor, 1 - np.clip(ramp_k, 0, 1))


def mean_of(a: Rates, b: Rates, share: np.ndarray) -> Rates:
    """Returns a in this share, and b in the rest."""
    return share * a + (1 - share) * b
