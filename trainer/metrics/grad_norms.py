"""Computes the norm of the gradient of all weights, and of those of each part of the model."""

import re

import jax
import jax.numpy as jnp
import optax

from layouts.axes import leaf_path
from models.api import Params

PARTS = {
    r"/(router_DE|bias_E)$": "router",
    r"(^|/|_)norm/|scale_[A-Z]$": "norms",
    r"/mlp/(\w+/)*w\w*_E": "experts",
    r"source_attention/": "source_attention",
    r"attention/": "attention",
    r"mlp/": "mlp",
    r"embed_|positions_": "embed",
    r"softmax_": "softmax",
}
OTHER = "other"


def part_of(path: str) -> str:
    """Returns the part of the model that a weight belongs to.

    >>> part_of("decoder/layers_N/block1/mlp/wi_EDF"), part_of("decoder/layers_N/mlp_norm/scale_D")
    ('experts', 'norms')
    """
    return next((part for words, part in PARTS.items() if re.search(words, path)), OTHER)


def grad_norms(gradients: Params) -> dict[str, jax.Array]:
    """Returns the norm of all gradients, "grad_norm", and of each part, "grad_norm/attention".

    Each gradient is read, and its sum crosses devices, once for both.  Sums have JAX's float type.
    """
    parts = dict[str, list[jax.Array]]()
    squares = jax.tree.map(lambda gradient: jnp.sum(jnp.square(gradient.astype(float))), gradients)
    for path, square in jax.tree.leaves_with_path(squares):
        part = part_of(leaf_path(path))
        parts.setdefault(f"grad_norm/{part}", []).append(square)
    every = {"grad_norm": jax.tree.leaves(squares), **parts}
    return {name: jnp.sqrt(optax.tree.sum(part)) for name, part in every.items()}
