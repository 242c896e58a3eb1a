"""Records every tensor and product of a model in a trace, without allocating any.

The trace uses a mesh with one mesh axis per tensor axis, of the same name.  Its layout splits each
axis over that mesh axis, so the type of a tensor shows its axes.
"""

import dataclasses
import linecache
import math
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from configs.errors import UserError
from configs.imports import CHECKOUT
from layouts.axes import Alphabet, Axis, alphabet, axes_of_path, leaf_path
from layouts.cost.collectives import checkout_file
from layouts.cost.dataflow import CONVOLUTION, executed_equations, line_of, places, product_flops
from layouts.layout import Layout
from layouts.mesh import abstract_mesh
from layouts.shards import mesh_axes


class Statement(NamedTuple):
    """Holds a statement of the model, and the tensors with axis letters that it names."""

    line: str
    text: str
    tensors: tuple[str, ...]

    @property
    def letters(self) -> set[str]:
        return {letter for name in self.tensors for letter in name.rpartition("_")[2]}

    def describe(self, layout: Layout) -> str:
        """Describes which axes of the tensors are split: "x_BLD: batch over data"."""
        lines, by_letter = [], alphabet(layout.declared_axes).by_letter
        for name in self.tensors:
            axes = [axis for axis in name.rpartition("_")[2] if axis in by_letter]
            placed = zip(axes, layout.place("".join(axes)), strict=True)
            split = [
                f"{by_letter[axis].name} over {' and '.join(mesh_axes(entry))}"
                for axis, entry in placed
                if entry
            ]
            if split:
                lines.append(f"{name} has {', '.join(split)}")
        return f"{'; '.join(lines)}.\n" if lines else "\n"


def find_statement(error: BaseException) -> Statement:
    """Finds the innermost statement of this checkout that names tensors with axis letters.

    For an error in a backward pass, searches the forward pass, which is the error's cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        with_tensors = [s for s in statements(cause) if s.tensors]
        if with_tensors:
            return with_tensors[-1]
        cause = cause.__cause__
    return next(reversed(list(statements(error))), Statement("the model", "", ()))


def statements(error: BaseException) -> Iterator[Statement]:
    """Yields the statements that led to an error, except those of layouts/."""
    for frame in traceback.extract_tb(error.__traceback__):
        if (file := code_file(frame.filename)) and frame.lineno is not None:
            lines = range(frame.lineno, (frame.end_lineno or frame.lineno) + 1)
            text = " ".join(linecache.getline(frame.filename, n).strip() for n in lines)
            yield Statement(f"{file}:{frame.lineno}", text, named_tensors(text))


def code_file(path: str) -> str:
    """Returns the name of a file of a user, or of this checkout except layouts/; else ""."""
    others = path.startswith((str(CHECKOUT), sysconfig.get_path("stdlib"), "<"))
    return checkout_file(path) or ("" if others or "site-packages" in path else path)


def named_tensors(text: str) -> tuple[str, ...]:
    """Returns the names in a line of code that end in axis letters."""
    names = re.findall(r"\b\w+_[A-Za-z1]+\b", text)
    suffixes = {name: name.rpartition("_")[2] for name in names}
    return tuple(name for name, axes in suffixes.items() if not axes.islower())


STORED = "*"  # marks the mesh axes of stored tensors
LAYERS = "layers"  # the axis, and the scope of what each layer of a stack computes
LAYOUTS = str(Path(__file__).parents[1])
SPARE_LETTERS = "ΓΔΘΛΞΠΣΦΨΩ"
"""For declared axes whose letter is taken by another axis of the model."""


class Weight(NamedTuple):
    """Describes one stored array."""

    path: str
    axes: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    declared_axes: tuple[Axis, ...] = ()
    """Axes that the model's parts declare, which define its letters."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensor(NamedTuple):
    """Describes one tensor that the model makes."""

    name: str
    """A weight's path, or the letters or equation and the line of the model."""
    axes: str
    """Letters; "_" is an axis that no layout splits."""
    shape: tuple[int, ...]
    stored: bool
    """Whether the rules for stored weights apply."""


class Product(NamedTuple):
    """Describes one product of two tensors."""

    name: str
    equation: str
    flops: int
    """Summed over all iterations of the scans around it."""
    in_layers: bool = False
    """Whether each layer of a stack computes it with its own weights."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Holds the weights, tensors and products of one trace of a model."""

    weights: tuple[Weight, ...]
    tensors: tuple[Tensor, ...]
    """The weights, then all other tensors."""
    products: tuple[Product, ...]
    declared_axes: tuple[Axis, ...] = ()
    """Axes that the model's parts declare, each with a unique letter."""

    @property
    def axes(self) -> Alphabet:
        """Returns the axes by the letters of weights, tensors and products."""
        return alphabet(self.declared_axes)

    @property
    def flops(self) -> int:
        """Adds up the FLOPs of all products of the trace."""
        return sum(product.flops for product in self.products)


def record(trace: Callable[[Layout], Any], declared: Iterable[Axis] = ()) -> Record:
    """Records the function `trace` of a layout, which makes weights, uses them and returns them.

    `declared` holds the axes that parts of the model add to the common ones.  Nothing is allocated
    or compiled, and no device is needed.
    """
    axes = with_unique_letters(declared)
    jaxpr, tree = trace_of_axes(trace, axes)
    paths = [leaf_path(path) for path, _ in jax.tree.leaves_with_path(tree)]
    weights = []
    for path, out in zip(paths, jaxpr.jaxpr.outvars, strict=True):
        # A type lacks the axes that JAX cannot split in this model; the path has them.
        of_type, of_path = letters_of_type(out.aval, axes), axes_of_path(path)
        if len(of_type) != len(of_path):
            raise UserError(
                f"weight {path}: found {len(of_type)} axes, and a name for {len(of_path)}.  End "
                "its name with the letters of its axes, as wi_DF."
            )
        pairs = zip(of_type, of_path, strict=True)
        letters = "".join(path_letter if of == "_" else of for of, path_letter in pairs)
        weights.append(Weight(path, letters, out.aval.shape, out.aval.dtype, axes))
    stored = [Tensor(w.path, w.axes, w.shape, True) for w in weights]
    tensors, products = read_trace(jaxpr.jaxpr, axes)
    return Record(tuple(weights), tuple(dict.fromkeys([*stored, *tensors])), tuple(products), axes)


def with_unique_letters(declared: Iterable[Axis]) -> tuple[Axis, ...]:
    """Returns the declared axes that are not common ones, each with a unique letter."""
    common, axes = alphabet(), list[Axis]()
    for axis in dict.fromkeys(declared):
        if axis.name in common.by_name or axis.name in [other.name for other in axes]:
            continue
        taken = {*common.by_letter, *(other.letter for other in axes)}
        letter = next(letter for letter in axis.letter + SPARE_LETTERS if letter not in taken)
        axes.append(axis._replace(letter=letter))
    return tuple(axes)


def trace_of_axes(trace: Callable[[Layout], Any], axes: tuple[Axis, ...]) -> tuple[Any, Any]:
    """Traces under the layout that splits each axis; returns the jaxpr, and shapes of the result.

    Axes that JAX cannot split in this model, on any mesh, are not split.
    """
    names = [axis.name for axis in alphabet(axes).by_letter.values()]

    def split(names: Sequence[str]) -> tuple[Any, Any]:
        """Traces with these axes split, each over the mesh axis of the same name."""
        layout = Layout(
            mesh="",
            rules=";".join(f"{name}:{name}" for name in names),
            param_rules=";".join(f"{name}:{name}{STORED}" for name in names),
        )
        sizes = {name + mark: 1 for name in names for mark in ("", STORED)}
        with jax.sharding.use_abstract_mesh(abstract_mesh(sizes or {"one": 1})):
            return jax.make_jaxpr(lambda: trace(layout), return_shape=True)()

    def can_split(names: Sequence[str]) -> bool:
        return error_of(split, names) is None

    try:
        return split(names)
    except UserError:
        raise
    except Exception as error:
        if not can_split([]):
            raise  # a bug that no axis causes
        letters = find_statement(error).letters
        named = {axis.name for axis in alphabet(axes).by_letter.values() if axis.letter in letters}
        for name in sorted(names, key=lambda name: name not in named):
            if can_split(rest := [other for other in names if other != name]):
                return split(rest)
        kept: list[str] = []
        for name in names:
            kept += [name] if can_split([*kept, name]) else []
        return split(kept)


def error_of(trace: Callable[..., object], *arguments: object) -> Exception | None:
    """Returns the exception of a trace, or None; lets UserErrors pass, which explain themselves."""
    try:
        trace(*arguments)
    except UserError:
        raise
    except Exception as error:  # JAX has no common type for what it cannot shard
        return error
    return None


def read_trace(jaxpr: Jaxpr, declared: tuple[Axis, ...]) -> tuple[list[Tensor], list[Product]]:
    """Returns the tensors and products of a trace, from the types and lines of its equations."""
    tensors, products = [], []
    for eqn, times in executed_equations(jaxpr):
        line, made_by_layouts = line_of(eqn), is_of_layouts(eqn)
        for out in eqn.outvars:
            axes, flops = letters_of_type(out.aval, declared), flops_of(eqn)
            name = f"{axes} at {line}"
            if flops is not None:
                left, right = (letters_of_operand(v.aval, declared) for v in eqn.invars)
                equation = f"{left},{right}->{axes}"
                name = f"{equation} at {line}"
                in_layers = LAYERS in str(eqn.source_info.name_stack).split("/")
                products.append(Product(name, equation, times * flops, in_layers))
            if axes.strip("_") and not made_by_layouts:
                is_stored = any(str(entry).endswith(STORED) for entry in places(out.aval))
                tensors.append(Tensor(name, axes, out.aval.shape, is_stored))
    return tensors, products


def flops_of(eqn: Any) -> int | None:
    """Returns the FLOPs of a product whose operands have letters; None for other equations.

    A convolution is the body of a `shard_map`, inside which types have no letters.
    """
    if eqn.primitive.name == "dot_general":
        return product_flops(eqn)
    body = eqn.params["jaxpr"].eqns if eqn.primitive.name == "shard_map" else ()
    return next((product_flops(e) for e in body if e.primitive.name == CONVOLUTION), None)


def letters_of_type(aval: Any, declared: tuple[Axis, ...]) -> str:
    """Returns the letters of a tensor from its type."""
    by_name = alphabet(declared).by_name
    names = (None if entry is None else mesh_axes(entry)[0] for entry in places(aval))
    return "".join("_" if name is None else by_name[name.rstrip(STORED)].letter for name in names)


def letters_of_operand(aval: Any, declared: tuple[Axis, ...]) -> str:
    """Returns the letters of a tensor, and those over which it varies inside a `shard_map`."""
    by_name = alphabet(declared).by_name
    varying = {by_name[name.rstrip(STORED)].letter for name in aval.manual_axis_type.varying}
    return letters_of_type(aval, declared) + "".join(sorted(varying))


def is_of_layouts(eqn: Any) -> bool:
    """Returns whether an equation comes from a function of layouts/ that chooses its sharding."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    for frame in frames:
        folder, _, name = frame.file_name.rpartition("/")
        if folder == LAYOUTS:
            return name not in ("layout.py", "einsum.py")
        if checkout_file(frame.file_name):
            return False
    return False
