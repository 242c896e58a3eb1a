"""Records every tensor and product of a model in a trace that allocates none of them.

The trace runs on a mesh that has an axis for each letter.  Under the layout that splits each axis
over its letter, the type of a tensor tells its letters.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from configs.errors import UserError
from layouts.axes import BY_LETTER, axes_of_path
from layouts.cost.collectives import checkout_file
from layouts.cost.dataflow import (
    CONVOLUTION,
    executed_equations,
    places,
    product_flops,
    source_line,
)
from layouts.layout import Layout
from layouts.lint.statements import find_statement
from layouts.mesh import abstract_mesh

STORED = "*"  # marks the mesh axes of stored tensors
LAYERS = BY_LETTER["N"].name  # the scope of what each layer of a stack computes
LAYOUTS = str(Path(__file__).parents[1])


class Weight(NamedTuple):
    """Describes one stored array."""

    path: str
    axes: str
    shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensor(NamedTuple):
    """Describes one tensor that the model makes."""

    name: str
    """A weight's path, or the letters or equation and the line of the model."""
    axes: str
    """Letters; "_" is an axis that is whole under every layout."""
    shape: tuple[int, ...]
    stored: bool
    """Whether the rules for stored weights hold."""


class Product(NamedTuple):
    """Describes one product of two tensors."""

    name: str
    equation: str
    flops: int
    """Of all iterations of the scans around it."""
    in_layers: bool = False
    """Whether each layer of a stack computes it with its own weights."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Holds the weights, tensors and products of one trace of a model."""

    weights: tuple[Weight, ...]
    tensors: tuple[Tensor, ...]
    """The weights, then all else."""
    products: tuple[Product, ...]

    @property
    def flops(self) -> int:
        """Adds up the FLOPs of all products of the trace."""
        return sum(product.flops for product in self.products)


def record(trace: Callable[[Layout], Any]) -> Record:
    """Records what `trace` does with a layout: it makes weights, uses them and returns them.

    Nothing is allocated or compiled, and no device is needed.

    >>> def trace(layout):
    ...     wi_DF = layout.random(jax.random.normal, jax.random.key(0), "DF", (10, 14), stored=True)
    ...     x_BD = layout.iota("BD", (4, 10), "D").astype(jnp.float32)
    ...     layout.einsum("BD,DF->BF", x_BD, wi_DF)
    ...     return {"mlp": {"wi_DF": wi_DF}}
    >>> recorded = record(trace)
    >>> [product.equation for product in recorded.products], recorded.flops
    (['BD,DF->BF'], 1120)
    """
    jaxpr, tree = trace_of_letters(trace)
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    weights = tuple(Weight(p, axes_of_path(p), leaf.shape, leaf.dtype) for p, leaf in leaves)
    stored = [Tensor(w.path, w.axes, w.shape, True) for w in weights]
    tensors, products = read_trace(jaxpr.jaxpr)
    return Record(weights, tuple(dict.fromkeys([*stored, *tensors])), tuple(products))


def trace_of_letters(trace: Callable[[Layout], Any]) -> tuple[Any, Any]:
    """Traces under the layout that splits each axis; returns the jaxpr, and shapes of the result.

    An axis that JAX cannot split in this model, whatever the mesh, is whole.
    """
    letters = "".join(BY_LETTER)
    try:
        return trace_split(trace, letters)
    except UserError:
        raise
    except Exception as error:
        if not can_split(trace, ""):
            raise  # a bug, and of no axis
        named = find_statement(error).letters
        for letter in sorted(letters, key=lambda letter: letter not in named):
            if can_split(trace, rest := letters.replace(letter, "")):
                return trace_split(trace, rest)
        kept = ""
        for letter in letters:
            kept += letter if can_split(trace, kept + letter) else ""
        return trace_split(trace, kept)


def trace_split(trace: Callable[[Layout], Any], letters: str) -> tuple[Any, Any]:
    """Traces with these axes split, each over a mesh axis that has its letter."""
    layout = Layout(
        mesh="",
        rules=";".join(f"{BY_LETTER[letter].name}:{letter}" for letter in letters),
        param_rules=";".join(f"{BY_LETTER[letter].name}:{letter}{STORED}" for letter in letters),
    )
    sizes = {letter + mark: 1 for letter in letters for mark in ("", STORED)}
    with jax.sharding.use_abstract_mesh(abstract_mesh(sizes or {"one": 1})):
        return jax.make_jaxpr(lambda: trace(layout), return_shape=True)()


def can_split(trace: Callable[[Layout], Any], letters: str) -> bool:
    """Returns whether a trace succeeds with these axes split."""
    try:
        trace_split(trace, letters)
    except UserError:
        raise
    except Exception:  # JAX has no common type for what it cannot shard
        return False
    return True


def read_trace(jaxpr: Jaxpr) -> tuple[list[Tensor], list[Product]]:
    """Reads tensors and products from the types and the lines of a trace."""
    tensors, products = [], []
    for eqn, times in executed_equations(jaxpr):
        line, made_by_layouts = source_line(eqn), is_of_layouts(eqn)
        for out in eqn.outvars:
            axes, flops = letters_of_type(out.aval), flops_of(eqn)
            name = f"{axes} at {line}"
            if flops is not None:
                left, right = (letters_of_type(operand.aval) for operand in eqn.invars)
                equation = f"{left},{right}->{axes}"
                name = f"{equation} at {line}"
                in_layers = LAYERS in str(eqn.source_info.name_stack).split("/")
                products.append(Product(name, equation, times * flops, in_layers))
            if axes.strip("_") and not made_by_layouts:
                is_stored = any(str(entry).endswith(STORED) for entry in places(out.aval))
                tensors.append(Tensor(name, axes, out.aval.shape, is_stored))
    return tensors, products


def flops_of(eqn: Any) -> int | None:
    """Returns the FLOPs of a product whose operands have letters; None for all else.

    A convolution is the body of a `shard_map`, inside of which types have no letters.
    """
    if eqn.primitive.name == "dot_general":
        return product_flops(eqn)
    body = eqn.params["jaxpr"].eqns if eqn.primitive.name == "shard_map" else ()
    return next((product_flops(e) for e in body if e.primitive.name == CONVOLUTION), None)


def letters_of_type(aval: Any) -> str:
    """Returns the letters of a tensor from its type."""
    return "".join("_" if entry is None else str(entry)[0] for entry in places(aval))


def is_of_layouts(eqn: Any) -> bool:
    """Returns whether an equation is inside a function of layouts that chooses how to split."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    for frame in frames:
        folder, _, name = frame.file_name.rpartition("/")
        if folder == LAYOUTS:
            return name not in ("layout.py", "einsum.py")
        if checkout_file(frame.file_name):
            return False
    return False
