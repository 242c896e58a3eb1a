"""What a model is to the trainer and to decoding."""

from typing import Any, Protocol

import jax

from configs.spec import Count, abstract_spec
from layouts.layout import Layout
from models.loss import Criterion, Sums

Array = jax.Array
Params = dict  # a tree of weights whose paths tell their axes
Cache = dict[str, Any]  # what decoding remembers of the tokens so far
Batch = dict[str, Array]
"""inputs_BL, targets_BL, segments_BL, positions_BL; with a source side also its inputs_BM,
segments_BM, positions_BM."""


class Step(Protocol):
    """Feeds tokens to a model that remembers those before."""

    def __call__(
        self, cache: Cache, tokens_BL: Array, positions_BL: Array, seen_BLM: Array, place: Array
    ) -> tuple[Cache, Array]:
        """The cache with these tokens at its places from `place` on, and the logits after each.

        A token stands at its position in the text and sees the places of the cache that seen_BLM
        says; it must see its own.
        """


@abstract_spec
class ModelSpec:
    """Settings of some architecture.  A run file names the one it wants."""

    vocab: Count
    """Rows of the embedding: at least as many as the task's vocabulary has tokens."""

    @property
    def most_places(self) -> int | None:
        """The longest row that the model can read, where there is such a limit."""
        return None

    @property
    def source_rows(self) -> int | None:
        """Rows of the source's own embedding, where it has one."""
        return None

    @property
    def groups(self) -> dict[str, int]:
        """Arrays of a batch whose tokens come in groups of a size of their own."""
        return {}

    @property
    def reads_source(self) -> bool:
        """Whether there is a source side, as in translation."""
        return False

    def model(self, layout: Layout) -> "Model":
        """The model under a layout."""
        raise NotImplementedError


class Decodes(Protocol):
    """What decoding needs of a model.  Frozen and hashable, as all models."""

    @property
    def layout(self) -> Layout: ...

    def start(
        self, params: Any, source: Batch | None, batch_sequences: int, places: int
    ) -> tuple[Step, Cache]:
        """Reads the sources, where there are any, and makes an empty cache with so many places."""


class Model(Decodes, Protocol):
    """A frozen, hashable description of a network: static settings and a layout, no weights."""

    def init(self, key: Array) -> Params:
        """New weights, placed as the layout says."""

    def loss(
        self, params: Params, batch: Batch, criterion: Criterion, key: Array | None = None
    ) -> Sums:
        """Sums over the targets of a batch.  With a key, dropout is on."""

    def token_losses(self, params: Params, batch: Batch) -> Array:
        """Negative log-likelihood of each target, 0 where there is none."""


def step_layout(layout: Layout) -> Layout:
    """The layout of decoding: texts are whole along their length, single tokens cannot be split."""
    return layout.without("length", "memory", "beam", "new_tokens", "candidates")
