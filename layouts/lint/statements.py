"""Finds the statement of the model that JAX refuses, and the tensors that it names."""

import linecache
import re
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from layouts.axes import alphabet
from layouts.cost.collectives import checkout_file
from layouts.layout import Layout
from layouts.shards import mesh_axes


class Statement(NamedTuple):
    """Holds a statement of the model, and the tensors that it names with their letters."""

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
    """Finds the innermost statement of this checkout that names tensors by their letters.

    What fails in a backward pass is looked for in the forward pass, which is the error's cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        with_tensors = [s for s in statements(cause) if s.tensors]
        if with_tensors:
            return with_tensors[-1]
        cause = cause.__cause__
    return next(reversed(list(statements(error))), Statement("the model", "", ()))


def statements(error: BaseException) -> Iterator[Statement]:
    """Yields the statements of this checkout, layouts left out, that led to an error."""
    for frame in traceback.extract_tb(error.__traceback__):
        if (file := checkout_file(frame.filename)) and frame.lineno is not None:
            lines = range(frame.lineno, (frame.end_lineno or frame.lineno) + 1)
            text = " ".join(linecache.getline(frame.filename, n).strip() for n in lines)
            yield Statement(f"{file}:{frame.lineno}", text, named_tensors(text))


def named_tensors(text: str) -> tuple[str, ...]:
    """Returns the names in a line of code that end in axis letters.

    >>> named_tensors("y_BLF = einsum('BLD,DF->BLF', x_BLD, self.wi_DF[...])  # take_along_axis")
    ('y_BLF', 'x_BLD', 'wi_DF')
    """
    names = re.findall(r"\b\w+_[A-Za-z1]+\b", text)
    suffixes = {name: name.rpartition("_")[2] for name in names}
    return tuple(name for name, axes in suffixes.items() if not axes.islower())
