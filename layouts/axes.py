"""Lists the letter and the name of each tensor axis, in the only table of them."""

from typing import NamedTuple


class Axis(NamedTuple):
    """Describes an axis that tensors may have."""

    letter: str
    name: str
    meaning: str
    meets: str = (
        ""  # letters with which it may share a mesh axis in one tensor; the leftmost gets it
    )
    pads: bool = False  # whether a rule may pad it, "batch:data+"


AXES = (
    Axis("A", "microbatches", "slices of the batch whose gradients are added up"),
    Axis("B", "batch", "sequences", pads=True),
    Axis("L", "length", "query or target positions", meets="M"),
    Axis("M", "memory", "key/value or source positions", meets="L"),
    Axis("D", "d_model", "residual width"),
    Axis("F", "d_ff", "feed-forward width"),
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
    Axis("R", "buckets", "relative positions"),
    Axis("V", "vocab", "tokens of the vocabulary", pads=True),
    Axis("Y", "height", "rows of an image, from the top", pads=True),
    Axis("X", "width", "columns of an image, from the left", pads=True),
    Axis("Z", "channels", "colours of a pixel"),
    Axis("O", "kernel_height", "rows of a convolution's kernel"),
    Axis("P", "kernel_width", "columns of a convolution's kernel"),
)

BY_LETTER = {axis.letter: axis for axis in AXES}
BY_NAME = {axis.name: axis for axis in AXES}
# Mesh-TensorFlow's names for axes that have another name here.
SYNONYMS = {"memory_length": "memory", "outer_batch": "batch"}
# Mesh-TensorFlow's axes that no tensor here has; a rule for one of them changes nothing.
ABSENT = {"ensemble": "several models in one run"}


def letters_of(name: str) -> str:
    """Returns the letters that a suffix adds: "DF" for "wi_DF", "" for "attention".

    >>> letters_of("wi_DF"), letters_of("layers_N"), letters_of("attention")
    ('DF', 'N', '')
    """
    _, _, suffix = name.rpartition("_")
    return suffix if suffix and all(letter in BY_LETTER for letter in suffix) else ""


def axes_of_path(path: str) -> str:
    """Returns the axes of a weight from its path.

    >>> axes_of_path("decoder/layers_N/mlp/wi_DF")
    'NDF'
    """
    return "".join(letters_of(part) for part in path.split("/"))
