"""Chooses the types of weights and products."""

import dataclasses
from typing import Any, Literal, TypeVar

import jax
from flax import nnx

from configs.errors import UserError
from configs.spec import spec
from layouts.axes import leaf_path
from layouts.low_rank import Adapted
from layouts.quantized import Quantized, RoundedInProducts, Rounding, quantize
from models.api import Model, Params

Tree = TypeVar("Tree")
StoredWeights = Literal["stored", "int8"]
KEPT = ("router_DE", "positions_LD", "bias_RJQ")
"""Small weights that are never quantized: routers, positions, and biases by distance."""
FloatType = Literal["float32", "bfloat16", "float16", "float64"]


def is_rounded(x: object) -> bool:
    return isinstance(x, Quantized | RoundedInProducts)


@spec
class Precision:
    """Chooses the types of stored weights and of matmuls.

    Norms, softmax and sums use JAX's default float type: float32, or float64 with JAX_ENABLE_X64.
    """

    store: FloatType = "float32"
    """Type of stored weights."""
    compute: FloatType = "float32"
    """Type of activations and matmuls."""
    products: Literal["compute", "int8", "fp8"] = "compute"
    """Type to which training and evaluation round both operands of matmuls with weights in the
    layers, with a scale per row and column. Gradients and all other matmuls use `compute`
    (docs/precision.md)."""

    def __post_init__(self) -> None:
        for name, value in (("store", self.store), ("compute", self.compute)):
            if value == "float64" and not jax.config.read("jax_enable_x64"):
                raise UserError(
                    f"Precision.{name} = 'float64': JAX computes in 32 bits."
                    "  Legal: 'float32', 'bfloat16', 'float16'.  Or set JAX_ENABLE_X64=1."
                )

    def to_compute(self, tree: Tree) -> Tree:
        """Returns the tree with its arrays in the type of matrix products, unless quantized."""
        return jax.tree.map(
            lambda x: x if is_rounded(x) else x.astype(self.compute), tree, is_leaf=is_rounded
        )

    def to_products(self, layer: Tree) -> Tree:
        """Casts the weights of a layer to `compute`, and marks those that products round."""
        layer = self.to_compute(layer)
        if self.products == "compute":
            return layer
        rounding: Rounding = self.products

        def marked(path: tuple[Any, ...], weight: nnx.Param) -> Any:
            array = weight.get_value()
            reads = weight.get_metadata()["info"].reads
            if not reads or is_rounded(array) or leaf_path(path).endswith(KEPT):
                return weight
            rounded: Any = RoundedInProducts(getattr(array, "base", array), rounding)
            if isinstance(array, Adapted):
                rounded = dataclasses.replace(array, base=rounded)
            return weight.replace(rounded)

        return jax.tree.map_with_path(marked, layer, is_leaf=lambda x: isinstance(x, nnx.Param))


def quantize_weights(model: Model, params: Params) -> Params:
    """Rounds the weights of products to 8 bits, with a scale for each channel."""
    infos = model.weights()

    def rounded(path: tuple[Any, ...], weight: jax.Array) -> Any:
        name = leaf_path(path)
        _, axes, reads = infos[name]
        if not reads or name.endswith(KEPT):
            return weight
        return quantize(weight, [axes.index(axis) for axis in reads])

    return jax.tree.map_with_path(rounded, params)
