"""Defines the language models of the benchmarks, in Meshloom and in PyTorch.

They have float32 weights, learned positions, a tied vocabulary and ReLU, without dropout.  On a
GPU, both libraries compute in bfloat16; PyTorch does so through autocast.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from models.precision import FloatType
    from models.transformer import Transformer


@dataclass(frozen=True)
class Shape:
    """Describes a model and its batch."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    vocab: int
    rows: int
    length: int
    experts: int = 0
    """Experts in every other layer, each half as wide as a dense layer; a token has two."""
    loss_chunks: int = 1
    cpu_slices: tuple[int, int] = (1, 1)
    """Microbatches and query slices with activations that fit into a processor's cache."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def step_flops(self) -> int:
        """Counts the FLOPs of a step's matrix products, three times those of the forward pass.

        Attention counts only the half that the causal mask leaves.
        """
        layer_weights = 4 * self.d_model**2 + 2 * self.d_model * self.d_ff  # weights per token
        products = 2 * (self.layers * layer_weights + self.vocab * self.d_model)
        attention = 2 * self.layers * self.length * self.d_model
        return 3 * self.tokens * (products + attention)

    def ids(self) -> np.ndarray:
        """Draws the tokens of a batch: in each row, one more than it has inputs."""
        size = (self.rows, self.length + 1)
        return np.random.default_rng(0).integers(2, self.vocab, size).astype(np.int32)


SHAPES = {
    "small": Shape(4, 256, 1024, 4, 8192, 16, 256, loss_chunks=2, cpu_slices=(4, 2)),
    "1.3b": Shape(24, 2048, 8192, 16, 32_768, 8, 2048, loss_chunks=4),
    "1.3b_8k": Shape(24, 2048, 8192, 16, 32_768, 2, 8192, loss_chunks=4),
    "1.3b_experts": Shape(24, 2048, 8192, 16, 32_768, 8, 2048, experts=8, loss_chunks=4),
    "toy": Shape(2, 32, 48, 2, 64, 4, 16),
    "toy_experts": Shape(2, 32, 48, 2, 64, 4, 16, experts=4),
}


def transformer(shape: Shape, *, store: "FloatType" = "float32") -> "Transformer":
    """Returns Meshloom's model, with the fastest settings for this machine's device."""
    import jax

    from models.attention.multi_head import MultiHead
    from models.feed_forward.moe.layer import Moe
    from models.feed_forward.moe.routing import Top2
    from models.parts import Block
    from models.positions.absolute import Learned
    from models.precision import Precision
    from models.transformer import Transformer

    on_cpu = jax.devices()[0].platform == "cpu"
    pattern = [Block()]
    if shape.experts:
        moe = Moe(experts=shape.experts, router=Top2(), d_ff=shape.d_ff // 2)
        pattern.append(Block(feed_forward=moe))
    return Transformer(
        vocab=shape.vocab,
        layers=shape.layers,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        heads=shape.heads,
        d_kv=shape.d_model // shape.heads,
        attention=MultiHead(
            combined_qkv=on_cpu,  # a GPU's kernels would copy its parts
            chunks=shape.cpu_slices[1] if on_cpu else 1,
        ),
        positions=Learned(),
        length=shape.length,
        scan=False,  # a loop would copy each layer's weights and activations out of stacked arrays
        loss_chunks=shape.loss_chunks,
        pattern=tuple(pattern),
        precision=Precision(store=store, compute="float32" if on_cpu else "bfloat16"),
    )


def torch_model(shape: Shape) -> "torch.nn.Module":
    """Returns the dense model in PyTorch, which maps (inputs, targets) to the mean loss."""
    import torch
    from torch import nn
    from torch.nn import functional

    assert not shape.experts, "only dense shapes have a model in PyTorch"
    d_model, length = shape.d_model, shape.length

    class TorchBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
            self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
            self.out = nn.Linear(d_model, d_model, bias=False)
            self.wi = nn.Linear(d_model, shape.d_ff, bias=False)
            self.wo = nn.Linear(shape.d_ff, d_model, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (-1, length, shape.heads, d_model // shape.heads)
            parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
            q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(-1, length, d_model))
            return x + self.wo(functional.relu(self.wi(self.mlp_norm(x))))

    class TorchModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab, d_model)
            nn.init.normal_(self.embed.weight, std=d_model**-0.5)
            self.places = nn.Embedding(length, d_model)
            nn.init.normal_(self.places.weight, std=d_model**-0.5)
            self.blocks = nn.ModuleList(TorchBlock() for _ in range(shape.layers))
            self.norm = nn.RMSNorm(d_model)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = (self.embed(inputs) + self.places.weight) * d_model**0.5
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.embed.weight)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    torch.manual_seed(0)
    return TorchModel()
