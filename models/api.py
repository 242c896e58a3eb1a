"""Defines what the trainer and decoding expect of a model."""

import abc
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from jax import Array

from configs.errors import UserError
from configs.spec import Count, abstract_spec
from layouts.axes import Axis
from layouts.layout import Layout
from models.dropout import Key
from models.feed_forward.moe.routing import Router
from models.loss import Criterion, LossSums, TokenLosses

STACKS = ("layers", "experts")
Params = dict  # a tree of weights whose paths contain their axes
Cache = dict[str, Any]  # keys, values and positions of the tokens so far, and of the source
Batch = dict[str, Array]
"""inputs_BL, targets_BL, segments_BL, positions_BL; with a source also inputs_BM, segments_BM,
positions_BM.  For images: images_BYXZ, targets_BL, segments_BL."""


class WeightInfo(NamedTuple):
    """Describes a stored weight for optimizers."""

    shape: tuple[int, ...]
    """Without padding."""
    axes: tuple[str, ...]
    """Names of the axes."""
    reads: tuple[str, ...]
    """Axes that its product sums over; none for a bias or a scale."""

    @property
    def stacked(self) -> int:
        """Returns the number of leading axes that stack weights: layers and experts."""
        return len(self.axes) - len([*itertools.dropwhile(STACKS.__contains__, self.axes)])


@abstract_spec
class ModelSpec(abc.ABC):
    """Holds the settings of an architecture; a run file names one of its kinds."""

    axes: ClassVar[tuple[Axis, ...]] = ()
    """Axes that the model adds to the common ones."""

    vocab: Count | None = None
    """Rows of the embedding: at least the size of the task's vocabulary. None: the vocabulary size,
    rounded up to a multiple of 128."""

    @property
    def vocab_rows(self) -> int:
        """Returns the rows of the embedding; raises UserError if no run has derived them."""
        if self.vocab is None:
            raise UserError(f"{type(self).__name__}.vocab = None: no task gives its vocabulary.")
        return self.vocab

    @property
    def declared_axes(self) -> tuple[Axis, ...]:
        """Returns the axes that the model and its parts add to the common ones."""
        return self.axes

    @property
    def max_length(self) -> int | None:
        """Returns the length of the longest row that the model can read; None means no limit."""
        return None

    @property
    def source_vocab(self) -> int | None:
        """Returns the rows of the source's own embedding, if it has one."""
        return None

    @property
    def array_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Returns the shape in a row of each array that the model reads; None means any size."""
        return {}

    @property
    def groups(self) -> dict[str, int]:
        """Returns the tokens in a group, for each array of a batch whose tokens are grouped."""
        return {}

    @property
    def has_encoder(self) -> bool:
        """Returns whether the model has a source side, as in translation."""
        return False

    @property
    def has_dropout(self) -> bool:
        """Returns whether training uses dropout, so that each pass gives another result."""
        return False

    @property
    def drops_tokens(self) -> bool:
        """Returns whether training and evaluation drop tokens over capacity (decoding never)."""
        return False

    @property
    def logit_cap(self) -> float | None:
        """Returns the soft bound of the logits; None means no bound."""
        return None

    @property
    def router(self) -> Router | None:
        """Returns the settings of the router, if the model has experts."""
        return None

    @property
    def adapter(self) -> Any:
        """Returns the settings of adapters, if they are trained instead of the weights."""
        return None

    @property
    def active(self) -> "ModelSpec":
        """Returns the dense model that computes what one token needs: only its chosen experts."""
        return self

    def masked_flops(self, length: int) -> float:
        """Counts the forward FLOPs of a row for pairs of tokens that attention always masks."""
        return 0.0

    def attention_choices(self, layout: Layout, lengths: Mapping[str, int]) -> dict[str, str]:
        """Names what computes each attention in training on the current mesh, and why.

        `lengths` maps names of arrays to the lengths of their rows.
        """
        return {}

    @abc.abstractmethod
    def model(self, layout: Layout) -> "Model":
        """Builds the model for a layout."""


class Decodable(Protocol):
    """Decodes with a cache, in pure functions.  Frozen and hashable, like all models."""

    @property
    def layout(self) -> Layout: ...

    def with_layout(self, layout: Layout) -> "Decodable":
        """Returns the same network under another layout."""

    def prepare(self, params: Any, *, for_one_call: bool = False) -> Any:
        """Returns the weights for `step`: cast, and split by layer if that is faster.

        Weights for one call stay stacked, which compiles faster.  Prepared weights are returned
        unchanged.
        """

    def init_cache(
        self, prepared: Any, source: Batch | None, batch_sequences: int, cache_length: int
    ) -> Cache:
        """Returns a cache with `cache_length` empty slots and, if any, the encoded sources."""

    def step(
        self,
        prepared: Any,
        cache: Cache,
        tokens_BL: Array,
        positions_BL: Array,
        mask_BLM: Array,
        cache_index: Array,
    ) -> tuple[Cache, Array]:
        """Writes tokens to the cache from slot `cache_index` on; returns the logits after each.

        positions_BL are positions in the text.  mask_BLM marks the slots of the cache that each
        token sees, which must include its own.
        """


class Model(Decodable, Protocol):
    """Describes a network, frozen and hashable: static settings and a layout, no weights."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def runs_stages(self) -> bool:
        """Returns whether the loss runs layers in stages under the layout and the current mesh.

        It then accepts several microbatches at once, as the first axis of the batch's arrays and of
        the keys.
        """

    def init(self, key: Array) -> Params:
        """Draws new weights, sharded by the layout."""

    def weights(self) -> Mapping[str, WeightInfo]:
        """Describes the weights, by path."""

    def trains(self, path: str) -> bool:
        """Returns whether training changes the weights at or below a path."""

    def merged(self, params: Params) -> Params:
        """Returns the weights with their adapters added, for a model without adapters."""

    def loss(self, params: Params, batch: Batch, criterion: Criterion, key: Key = None) -> LossSums:
        """Sums the loss over the targets of a batch.  With a key, dropout is on."""

    def update_routers(self, params: Params, loads: Any) -> Params:
        """Returns the weights after updating the biases of routers by the loads of a step."""

    def token_losses(self, params: Params, batch: Batch) -> TokenLosses:
        """Returns the loss of each target, 0 where there is none.

        As in decoding, experts drop no tokens.
        """


def step_layout(layout: Layout) -> Layout:
    """Returns the layout of decoding, which splits no text along its length."""
    return layout.without("layers", "length", "memory", "beam", "new_tokens", "candidates")


@abstract_spec
class Frozen:
    """Selects another model, with the same vocabulary, which is neither trained nor saved."""

    free_on_resume: ClassVar[tuple[str, ...]] = ("model_dir",)

    model_dir: str
    """Model directory of the other model; its latest weights are used."""

    def criterion_fields(self) -> dict[str, Any]:
        """Returns the fields of the criterion that use this model."""
        raise NotImplementedError
