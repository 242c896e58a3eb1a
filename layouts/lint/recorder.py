"""Every tensor and product of a model, seen in a trace that makes none of them."""

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

from layouts.axes import axes_of_path
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
    """One placement that the model asks for."""

    name: str  # a weight's path, or the letters or equation and the line that asks
    axes: str
    shape: tuple[int | None, ...]  # None where the tensor only stands beside one with that axis
    stored: bool


class Product(NamedTuple):
    """One einsum of several operands."""

    name: str
    equation: str
    sizes: dict[str, int]  # by letter
    times: int  # how often it runs: a scan over layers counts each

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes.values()) * self.times


@dataclasses.dataclass(frozen=True)
class Record:
    """What one trace of a model made."""

    weights: tuple[Weight, ...]
    tensors: tuple[Tensor, ...]
    """The weights, then all else."""
    products: tuple[Product, ...]

    @property
    def flops(self) -> int:
        """FLOPs of all products that were traced, once each: of the forward pass, if only that."""
        return sum(product.flops for product in self.products)


def record(trace: Callable[[Layout], Any]) -> Record:
    """Records what `trace` makes: given a layout, it makes weights, runs on them, returns them.

    Nothing is allocated or compiled, and no device or mesh is needed.

    >>> def trace(layout):
    ...     wi_DF = layout.random(jax.random.normal, jax.random.key(0), "DF", (10, 14), stored=True)
    ...     x_BD = layout.iota("BD", (4, 10), "D").astype(jnp.float32)
    ...     layout.einsum("BD,DF->BF", x_BD, wi_DF)
    ...     return {"mlp": {"wi_DF": wi_DF}}
    >>> seen = record(trace)
    >>> seen.weights[0].path, [product.equation for product in seen.products], seen.flops
    ('mlp/wi_DF', ['BD,DF->BF'], 1120)
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
    """A layout that holds everything whole and notes who asks for what."""

    tensors: list[Tensor]
    products: list[Product]

    # By identity, so that no trace in a cache keeps a tensor out of the record.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self) -> None:
        super().__init__(mesh="one:1", rules="")
        object.__setattr__(self, "tensors", [])
        object.__setattr__(self, "products", [])

    def note(
        self, axes: str, shape: tuple[int | None, ...], *, stored: bool = False, name: str = ""
    ) -> None:
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


def _line() -> str:
    """The nearest line outside this file that is being run: "models/blocks.py:62"."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    path = PurePath(frame.f_code.co_filename)
    inside = path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path
    return f"{inside.as_posix()}:{frame.f_lineno}"


def _times(jaxpr: Jaxpr, times: int = 1) -> Counter[int]:
    """How often each noted product runs, read off the scopes that the recorder gave them."""
    scopes = (re.search(r"product:(\d+)", str(eqn.source_info.name_stack)) for eqn in jaxpr.eqns)
    found = Counter({int(scope[1]): times for scope in scopes if scope})
    for eqn in jaxpr.eqns:
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            found += _times(inner, times * turns)
    return found
