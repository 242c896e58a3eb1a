"""The parts around attention: norm, feed-forward, and the residual block that joins them."""

import jax
import jax.numpy as jnp
from flax import nnx

from layouts.layout import Layout
from models.api import Cache
from models.attention import Attention, SourceAttention, View
from models.dropout import dropout
from models.spec import Transformer
from models.weights import Weights

Array = jax.Array
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


class Norm(nnx.Module):
    """Divides by the root mean square.  Zhang and Sennrich 2019 (RMSNorm), equation 4."""

    def __init__(self, layout: Layout, weights: Weights):
        self.layout = layout
        self.scale_D = weights.ones("D")

    def __call__(self, x_BLD: Array) -> Array:
        wide_BLD = x_BLD.astype(jnp.float32)
        power_BL1 = jnp.mean(jnp.square(wide_BLD), axis=-1, keepdims=True)
        scale_11D = self.layout.align(self.scale_D[...].astype(jnp.float32), "D", "BLD")
        return (wide_BLD * jax.lax.rsqrt(power_BL1 + 1e-6) * scale_11D).astype(x_BLD.dtype)


class Mlp(nnx.Module):
    """Feed-forward layer, plain or gated.  Vaswani et al. 2017, section 3.3; Shazeer 2020."""

    def __init__(self, spec: Transformer, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.wi_DF = weights.normal("DF", fan_in="D")
        if spec.gated:
            self.wg_DF = weights.normal("DF", fan_in="D")
        self.wo_FD = weights.normal("FD", fan_in="F")

    def __call__(self, x_BLD: Array, key: Array | None = None) -> Array:
        einsum, activate = self.layout.einsum, ACTIVATIONS[self.spec.activation]
        h_BLF = einsum("BLD,DF->BLF", x_BLD, self.wi_DF[...])
        if self.spec.gated:
            h_BLF = activate(einsum("BLD,DF->BLF", x_BLD, self.wg_DF[...])) * h_BLF
        else:
            h_BLF = activate(h_BLF)
        h_BLF = dropout(self.layout, key, self.spec.dropout, h_BLF, "BLF")
        return einsum("BLF,FD->BLD", h_BLF, self.wo_FD[...])


class Block(nnx.Module):
    """Attention, attention over a source where there is one, and feed-forward.

    Each is normed before and added to the residual after.
    """

    def __init__(self, spec: Transformer, layout: Layout, weights: Weights, *, reads_source: bool):
        self.spec = spec
        self.layout = layout
        self.attention_norm = Norm(layout, weights)
        self.attention = Attention(spec, layout, weights)
        if reads_source:
            self.source_norm = Norm(layout, weights)
            self.source_attention = SourceAttention(spec, layout, weights)
        self.mlp_norm = Norm(layout, weights)
        self.mlp = Mlp(spec, layout, weights)

    def __call__(
        self,
        x_BLD: Array,
        view: View,
        source: View | None = None,
        cache: Cache | None = None,
        key: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        keys, source_keys = [None] * 4, [None] * 2
        if key is not None:
            keys = list(jax.random.split(key, 4))
            source_keys = list(jax.random.split(jax.random.fold_in(key, 4)))
        y_BLD, cache = self.attention(self.attention_norm(x_BLD), view, cache, keys[0])
        x_BLD = x_BLD + self.drop(y_BLD, keys[1])
        if source is not None:
            y_BLD, cache = self.source_attention(
                self.source_norm(x_BLD), source, cache, source_keys[0]
            )
            x_BLD = x_BLD + self.drop(y_BLD, source_keys[1])
        y_BLD = self.mlp(self.mlp_norm(x_BLD), keys[2])
        return x_BLD + self.drop(y_BLD, keys[3]), cache

    def drop(self, y_BLD: Array, key: Array | None) -> Array:
        return dropout(self.layout, key, self.spec.dropout, y_BLD, "BLD")
