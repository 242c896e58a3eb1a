"""Records every tensor and product of a model in a trace that allocates none of them."""

import copy
import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike

from layouts.axes import BY_NAME, axes_of_path
from layouts.layout import Layout

Array = jax.Array
CHECKOUT = Path(__file__).parents[2]


class Weight(NamedTuple):
    """One stored array."""

    path: str
    axes: str
    shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensor(NamedTuple):
    """One sharding that the model asks for."""

    name: str  # a weight's path, or the letters or equation and the line that asks
    axes: str
    shape: tuple[
        int | None, ...
    ]  # None where the tensor is only broadcast against one with that axis
    stored: bool


class Product(NamedTuple):
    """One einsum of several operands."""

    name: str
    equation: str
    sizes: dict[str, int]  # by letter
    times: int  # how often it runs, trip counts of scans multiplied

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes.values()) * self.times


@dataclasses.dataclass(frozen=True)
class Record:
    """Weights, tensors and products of one trace of a model."""

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

    Nothing is allocated or compiled, and no device or mesh is needed.

    >>> def trace(layout):
    ...     wi_DF = layout.random(jax.random.normal, jax.random.key(0), "DF", (10, 14), stored=True)
    ...     x_BD = layout.iota("BD", (4, 10), "D").astype(jnp.float32)
    ...     layout.einsum("BD,DF->BF", x_BD, wi_DF)
    ...     return {"mlp": {"wi_DF": wi_DF}}
    >>> recorded = record(trace)
    >>> [product.equation for product in recorded.products], recorded.flops
    (['BD,DF->BF'], 1120)
    """
    recorder = Recorder()
    one = AbstractMesh((1,), ("one",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(one):
        jaxpr, tree = jax.make_jaxpr(lambda: trace(recorder), return_shape=True)()
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    weights = tuple(Weight(p, axes_of_path(p), leaf.shape, leaf.dtype) for p, leaf in leaves)
    stored = [Tensor(w.path, w.axes, w.shape, True) for w in weights]
    times = _times(jaxpr.jaxpr)
    products = [p._replace(times=times[i]) for i, p in enumerate(recorder.products) if times[i]]
    return Record(weights, tuple(dict.fromkeys([*stored, *recorder.tensors])), tuple(products))


class Recorder(Layout):
    """A layout that replicates everything and records each sharding that is asked for."""

    tensors: list[Tensor]
    products: list[Product]
    replicated: str
    """Letters that have no rules here."""

    # By identity, so that jit never reuses a trace of another recorder, which would record nothing.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__(mesh="one:1", rules="")
        object.__setattr__(self, "tensors", [])
        object.__setattr__(self, "products", [])
        object.__setattr__(self, "replicated", "")

    def without(self, *axes: str) -> "Recorder":
        """Returns a recorder, into the same lists, that writes the letters of these axes small."""
        recorder = copy.copy(self)
        letters = "".join(BY_NAME[axis].letter for axis in axes)
        object.__setattr__(recorder, "replicated", self.replicated + letters)
        return recorder

    def note(
        self, axes: str, shape: tuple[int | None, ...], *, stored: bool = False, name: str = ""
    ) -> None:
        """Records a tensor."""
        for letter in self.replicated:
            axes = axes.replace(letter, letter.lower())
        self.tensors.append(Tensor(name or f"{axes} at {_line()}", axes, tuple(shape), stored))

    def einsum(
        self, equation: str, *operands: Array, stored: bool = False, dtype: DTypeLike | None = None
    ) -> Array:
        inputs, out = equation.split("->")
        sizes: dict[str, int] = {}
        for letters, operand in zip(inputs.split(","), operands, strict=True):
            sizes |= dict(zip(letters, operand.shape, strict=True))
        name = f"{equation} at {_line()}"
        self.note(out, tuple(sizes[letter] for letter in out), stored=stored, name=name)
        if len(operands) == 1:
            return super().einsum(equation, *operands, stored=stored, dtype=dtype)
        with jax.named_scope(f"product:{len(self.products)}"):
            self.products.append(Product(name, equation, sizes, 0))
            return super().einsum(equation, *operands, stored=stored, dtype=dtype)

    def reshard(self, x: Array, axes: str, *, stored: bool = False) -> Array:
        self.note(axes, x.shape, stored=stored)
        return super().reshard(x, axes, stored=stored)

    def reshape(self, x: Array, shape: tuple[int, ...], axes: str) -> Array:
        self.note(axes, shape)
        return super().reshape(x, shape, axes)

    def broadcast_like(self, x: Array, axes: str, like: str) -> Array:
        sizes = dict(zip(axes, x.shape, strict=True))
        self.note(like, tuple(sizes.get(letter) for letter in like))
        return super().broadcast_like(x, axes, like)

    def take(self, table: Array, ids: Array, axes: str) -> Array:
        self.note(axes, (*ids.shape, *table.shape[1:]))
        return super().take(table, ids, axes)

    def iota(self, axes: str, shape: tuple[int, ...], letter: str) -> Array:
        self.note(axes, shape)
        return super().iota(axes, shape, letter)

    def random(
        self,
        sample: Callable[..., Array],
        key: Array,
        axes: str,
        shape: tuple[int, ...],
        *,
        stored: bool = False,
    ) -> Array:
        self.note(axes, shape, stored=stored)
        return super().random(sample, key, axes, shape, stored=stored)

    def shard_map(self, function: Callable[..., Array], equation: str) -> Callable[..., Array]:
        mapped, terms = super().shard_map(function, equation), equation.partition("->")[0]

        def noted(*operands: Array) -> Array:
            for term, operand in zip(terms.split(","), operands, strict=True):
                sizes = iter(operand.shape)
                pairs = re.findall(r"\((\w)\)|(\w)", term)
                shape = tuple(None if absent else next(sizes) for absent, _ in pairs)
                self.note("".join(absent or axis for absent, axis in pairs), shape)
            return mapped(*operands)

        return noted


def _line() -> str:
    """Returns the line that calls the recorder, "models/blocks.py:62"."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    path = PurePath(frame.f_code.co_filename)
    relative = path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path
    return f"{relative.as_posix()}:{frame.f_lineno}"


def _times(jaxpr: Jaxpr, times: int = 1) -> Counter[int]:
    """Counts how often each product runs, by the named scopes that the recorder gave them."""
    scopes = (re.search(r"product:(\d+)", str(eqn.source_info.name_stack)) for eqn in jaxpr.eqns)
    counts = Counter({int(scope[1]): times for scope in scopes if scope})
    for eqn in jaxpr.eqns:
        trip_count = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in jaxprs_in_params(eqn.params):
            counts += _times(body, times * trip_count)
    return counts
