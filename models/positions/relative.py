"""Adds a learned bias to the logits by relative position, as in T5."""

import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import Field

from configs.errors import UserError
from configs.spec import spec
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import with_axes
from layouts.reduction import reduced_over
from models.attention.bias import BUCKETS, Bias
from models.initializers import Weights
from models.parts import BlockParts, Positions
from models.sizes import Sizes


@spec
class Relative(Positions):
    """Learns a bias per head and bucket of distance.  Raffel et al. 2020 (T5), section 2.1."""

    axes: ClassVar[tuple[Axis, ...]] = (BUCKETS,)
    adds_bias: ClassVar[bool] = True

    buckets: Annotated[int, Field(ge=2)] = 32
    """Buckets of distance: at least 2, at least 4 with an encoder."""
    max_distance: Annotated[int, Field(ge=2)] = 128
    """Distance from which all positions share a bucket; must be more than half of `buckets`."""
    shared: bool = False
    """One bias for all layers of a stack, as in T5; otherwise each layer has its own."""

    def __post_init__(self) -> None:
        if self.max_distance <= self.buckets // 2:
            raise UserError(
                f"Relative.max_distance = {self.max_distance}: {self.buckets} buckets hold the "
                f"distances below {self.buckets // 2} exactly.  Legal: max_distance of at least "
                f"{self.buckets // 2 + 1}, or at most {2 * self.max_distance - 1} buckets."
            )

    def check(self, sizes: Sizes, block: BlockParts, *, causal: bool) -> None:
        """Raises UserError if buckets are too few for the two directions of an encoder."""
        if sizes.has_encoder and self.buckets < 4:  # half of them for each direction
            raise UserError(
                f"Relative.buckets = {self.buckets}: relative positions need at least 4 with an "
                "encoder."
            )

    @property
    def shares_bias(self) -> bool:
        return self.shared

    def build_bias(self, layout: Layout, weights: Weights) -> "RelativeBias":
        return RelativeBias(self, layout, weights)


class RelativeBias(nnx.Module):
    """Learns a number per head and bucket of distance, which is added to the logits."""

    def __init__(self, spec: "Relative", layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = with_axes(layout, BUCKETS)
        self.bias_RJQ = weights.with_axes(BUCKETS).with_sizes(R=spec.buckets).zeros("RJQ", "R")

    def __call__(self, relative_positions: Array, causal: bool) -> Bias:
        """Returns the bias for query position - key position, with axes "LM" or "BLM"."""
        settings = self.spec.buckets, self.spec.max_distance
        buckets = relative_buckets(relative_positions, *settings, causal)
        # Its gradient is small; `bias_gradient` adds it up over devices immediately.
        table_RJQ = reduced_over(self.bias_RJQ[...].astype(float), ())
        table_RJQ = self.layout.reshard(table_RJQ, "RJQ")
        axes = "BLM"[-buckets.ndim :]
        rows = self.layout.take(jax.lax.stop_gradient(table_RJQ), buckets, axes + "JQ")
        placed = axes.replace("LM", "JQLM")
        values = self.layout.einsum(f"{axes}JQ->{placed}", rows)
        return Bias(table_RJQ, buckets, self.layout.broadcast_like(values, placed, "BJQLM"))


def relative_buckets(positions: Array, buckets: int, max_distance: int, causal: bool) -> Array:
    """Returns the bucket of query position - key position: exact if near, else logarithmic.

    Raffel et al. 2020 (T5), section 2.1.  In causal attention, keys ahead get bucket 0; otherwise
    they get the upper half of the buckets.
    """
    first = jnp.zeros_like(positions)
    if causal:
        distance = jnp.maximum(positions, 0)
    else:
        buckets //= 2
        first = jnp.where(positions < 0, buckets, first)
        distance = jnp.abs(positions)
    exact = buckets // 2
    share = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = exact + (share * (buckets - exact)).astype(jnp.int32)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
