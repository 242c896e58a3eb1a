"""Chooses the types of weights and products."""

from typing import Literal, TypeVar

import jax

from configs.errors import UserError
from configs.spec import spec

Tree = TypeVar("Tree")
FloatType = Literal["float32", "bfloat16", "float16", "float64"]


@spec
class Precision:
    """Chooses types of stored weights and of products.

    Norms, softmax and sums have JAX's default float type: float32, or float64 under JAX_ENABLE_X64.
    """

    store: FloatType = "float32"
    """Type of stored weights."""
    compute: FloatType = "float32"
    """Type of activations and products."""

    def __post_init__(self) -> None:
        for name, value in (("store", self.store), ("compute", self.compute)):
            if value == "float64" and not jax.config.read("jax_enable_x64"):
                raise UserError(
                    f"Precision.{name} = 'float64': JAX computes in 32 bits."
                    "  Legal: 'float32', 'bfloat16', 'float16'.  Or set JAX_ENABLE_X64=1."
                )

    def to_compute(self, tree: Tree) -> Tree:
        """Returns the tree with its arrays in the type of matrix products."""
        return jax.tree.map(lambda x: x.astype(self.compute), tree)
