"""Converts weights to and from the tensors of Hugging Face's files."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from configs.errors import UserError
from layouts.axes import axes_of_path
from models.precision import FloatType

FLOATS = ("float32", "bfloat16", "float16")
LISTED = 10
"""The most tensors of a kind that an error lists."""


class TensorInfo(NamedTuple):
    """Describes a tensor of a file."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


Infos = Mapping[str, TensorInfo]  # by name


class Place(NamedTuple):
    """Locates a tensor in the files: an entire one, or a part of one that joins several."""

    tensor: str
    shape: tuple[int, ...]
    """Of the entire tensor."""
    view: tuple[int, ...]
    """Shape in which the tensor is cut, which has an axis along which it joins several."""
    part: tuple[slice, ...] = ()


class ConvertedWeight(NamedTuple):
    """Names a weight of Meshloom and its tensors: one, or one for each layer and expert, in order.

    A name "TENSOR/1/0" is the first part of a tensor that joins several along axis 1 of its view.
    """

    path: str
    names: tuple[str, ...]
    axes: str
    """Axes of each tensor, spelled with the letters of the weight's axes that each merges: "JQK D".
    1 is an axis of size 1.  A comma splits an axis into two axes of the view: "JQ,K D".  Along a
    small letter, the tensor alternates between the halves of the weight's axis."""
    sizes: Mapping[str, int]
    """Sizes of the axes, by letter."""

    @property
    def merged(self) -> str:
        """Returns the weight's axes in the order of the tensors' axes."""
        return re.sub("[ ,1]", "", self.axes).upper()

    @property
    def letters(self) -> str:
        """Returns the weight's axes that each tensor has."""
        return "".join(letter for letter in axes_of_path(self.path) if letter in self.merged)

    def dtype(self, store: FloatType) -> FloatType:
        """Returns the tensors' type for a model of this type; biases of routers stay float32."""
        return "float32" if self.path.endswith("/mlp/bias_E") else store

    @property
    def stack(self) -> str:
        """Returns the axes of layers and of experts, which come first."""
        return axes_of_path(self.path).removesuffix(self.letters)

    @property
    def view(self) -> tuple[int, ...]:
        """Returns the shape of each tensor's view."""
        axes = re.split("[ ,]", self.axes)
        return tuple(math.prod(self._sizes(axis.strip("1").upper())) for axis in axes)

    def folded(self, view: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the tensor that has this view."""
        sizes = iter(view)
        return tuple(math.prod(next(sizes) for _ in axis.split(",")) for axis in self.axes.split())

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the weight's shape; the number of tensors gives the number of layers."""
        within = self._sizes(self.stack[1:] + self.letters)
        return (len(self.names_by_layer), *within) if self.stack else within

    @property
    def names_by_layer(self) -> list[tuple[str, ...]]:
        """Returns the names of each layer's tensors; an unstacked weight counts as one layer."""
        count = math.prod(self._sizes(self.stack[1:]))
        return [self.names[i : i + count] for i in range(0, len(self.names), count)]

    def from_tensors(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """Converts the tensors of a layer to its part of the weight."""
        order = [self.merged.index(letter) for letter in self.letters]
        whole = [tensor.reshape(self._sizes(self.merged)) for tensor in tensors]
        parts = [self._reordered(tensor, (-1, 2)).transpose(order) for tensor in whole]
        return np.stack(parts).reshape(self._sizes(self.stack[1:] + self.letters))

    def to_tensors(self, part: np.ndarray) -> list[np.ndarray]:
        """Converts a layer's part of the weight to its tensors."""
        order = [self.letters.index(letter) for letter in self.merged]
        whole = part.reshape(-1, *self._sizes(self.letters))
        tensors = [self._reordered(one.transpose(order), (2, -1)) for one in whole]
        return [np.ascontiguousarray(one).reshape(self.folded(self.view)) for one in tensors]

    def from_tensors_by_name(
        self, read: Callable[[str], np.ndarray], layers: slice = slice(None)
    ) -> np.ndarray:
        """Reads tensors by name and converts them to the weight, or to some of its layers."""
        parts = [self.from_tensors([*map(read, names)]) for names in self.names_by_layer[layers]]
        return np.stack(parts) if self.stack else parts[0]

    def to_tensors_by_name(self, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Converts the weight to its tensors, one at a time."""
        parts = weight if self.stack else weight[None]
        tensors = (tensor for part in parts for tensor in self.to_tensors(part))
        return zip(self.names, tensors, strict=True)

    def _reordered(self, tensor: np.ndarray, pairs: tuple[int, int]) -> np.ndarray:
        """Transposes each axis with a lowercase letter, reshaped to a matrix of this shape."""
        for axis, letter in enumerate(re.sub("[ ,1]", "", self.axes)):
            if letter.islower():
                shape = tensor.shape
                split = tensor.reshape(*shape[:axis], *pairs, *shape[axis + 1 :])
                tensor = split.swapaxes(axis, axis + 1).reshape(shape)
        return tensor

    def _sizes(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in letters)


def places_of(weights: Iterable[ConvertedWeight]) -> dict[str, Place]:
    """Returns the place of each tensor of the weights by name; parts of a tensor are in order."""
    by_name = {name: weight for weight in weights for name in weight.names}
    parts, ends = dict[str, tuple[slice, ...]](), dict[str, int]()
    for name, weight in by_name.items():
        tensor, *joined = name.split("/")
        if joined:
            axis, start = int(joined[0]), ends.get(tensor, 0)
            ends[tensor] = start + weight.view[axis]
            parts[name] = (*[slice(None)] * axis, slice(start, ends[tensor]))
    places = dict[str, Place]()
    for name, weight in by_name.items():
        tensor, view, part = name.partition("/")[0], [*weight.view], parts.get(name, ())
        if part:
            view[len(part) - 1] = ends[tensor]
        places[name] = Place(tensor, weight.folded(view), tuple(view), part)
    return places


def common_type(types: Iterable[str]) -> FloatType:
    """Returns the type of all tensors, or float32 if they differ."""
    [store, *others] = {*types} or {"float32"}
    return cast(FloatType, store if store in FLOATS and not others else "float32")


def check_tensors(
    weights: Iterable[ConvertedWeight], tensors: Infos, source: object, model: str
) -> None:
    """Rejects tensors that are missing or unexpected, or have another shape or no float type."""
    shapes = {place.tensor: place.shape for place in places_of(weights).values()}
    known = {name: tensor for name, tensor in tensors.items() if name in shapes}
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [name for name in tensors if name not in shapes],
        "of another shape": [
            f"{name}: found {tensor.shape}, legal: {shapes[name]}"
            for name, tensor in known.items()
            if tensor.shape != shapes[name]
        ],
        "of another type": [
            f"{name}: found {tensor.dtype}, legal: {', '.join(FLOATS)}"
            for name, tensor in known.items()
            if tensor.dtype not in FLOATS
        ],
    }
    if not any(problems.values()):
        return
    lines = [f"{source}: its tensors do not match a {model} with the settings in config.json."]
    for kind, names in problems.items():
        if names:
            lines += [f"  {len(names)} {kind}:", *(f"    {name}" for name in names[:LISTED])]
            lines += [f"    ... and {len(names) - LISTED} more"] * (len(names) > LISTED)
    raise UserError("\n".join(lines))
