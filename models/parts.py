"""Defines the kinds of parts of a Transformer, and the block that joins them.

A part is a spec with its settings, their checks, and `build`, which makes the network of the part.
To add a part, write a module with such a spec, and import it in a run file.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from flax import nnx
from jax import Array

from configs.errors import UserError
from configs.spec import Positive, abstract_spec, spec
from layouts.axes import Axis
from layouts.layout import Layout
from models.api import Cache
from models.attention.bias import Bias
from models.attention.context import AttentionContext
from models.attention.flash import Call, Choice
from models.dropout import Key
from models.feed_forward.moe.routing import Load, Router
from models.initializers import Weights
from models.sizes import Sizes

NormPlaces = Literal["before", "after", "both", "sum"]


@abstract_spec
class Part:
    """Holds the settings of a part of a Transformer."""

    axes: ClassVar[tuple[Axis, ...]] = ()
    """Axes that the part adds to the common ones; inside the part their letters come first."""
    free_on_resume: ClassVar[tuple[str, ...]] = ()
    """Settings that may change while a model trains, since they leave its results as they are."""

    def check(self, sizes: Sizes, block: "BlockParts", *, causal: bool) -> None:
        """Raises `UserError` if the part does not fit the decoder (if `causal`) or the encoder of a
        model of these sizes."""


NormLayer = Callable[[Array], Array]
"""Normalizes hidden states x_BLD."""
HeadNormLayer = Callable[[Array, str], Array]
"""Normalizes each head of queries or keys, given their axes."""
BiasLayer = Callable[[Array, bool], Bias]
"""Computes a bias of logits from query position - key position, with axes "LM" or "BLM", and from
whether attention is causal."""


@abstract_spec
class Norm(Part, abc.ABC):
    """Normalizes the input of attention and feed-forward layers, and the output of a stack."""

    @abc.abstractmethod
    def build(self, layout: Layout, weights: Weights) -> NormLayer:
        """Makes a norm of the residual width."""

    def build_for_heads(self, layout: Layout, weights: Weights, axis: str = "K") -> HeadNormLayer:
        """Makes a norm of heads along their last axis, which has this letter, or along several."""
        raise UserError(
            f"@{type(self).__name__}() does not normalize heads (build_for_heads).  Legal: another "
            "norm of the model or block, or heads without one (MultiHead.qk_norm = False)."
        )


@abstract_spec
class Positions(Part):
    """Encodes positions by any of three hooks: on embeddings, on queries and keys, on logits."""

    changes_embeddings: ClassVar[bool] = False
    """Whether the encoding is that of the whole model, not of a block."""
    adds_bias: ClassVar[bool] = False
    """Whether it adds a bias to the logits."""

    @property
    def shares_bias(self) -> bool:
        """Returns whether all layers of a stack share one bias."""
        return False

    def max_length(self, sizes: Sizes) -> int | None:
        """Returns the length of the longest row that can be encoded; None means no limit."""
        return None

    def build_table(self, weights: Weights) -> nnx.Param | None:
        """Makes the table with axes "LD" that `embed` reads, if it needs one."""
        return None

    def build_source_table(self, weights: Weights) -> nnx.Param | None:
        """Makes the table of the encoder, if it does not share the decoder's."""
        return None

    def embed(
        self, layout: Layout, x_BLD: Array, positions_BL: Array, table_LD: Array | None,
        scale: float,
    ) -> Array:  # fmt: skip
        """Scales embeddings, and adds positions to them."""
        return x_BLD * scale

    def prepare(self, positions_BL: Array, width: int) -> Any:
        """Computes what `rotate` needs, for heads of this width, once for all layers."""
        return None

    def rotate(self, layout: Layout, x: Array, axes: str, prepared: Any) -> Array:
        """Rotates queries or keys, whose last axes are positions and the width of a head."""
        return x

    def build_bias(self, layout: Layout, weights: Weights) -> BiasLayer | None:
        """Makes the layer that computes the bias of the logits, if the encoding has one."""
        return None


class AttentionLayer(Protocol):
    """Attends, in a row or to a source."""

    def __call__(
        self, x_BLD: Array, context: AttentionContext, cache: Cache | None = None, key: Key = None
    ) -> tuple[Array, Cache | None]:
        """Attends as the context defines, or to the cache after writing the row to it."""

    def init_cache(self, rows: int, length: int, memory_BMD: Array | None) -> Cache:
        """Returns the arrays that decoding keeps, which `layer_cache` reads and writes.

        Their names end in their axes, of which the first is B.  Names that start with "source" are
        for arrays of the source; in all other arrays, M indexes the tokens of a row.
        """


@abstract_spec
class Attention(Part, abc.ABC):
    """Moves information between the tokens of a row, or from a source."""

    @property
    def has_dropout(self) -> bool:
        return False

    @property
    def window(self) -> int | None:
        """Returns how many tokens a token sees: itself and those right before; None means all."""
        return None

    def position_width(self, sizes: Sizes) -> int:
        """Returns how many columns of a head positions rotate."""
        return sizes.d_kv

    def pair_flops(self, sizes: Sizes) -> int:
        """Counts the FLOPs of a pair of query and key: of the logit, and of the weighted value."""
        return 2 * sizes.heads * (sizes.d_kv + sizes.d_kv)

    def kernel(self, call: Call) -> Choice:
        """Names the kernel that computes this call on the current mesh, or why none does."""
        return Choice(None, f"there is no kernel for @{type(self).__name__}()")

    @abc.abstractmethod
    def build(
        self, parts: "BlockParts", sizes: Sizes, layout: Layout, weights: Weights
    ) -> AttentionLayer:
        """Makes self-attention, with the positions and the norm of its block."""

    def build_cross(
        self, parts: "BlockParts", sizes: Sizes, layout: Layout, weights: Weights
    ) -> AttentionLayer:
        """Makes attention to a source."""
        raise UserError(
            f"@{type(self).__name__}() does not attend to a source (build_cross).  Legal: "
            "Block.source_attention = @MultiHead()."
        )


class FeedForwardLayer(Protocol):
    """Transforms each token separately; also returns the load of experts, if there are any."""

    def __call__(
        self, x_BLD: Array, segments_BL: Array | None, key: Key = None, *, drop_tokens: bool = True
    ) -> tuple[Array, Load | None]: ...


@abstract_spec
class FeedForward(Part, abc.ABC):
    """Transforms each token alone."""

    @property
    def router(self) -> Router | None:
        """Returns the router that chooses the experts of each token, if there are any."""
        return None

    @property
    def drops_tokens(self) -> bool:
        """Returns whether training drops tokens over the capacity of experts."""
        return False

    @property
    def group_tokens(self) -> int | None:
        """Returns the number of tokens in a group; None if they are not grouped."""
        return None

    def dropout_rate(self, sizes: Sizes) -> float:
        """Returns the rate of dropout inside the layer."""
        return 0.0

    def active(self, sizes: Sizes) -> "FeedForward":
        """Returns a dense layer that computes what this layer computes for each token."""
        return self

    @abc.abstractmethod
    def build(self, sizes: Sizes, layout: Layout, weights: Weights) -> FeedForwardLayer:
        """Makes the layer."""


@spec
class Block(Part):
    """Combines parts into one layer.  Parts that are None come from the Transformer."""

    attention: Attention | None = None
    """Attention within a row. None: Transformer.attention."""
    source_attention: Attention | None = None
    """Cross-attention of a decoder. None: like the attention within a row."""
    positions: Positions | None = None
    """How attention encodes positions. None: Transformer.positions."""
    feed_forward: FeedForward | None = None
    """Feed-forward layer or experts. None: Transformer.feed_forward."""
    norm: Norm | None = None
    """Norm at attention and feed-forward layers (see norm_places). None: Transformer.norm."""
    norm_places: NormPlaces = "before"
    """Where the norms are: "before" attention and feed-forward layers; "after" them, on their
    outputs, as in OLMo 2; "both", as in Gemma 2; or on the "sum" with the residual, as in Vaswani
    et al. 2017. A stack that ends in a "sum" block has no final norm."""
    residual_scale: Positive = 1.0
    """Multiplies what attention and feed-forward layers add to the residual, as in Granite."""


class BlockParts(NamedTuple):
    """Holds the parts of a block; those that it does not name are the Transformer's."""

    attention: Attention
    source_attention: Attention
    positions: Positions
    feed_forward: FeedForward
    norm: Norm
    norm_places: NormPlaces = "before"
    residual_scale: float = 1.0

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.attention, self.source_attention, self.positions, self.feed_forward, self.norm
