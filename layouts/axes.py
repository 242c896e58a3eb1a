"""Lists the tensor axes that all models share; parts of a model may declare others."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from configs.errors import UserError


class Axis(NamedTuple):
    """Describes an axis that tensors may have."""

    letter: str
    name: str
    meaning: str = ""
    meets: str = ""
    """Letters of axes that may want the same mesh axis in one tensor; the leftmost gets it."""
    pads: bool = False
    """Whether a rule may pad it, as "batch:data+" does."""
    slides: str = ""
    """For an axis of a kernel: the letter of the image axis that it slides along."""


AXES = (
    Axis("A", "microbatches", "slices of the batch whose gradients are added up"),
    Axis("B", "batch", "sequences", pads=True),
    Axis("L", "length", "query or target positions", meets="M", pads=True),
    Axis("M", "memory", "key/value or source positions", meets="L", pads=True),
    Axis("D", "d_model", "residual width"),
    Axis("F", "d_ff", "feed-forward width", pads=True),
    Axis("H", "heads", "query heads = kv_heads x queries", pads=True),
    Axis("J", "kv_heads", "key/value heads", pads=True),
    Axis("Q", "queries", "query heads per key/value head"),
    Axis("K", "d_kv", "width of one head"),
    Axis("E", "experts", "feed-forward experts", meets="G", pads=True),
    Axis("G", "groups", "token groups", meets="E"),
    Axis("S", "group_tokens", "position inside a group"),
    Axis("C", "capacity", "slots per expert"),
    Axis("I", "choices", "experts of a token"),
    Axis("N", "layers", "scan stack"),
    Axis("W", "beam", "hypotheses"),
    Axis("T", "new_tokens", "tokens that decoding adds"),
    Axis("U", "candidates", "tokens that may continue a hypothesis"),
    Axis("V", "vocab", "tokens of the vocabulary", pads=True),
    Axis("Y", "height", "rows of an image, from the top", pads=True),
    Axis("X", "width", "columns of an image, from the left", pads=True),
    Axis("O", "kernel_height", "rows of a convolution's kernel", slides="Y"),
    Axis("P", "kernel_width", "columns of a convolution's kernel", slides="X"),
)

ROW_AXES = ("length", "memory")
"""Axes along the rows of a batch; they are padded together."""

# Mesh-TensorFlow's names for axes that have another name here.
SYNONYMS = {"memory_length": "memory", "outer_batch": "batch"}
# Axes of Mesh-TensorFlow that no tensor here has; rules for them have no effect.
ABSENT = {"ensemble": "several models in one run"}


class Alphabet(NamedTuple):
    """Maps the letters of tensors and the names in rules to axes."""

    by_letter: Mapping[str, Axis]
    by_name: Mapping[str, Axis]


@functools.cache
def alphabet(declared: tuple[Axis, ...] = ()) -> Alphabet:
    """Returns the common axes and the axes that a part declares, whose letters take precedence.

    Raises `UserError` for an invalid or ambiguous axis.
    """
    common = {axis.name: axis.letter for axis in AXES}
    for axis in declared:
        if not (len(axis.letter) == 1 and axis.letter.isalpha() and axis.letter.isupper()):
            raise UserError(f"{axis}: letter {axis.letter!r}.  Legal: one capital letter.")
        if not axis.name.isidentifier() or axis.name in (*SYNONYMS, *ABSENT):
            raise UserError(f"{axis}: name {axis.name!r}.  Legal: another name, without spaces.")
        if axis.letter != common.get(axis.name, axis.letter):
            raise UserError(
                f"{axis}: everywhere else {axis.name} has the letter {common[axis.name]}.  Use "
                "that letter, or another name."
            )
    for key, of in ((0, "letter"), (1, "name")):
        if len({axis[key] for axis in declared}) < len(declared):
            raise UserError(f"{declared}: two axes have one {of}.  Use another.")
    axes = (*AXES, *declared)
    return Alphabet({axis.letter: axis for axis in axes}, {axis.name: axis for axis in axes})


def check_distinct(axes: str) -> None:
    """Raises ValueError if an axis occurs twice in a tensor (Mesh-TensorFlow, 8.5)."""
    for axis in axes:
        if axis.isalpha() and axes.count(axis) > 1:
            raise ValueError(f"{axes}: axis {axis} occurs twice.  Give one of them another letter.")


def letters_of(name: str) -> str:
    """Returns the axis letters that end a name: "DF" for "wi_DF", "" for "attention"."""
    _, _, suffix = name.rpartition("_")
    return suffix if suffix.isalpha() and suffix.isupper() else ""


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Joins a leaf's keys in a tree into a path such as "decoder/layers_N/mlp/wi_DF"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def axes_of_path(path: str) -> str:
    """Returns the axis letters of a weight, given its path."""
    return "".join(letters_of(part) for part in path.split("/"))
