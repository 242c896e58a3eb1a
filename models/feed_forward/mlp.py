"""Computes feed-forward layers."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from configs.errors import UserError
from configs.spec import Fraction, spec
from layouts.layout import Layout
from models.dropout import Key, dropout
from models.initializers import Weights
from models.parts import FeedForward
from models.sizes import Sizes

Activation = Literal["relu", "gelu", "gelu_exact", "silu", "clamped_swiglu"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu, "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False), "silu": jax.nn.silu,
}  # fmt: skip
CLAMP, SHARPNESS = 7.0, 1.702
"""Of "clamped_swiglu"."""


@spec
class Mlp(FeedForward):
    """Computes a feed-forward layer, plain or gated.  Vaswani et al. 2017, 3.3; Shazeer 2020."""

    activation: Activation = "relu"
    """Nonlinearity. "gelu" uses the tanh approximation, "gelu_exact" the error function.
    "clamped_swiglu" is the one of gpt-oss, for gated layers: both products are at most 7, the gate
    is multiplied by sigmoid(1.702 gate), and 1 is added to the other product."""
    gated: bool = False
    """Gated (GLU): activation(x wg) * (x wi)."""
    biases: bool = False
    """Adds a learned bias to the result of each product."""
    dropout: Fraction | None = None
    """Dropout rate of the activations. None: Transformer.dropout."""

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS and not self.gated:
            raise UserError(
                f"Mlp.activation = {self.activation!r}: found gated = False.  Legal: "
                f"{', '.join(map(repr, ACTIVATIONS))}, or Mlp.gated = True."
            )

    def dropout_rate(self, sizes: Sizes) -> float:
        return sizes.dropout if self.dropout is None else self.dropout

    def build(self, sizes: Sizes, layout: Layout, weights: Weights) -> "MlpLayer":
        return MlpLayer(self, sizes, layout, weights)

    def activate(self, h: Array, gate: Array | None) -> Array:
        """Applies the activation, to the gate if there is one."""
        activation = ACTIVATIONS.get(self.activation)
        if gate is None:
            assert activation is not None
            return activation(h)
        # A TPU's compiler would recompute these, and their gradients, for each tile of the
        # products that read them (docs/planning.md).
        h, gate = jax.lax.optimization_barrier((h, gate))
        if activation is None:
            h, gate = jnp.clip(h, -CLAMP, CLAMP) + 1, jnp.minimum(gate, CLAMP)
            return jax.lax.optimization_barrier(gate * jax.nn.sigmoid(SHARPNESS * gate) * h)
        return jax.lax.optimization_barrier(activation(gate) * h)


class MlpLayer(nnx.Module):
    """Computes a feed-forward layer."""

    def __init__(self, spec: Mlp, sizes: Sizes, layout: Layout, weights: Weights):
        self.spec = spec
        self.rate = spec.dropout_rate(sizes)
        self.layout = layout
        self.wi_DF = weights.normal("DF", fan_in="D")
        if spec.gated:
            self.wg_DF = weights.normal("DF", fan_in="D")
        self.wo_FD = weights.normal("FD", fan_in="F")
        if spec.biases:
            self.bi_F, self.bo_D = weights.zeros("F"), weights.zeros("D")
            if spec.gated:
                self.bg_F = weights.zeros("F")

    @jax.named_scope("mlp")
    def __call__(
        self, x_BLD: Array, segments_BL: Array | None, key: Key = None, *, drop_tokens: bool = True
    ) -> tuple[Array, None]:
        """Returns the output of each token, and None in place of a load of experts."""
        einsum, gate_BLF = self.layout.einsum, None
        h_BLF = self.biased(einsum("BLD,DF->BLF", x_BLD, self.wi_DF[...]), "bi_F")
        if self.spec.gated:
            gate_BLF = self.biased(einsum("BLD,DF->BLF", x_BLD, self.wg_DF[...]), "bg_F")
            gate_BLF = checkpoint_name(gate_BLF, "mlpwi")
        h_BLF = self.spec.activate(checkpoint_name(h_BLF, "mlpwi"), gate_BLF)
        h_BLF = dropout(self.layout, key, self.rate, h_BLF, "BLF")
        return self.biased(einsum("BLF,FD->BLD", h_BLF, self.wo_FD[...]), "bo_D"), None

    def biased(self, x: Array, name: str) -> Array:
        """Adds the bias of this name, if there are biases, along the last axis."""
        if not self.spec.biases:
            return x
        axis = name[-1]
        bias = getattr(self, name)[...].astype(x.dtype)
        return x + self.layout.broadcast_like(bias, axis, "BL" + axis)
