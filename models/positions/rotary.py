"""Rotates queries and keys by angles that grow with the position; scales these for longer rows.

Rates are the angles per position, the fastest first: theta to the power of 0, -2/d, -4/d, ...
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from configs.errors import UserError
from configs.spec import Count, Positive, abstract_spec, spec
from layouts.einsum import platform
from layouts.layout import Layout
from models.parts import BlockParts, Positions
from models.sizes import Sizes

Rates = np.ndarray


def plain_rates(theta: float, d_kv: int) -> Rates:
    """Returns the rate of each pair of columns.  Su et al. 2021 (RoFormer), section 3.2.2."""
    half = d_kv // 2
    return theta ** (-np.arange(half) / half)


@abstract_spec
class RopeScaling:
    """Scales the rates of rotary positions down, for longer rows."""

    @property
    def magnitude(self) -> float:
        """Returns the factor of rotated queries and keys."""
        return 1.0

    @property
    def max_length(self) -> int | None:
        """Returns the number of tokens in the longest row that it supports; None means no limit."""
        return None

    def check(self, pairs: int) -> None:
        """Raises UserError if it cannot scale the rates of this number of pairs of columns."""

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        """Returns the scaled rates."""
        raise NotImplementedError(f"{type(self).__name__} has no scaled")


@spec
class LinearScaling(RopeScaling):
    """Divides all frequencies by one factor (position interpolation).  Chen et al. 2023."""

    factor: Positive
    """Divides the frequencies: how many times as long rows may be."""

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        return rates_k / self.factor


@spec
class Llama3Scaling(RopeScaling):
    """Divides only the low frequencies by a factor.  Grattafiori et al. 2024 (Llama 3.1)."""

    factor: Positive
    """Divides the low frequencies."""
    original_length: Count
    """Tokens in the rows of the original training."""
    low_freq_factor: Positive = 1.0
    """Frequencies with at most this many rotations in such a row are divided by the factor."""
    high_freq_factor: Positive = 4.0
    """Frequencies with at least this many rotations in such a row are unchanged. Between the two
    bounds, a frequency is a weighted mean of both."""

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"Llama3Scaling.high_freq_factor = {self.high_freq_factor}: found "
                f"low_freq_factor = {self.low_freq_factor}.  Legal: above it."
            )

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        rotations_k = rates_k * self.original_length / (2 * math.pi)
        kept_k = np.interp(rotations_k, [self.low_freq_factor, self.high_freq_factor], [0, 1])
        return kept_k * rates_k + (1 - kept_k) * (rates_k / self.factor)


@spec
class YarnScaling(RopeScaling):
    """Divides only the low frequencies, with a ramp over indices.  Peng et al. 2023 (YaRN)."""

    factor: Positive
    """Divides the low frequencies."""
    original_length: Count
    """Tokens in the rows of the original training."""
    beta_fast: Positive = 32.0
    """Frequencies with at least this many rotations in such a row are unchanged."""
    beta_slow: Positive = 1.0
    """Frequencies with at most this many rotations in such a row are divided by the factor."""
    truncate: bool = True
    """Rounds the ends of the ramp to whole indices of frequencies."""
    attention_factor: Positive | None = None
    """Multiplies rotated queries and keys. None: 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        if self.beta_fast <= self.beta_slow:
            raise UserError(
                f"YarnScaling.beta_fast = {self.beta_fast}: found beta_slow = {self.beta_slow}.  "
                "Legal: above it."
            )

    @property
    def magnitude(self) -> float:
        """Returns the factor of rotated queries and keys (equation 22)."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        width = 2 * len(rates_k)

        def number(rotations: float) -> float:
            """Returns the index of the rate with this many rotations in a row (section 3.2)."""
            rate = rotations * 2 * math.pi / self.original_length
            return -width * math.log(rate) / (2 * math.log(theta))

        first, last = number(self.beta_fast), number(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        ramp_k = (np.arange(len(rates_k)) - first) / (last - first or 0.001)
        kept_k = 1 - np.clip(ramp_k, 0, 1)
        return kept_k * rates_k + (1 - kept_k) * (rates_k / self.factor)


@spec
class DynamicScaling(RopeScaling):
    """Raises theta for rows longer than in training (dynamic NTK), equally for all rows."""

    factor: Positive
    """Larger values raise theta more: about how many times as long rows may be."""
    original_length: Count
    """Tokens in the rows of the original training."""
    length: Count | None = None
    """Tokens of the longest row, which sets theta. None: `original_length`; theta is unchanged."""

    @property
    def max_length(self) -> int:
        return self.length or self.original_length

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        width, longer = 2 * len(rates_k), max(self.max_length / self.original_length - 1, 0)
        return plain_rates(theta * (1 + self.factor * longer) ** (width / max(width - 2, 1)), width)


@spec
class LongRopeScaling(RopeScaling):
    """Divides each frequency by a factor, with others for long rows.  Ding et al. 2024 (LongRoPE).

    A text has the same frequencies throughout, so a run uses either short rows or long rows.
    """

    short_factor: tuple[Positive, ...]
    """Divides the frequencies in rows of up to `original_length` tokens."""
    long_factor: tuple[Positive, ...]
    """Divides the frequencies in longer rows."""
    original_length: Count
    """Tokens in the rows of the original training."""
    attention_factor: Positive
    """Multiplies rotated queries and keys."""
    long: bool = False
    """Uses `long_factor`, for rows of any length; else `short_factor`, up to `original_length`."""

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    @property
    def max_length(self) -> int | None:
        return None if self.long else self.original_length

    def check(self, pairs: int) -> None:
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != pairs:
                raise UserError(
                    f"LongRopeScaling.{name} has {len(getattr(self, name))} numbers.  Legal: "
                    f"{pairs}, one for each pair of the columns that rotate."
                )

    def scaled(self, rates_k: Rates, theta: float) -> Rates:
        return rates_k / np.array(self.long_factor if self.long else self.short_factor)


@spec
class Rotary(Positions):
    """Rotates pairs of columns of queries and keys.  Su et al. 2021 (RoFormer), section 3.2.2."""

    theta: Positive = 10_000.0
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """Scales the angles for rows that are longer than in training. None: no scaling."""
    fraction: Positive = 1.0
    """Share of the columns of a head that are rotated, from the first."""

    def __post_init__(self) -> None:
        if self.fraction > 1:
            raise UserError(f"Rotary.fraction = {self.fraction}.  Legal: at most 1.")
        if self.scaling is not None and self.theta <= 1:
            raise UserError(
                f"Rotary.theta = {self.theta}: found @{type(self.scaling).__name__}() as scaling.  "
                "Legal: above 1."
            )

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        columns = block.attention.position_width(sizes)
        width = self.width(columns)
        if width % 2 or not width:
            name = f"Rotary.fraction = {self.fraction}"
            if self.fraction == 1:  # Latent.rotated, the other width, is even
                name = f"Transformer.d_kv = {columns}"
            raise UserError(
                f"{name}: rotary positions need an even width, and {width} of {columns} rotate."
            )
        if self.scaling is not None:
            self.scaling.check(width // 2)

    def max_length(self, sizes: Sizes) -> int | None:
        return None if self.scaling is None else self.scaling.max_length

    def width(self, columns: int) -> int:
        """Returns how many columns of a head rotate."""
        return int(columns * self.fraction)

    def prepare(self, positions_BL: Array, width: int) -> "Rotation":
        """Returns the cosines and sines of position x rate, for heads of this width."""
        rates, magnitude = plain_rates(self.theta, self.width(width)), 1.0
        if self.scaling is not None:
            rates, magnitude = self.scaling.scaled(rates, self.theta), self.scaling.magnitude
        rates_k = jnp.asarray(rates, float)
        angles_BLk = jnp.einsum("BL,k->BLk", positions_BL.astype(float), rates_k)
        cos_BLk, sin_BLk = magnitude * jnp.cos(angles_BLk), magnitude * jnp.sin(angles_BLk)
        return Rotation(
            cos_BLk=jnp.concatenate([cos_BLk, cos_BLk], axis=-1),
            sin_BLk=jnp.concatenate([-sin_BLk, sin_BLk], axis=-1),
        )

    def rotate(self, layout: Layout, x: Array, axes: str, prepared: "Rotation") -> Array:
        """Rotates pairs of columns, one from each half of a head.  RoFormer, equation 34."""
        unsplit = axes[:-1] + axes[-1].lower()
        x, table_axes = layout.reshard(x, unsplit), unsplit[0] + unsplit[-2:]
        tables = (layout.broadcast_like(table, table_axes, unsplit) for table in prepared)
        width = prepared.cos_BLk.shape[-1]
        if width == x.shape[-1]:
            return layout.reshard(_rotated(x, *tables), axes)
        rotated = _rotated(x[..., :width], *tables)
        return layout.reshard(jnp.concatenate([rotated, x[..., width:]], axis=-1), axes)


class Rotation(NamedTuple):
    """Holds cosines and sines of rotation angles, in JAX's float type, for both halves of heads."""

    cos_BLk: Array
    sin_BLk: Array
    """Negative for the left half."""


def swap_by_product(x: Array) -> Array:
    """Swaps the halves of the last axis exactly, on the matrix unit.

    TPUs move columns within a register slowly: on v5e a rotation takes 1.1 ms with this product and
    4.0 ms with `jnp.roll`, by the compiler's cycle estimates (67 million elements in bfloat16).
    """
    swap_kk = jnp.roll(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, axis=1)
    return jnp.einsum(
        "...k,kj->...j", x, swap_kk, precision="highest", preferred_element_type=float
    )


@jax.custom_vjp
def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    is_tpu = platform() == "tpu"
    swapped = swap_by_product(x) if is_tpu else jnp.roll(x, x.shape[-1] // 2, axis=-1)
    return (x.astype(float) * cos + swapped.astype(float) * sin).astype(x.dtype)


_rotated.defvjp(
    lambda x, cos, sin: (_rotated(x, cos, sin), (cos, sin)),
    # Rotates back in one pass; the gradients of the parts would add up padded arrays.
    lambda tables, dx: (_rotated(dx, tables[0], -tables[1]), None, None),
)
