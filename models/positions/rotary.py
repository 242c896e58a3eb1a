"""Rotates queries and keys by angles that grow with the position."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from configs.errors import UserError
from configs.spec import Positive, spec
from layouts.einsum import platform
from layouts.layout import Layout
from models.parts import BlockParts, Positions
from models.positions.rope_scaling import RopeScaling, plain_rates
from models.sizes import Sizes


@spec
class Rotary(Positions):
    """Rotates pairs of columns of queries and keys.  Su et al. 2021 (RoFormer), section 3.2.2."""

    theta: Positive = 10_000.0
    """Base of the wavelengths."""
    scaling: RopeScaling | None = None
    """Scales the angles to longer rows than a model was trained on. None: no scaling."""
    fraction: Positive = 1.0
    """Share of the columns of a head that rotate, the first ones."""

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
        """Returns the angles position x rate for heads of this width."""
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
        """Rotates pairs of head columns, whose halves are paired.  RoFormer, equation 34."""
        whole = axes[:-1] + axes[-1].lower()
        x, table_axes = layout.reshard(x, whole), whole[0] + whole[-2:]
        tables = (layout.broadcast_like(table, table_axes, whole) for table in prepared)
        width = prepared.cos_BLk.shape[-1]
        if width == x.shape[-1]:
            return layout.reshard(_rotated(x, *tables), axes)
        rotated = _rotated(x[..., :width], *tables)
        return layout.reshard(jnp.concatenate([rotated, x[..., width:]], axis=-1), axes)


class Rotation(NamedTuple):
    """Holds the angles by which positions rotate heads, in JAX's float type, of both halves."""

    cos_BLk: Array
    sin_BLk: Array
    """Negative for the left half."""


def swap_by_product(x: Array) -> Array:
    """Swaps the halves of the last axis, exactly, by the matrix unit.

    A TPU moves columns within a register slowly: on v5e a rotation takes 1.1 ms after this product,
    and 4.0 ms after `jnp.roll`, by the compiler's cycles (67 million elements in bfloat16).
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
    # Rotates back: one pass, where the gradient of parts would add up padded arrays.
    lambda tables, dx: (_rotated(dx, tables[0], -tables[1]), None, None),
)
