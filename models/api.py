"""What a model is to the trainer and to decoding."""

from typing import Protocol

import jax

from configs.spec import Count, spec
from layouts.layout import Layout
from models.loss import Criterion, Sums

Array = jax.Array
Params = dict  # a tree of weights whose paths tell their axes
Cache = dict[str, Array]  # what decoding remembers of the tokens so far
Batch = dict[str, Array]  # inputs_BL, targets_BL, segments_BL, positions_BL


@spec
class ModelSpec:
    """Settings of some architecture.  A run file names the one it wants."""

    vocab: Count
    """Rows of the embedding: at least as many as the task's vocabulary has tokens."""

    @property
    def most_places(self) -> int | None:
        """The longest row that the model can read, where there is such a limit."""
        return None

    def model(self, layout: Layout) -> "Model":
        """The model under a layout."""
        raise NotImplementedError


class Model(Protocol):
    """A frozen, hashable description of a network: static settings and a layout, no weights."""

    @property
    def layout(self) -> Layout: ...

    def init(self, key: Array) -> Params:
        """New weights, placed as the layout says."""

    def loss(
        self, params: Params, batch: Batch, criterion: Criterion, key: Array | None = None
    ) -> Sums:
        """Sums over the targets of a batch.  With a key, dropout is on."""

    def token_losses(self, params: Params, batch: Batch) -> Array:
        """Negative log-likelihood of each target, 0 where there is none."""

    def start(self, params: Params, batch_sequences: int, places: int) -> Cache:
        """An empty cache with this many places a row."""

    def step(
        self, params: Params, cache: Cache, tokens_BL: Array, positions_BL: Array
    ) -> tuple[Cache, Array]:
        """Logits after each of these tokens, which stand at these places; the cache with them."""
