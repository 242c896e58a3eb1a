"""Holds the settings of a Transformer, separate from its construction."""

from typing import ClassVar, Literal, TypeVar

import jax

from configs.errors import UserError
from configs.spec import Count, CountOrZero, Fraction, Positive, abstract_spec, spec
from layouts.axes import Axis
from models.api import ModelSpec
from models.moe.routing import Router, Top2
from models.rope import RopeScaling

Tree = TypeVar("Tree")
Activation = Literal["relu", "gelu", "silu"]
AttentionKind = Literal["auto", "plain", "flash"]
AttentionBiases = Literal["none", "qkv", "all"]
BlockKind = Literal["dense", "moe"]
Dispatch = Literal["einsum", "gather", "dropless"]
FloatType = Literal["float32", "bfloat16", "float16", "float64"]
Remat = Literal["none", "dots", "full"]
SavedProduct = Literal["query_proj", "key_proj", "value_proj", "out_proj", "mlpwi"]
BUCKETS = Axis("R", "buckets", "distances of relative positions")
Positions = Literal["learned", "sinusoidal", "relative", "rotary"]


@spec
class Moe:
    """Replaces one feed-forward layer by experts.  Lepikhin et al. 2020 (GShard), section 2.2."""

    experts: Count
    """Number of experts in a layer."""
    d_ff: Count | None = None
    """Width of an expert. None: that of the dense layers."""
    router: Router = Top2()
    """Chooses the experts of each token."""
    dispatch: Dispatch = "gather"
    """How tokens reach their experts: "einsum" by products with masks, as GShard does on TPUs (not
    measured there), "gather" by index, which is faster on CPUs, "dropless" by index into as many
    blocks as each expert needs. The results are equal, except that "dropless" drops no token."""
    group_tokens: Count | None = None
    """Tokens that are routed together and share the experts' slots. None: a row. Groups are smaller
    if the batch of an evaluation does not divide into groups of this size."""

    def __post_init__(self) -> None:
        if self.experts < self.router.choices:
            raise UserError(
                f"Moe.experts = {self.experts}: the router chooses {self.router.choices} per token."
                f"  Legal: at least as many experts, or a router of fewer choices."
            )


@spec
class Precision:
    """Chooses types of stored weights and of products.

    Norms, softmax and sums have JAX's default float type: float32, or float64 under JAX_ENABLE_X64.
    """

    store: FloatType = "float32"
    """Type of stored weights."""
    compute: FloatType = "float32"
    """Type of activations and products."""

    def __post_init__(self) -> None:
        for name, value in (("store", self.store), ("compute", self.compute)):
            if value == "float64" and not jax.config.read("jax_enable_x64"):
                raise UserError(
                    f"Precision.{name} = 'float64': JAX computes in 32 bits."
                    "  Legal: 'float32', 'bfloat16', 'float16'.  Or set JAX_ENABLE_X64=1."
                )

    def to_compute(self, tree: Tree) -> Tree:
        """Returns the tree with its arrays in the type of matrix products."""
        return jax.tree.map(lambda x: x.astype(self.compute), tree)


@abstract_spec
class TransformerSpec(ModelSpec):
    """Holds the settings that gin files know as `models.architectures.Transformer`."""

    axes: ClassVar[tuple[Axis, ...]] = (BUCKETS,)

    layers: Count
    """Layers of the decoder."""
    encoder_layers: CountOrZero = 0
    """Layers of the encoder; 0 is a decoder-only model."""
    source_vocab: Count | None = None
    """Rows of a separate embedding of the source. None: both sides share one, unless vocab
    is None as well and the task has a separate vocabulary for the source."""
    d_model: Count
    """Width of the residual stream."""
    d_ff: Count
    """Width of a dense feed-forward layer."""
    heads: Count
    """Query heads."""
    kv_heads: Count | None = None
    """Key/value heads. None: as many as heads."""
    d_kv: Count
    """Width of one head."""
    activation: Activation = "relu"
    """Nonlinearity of the feed-forward layer."""
    gated: bool = False
    """Gated feed-forward (GLU): activation(x wg) * (x wi)."""
    positions: Positions = "learned"
    """How the model encodes positions: a learned table, sinusoids, relative biases or rotation."""
    rope_theta: Positive = 10_000.0
    """Base of the wavelengths of rotary positions."""
    rope_scaling: RopeScaling | None = None
    """Scales rotary positions to longer rows than a model was trained on. None: no scaling."""
    length: Count = 256
    """Size of the learned position table; the model trains and decodes no longer rows."""
    buckets: Count = 32
    """Buckets of distance of the relative biases: at least 2, at least 4 with an encoder."""
    max_distance: Count = 128
    """Distance from which all relative positions share a bucket; more than half of buckets."""
    shares_bias: bool = False
    """One relative bias for all layers of a stack, as in T5; otherwise each layer has its own."""
    tied: bool = True
    """Shares one matrix between the target's embedding and the softmax."""
    embed_scale: Positive | None = None
    """Multiplies embeddings. None: the square root of d_model."""
    query_scale: Positive | None = None
    """Multiplies queries. None: 1 / the square root of d_kv."""
    logit_scale: Positive = 1.0
    """Multiplies the hidden states before the softmax's product."""
    norm_epsilon: Positive = 1e-6
    """Added to the mean square in all norms."""
    norm_offset: bool = False
    """Multiplies by 1 + scale in norms, as in Gemma, so that weight decay pulls the factor to 1."""
    qk_norm: bool = False
    """Normalizes each head of queries and keys before the rotation."""
    attention_biases: AttentionBiases = "none"
    """Adds biases to queries, keys and values ("qkv"), or to attention's output as well ("all")."""
    sliding_window: Count | None = None
    """Tokens that a token of a decoder attends to: itself and those right before it. None: all
    before it."""
    combined_qkv: bool = False
    """Computes queries, keys and values in one product; the stored weights stay separate."""
    dropout: Fraction = 0.0
    """Rate of dropout on the embeddings, on the residual branches and, without hidden_dropout,
    inside feed-forward layers."""
    hidden_dropout: Fraction | None = None
    """Rate of dropout inside feed-forward layers, on their activations. None: that of dropout."""
    attention_dropout: Fraction = 0.0
    """Rate of dropout on attention probabilities."""
    scan: bool = True
    """Compiles one layer and loops over it, instead of compiling all layers. Same results."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or everything."""
    remat_saves: tuple[SavedProduct, ...] = ()
    """Products that remat = "full" saves: queries, keys, values, the output of attention, and the
    inputs of the activation in dense feed-forward layers."""
    attention: AttentionKind = "auto"
    """How attention is computed: by products and a softmax ("plain"), by a kernel that keeps no
    logits in memory ("flash"), or by a kernel on devices that have one ("auto").  Same results.
    Without a kernel for the case, attention is plain (docs/attention.md).  On CPUs "flash"
    interprets a kernel, which is slow and meant for tests."""
    attention_chunks: Count = 1
    """Slices of queries in plain attention; each skips the keys after its last query.  Same
    results.  Without effect where the layout splits the length."""
    loss_chunks: Count = 1
    """Slices along the row in which logits are computed, so that they never all exist at once."""
    pattern: tuple[BlockKind, ...] = ("dense",)
    """Kinds of layers, repeated through each stack: ("dense", "moe") has experts in every
    second."""
    encoder_pattern: tuple[BlockKind, ...] | None = None
    """Pattern of the encoder. None: that of the decoder."""
    moe: Moe | None = None
    """The experts of all moe layers."""
    precision: Precision = Precision()
    """Types of stored weights and of computation."""

    def __post_init__(self) -> None:
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(
                f"Transformer.heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}."
                "  Legal: kv_heads that divide heads."
            )
        if self.source_vocab is not None and not self.encoder_layers:
            raise UserError(
                f"Transformer.source_vocab = {self.source_vocab}: the model has no encoder.  "
                "Set Transformer.encoder_layers, or unset source_vocab."
            )
        if self.positions == "rotary" and self.d_kv % 2:
            raise UserError(f"Transformer.d_kv = {self.d_kv}: rotary positions need an even width.")
        if self.rope_scaling is not None and self.positions != "rotary":
            raise UserError(
                f"Transformer.rope_scaling = @{type(self.rope_scaling).__name__}(): found "
                f"positions = {self.positions!r}.  Legal: positions = 'rotary', or no scaling."
            )
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise UserError(
                f"Transformer.rope_theta = {self.rope_theta}: found @"
                f"{type(self.rope_scaling).__name__}() as rope_scaling.  Legal: above 1."
            )
        if self.sliding_window is not None and self.encoder_layers:
            raise UserError(
                f"Transformer.sliding_window = {self.sliding_window}: found encoder_layers = "
                f"{self.encoder_layers}.  Legal: windows in models without an encoder."
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"Transformer.d_model = {self.d_model}: sinusoids need an even width.")

        self._check_relative_positions()
        if self.remat_saves and self.remat != "full":
            raise UserError(
                f"Transformer.remat_saves = {self.remat_saves}: found remat = {self.remat!r}.  "
                "Legal: remat = 'full', or nothing in remat_saves."
            )

        self._check_patterns()

    def _check_relative_positions(self) -> None:
        """Refuses buckets of which none is exact, or none covers a range of distances."""
        if self.positions != "relative":
            return
        least = 4 if self.has_encoder else 2  # an encoder has half of them for each direction
        if self.buckets < least:
            raise UserError(
                f"Transformer.buckets = {self.buckets}: relative positions need at least {least} "
                f"{'with an encoder' if self.has_encoder else 'in a decoder'}."
            )
        if self.max_distance <= self.buckets // 2:
            raise UserError(
                f"Transformer.max_distance = {self.max_distance}: {self.buckets} buckets hold the "
                f"distances below {self.buckets // 2} exactly.  Legal: max_distance of at least "
                f"{self.buckets // 2 + 1}, or fewer buckets."
            )

    def _check_patterns(self) -> None:
        patterns = {"layers": self.pattern, "encoder_layers": self.pattern_of_encoder}
        for name, pattern in patterns.items():
            layers, turn = getattr(self, name), max(len(pattern), 1)
            if not pattern or layers % turn:
                below = layers // turn * turn
                legal = " or ".join(str(n) for n in (below, below + turn) if n)
                raise UserError(
                    f"Transformer.{name} = {layers} is not a multiple of the pattern {pattern}.  "
                    f"Legal: {name} {legal}, or another pattern."
                )
        mixed = "moe" in self.pattern or (self.has_encoder and "moe" in self.pattern_of_encoder)
        if mixed and self.moe is None:
            raise UserError(
                "Transformer.pattern has moe layers: set Transformer.moe = @Moe() and Moe.experts."
            )
        if self.moe is not None and not mixed:
            raise UserError(
                f"Transformer.moe = {self.moe}: no layer has experts.  Set Transformer.pattern = "
                '("dense", "moe"), or unset Transformer.moe.'
            )
        if self.moe is not None and "moe" in self.pattern and not self.moe.router.causal:
            raise UserError(
                "Moe.router = @ExpertChoice(): it reads later tokens, which a decoder must not.  "
                "Legal: @Top2() or @TopK(), or experts only in the encoder: Transformer.pattern = "
                '("dense",) and Transformer.encoder_pattern = ("dense", "moe").'
            )

    @property
    def pattern_of_encoder(self) -> tuple[BlockKind, ...]:
        return self.encoder_pattern or self.pattern

    def traced_blocks(self, stages: int) -> int:
        """Returns the number of blocks of both stacks in the trace of a stage."""
        if not self.scan:
            return -(-(self.layers + self.encoder_layers) // stages)
        return len(self.pattern) + self.has_encoder * len(self.pattern_of_encoder)

    @property
    def max_length(self) -> int | None:
        return self.length if self.positions == "learned" else None

    @property
    def source_vocab_size(self) -> int | None:
        return self.source_vocab

    @property
    def array_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Names arrays that the model reads, each with its shape in a row; None is any size."""
        return {"inputs_BL": (None,)}

    @property
    def groups(self) -> dict[str, int]:
        size = None if self.moe is None else self.moe.group_tokens
        patterns = {"targets_BL": self.pattern}
        if self.has_encoder:
            patterns["inputs_BM"] = self.pattern_of_encoder
        return {name: size for name, pattern in patterns.items() if size and "moe" in pattern}

    @property
    def has_encoder(self) -> bool:
        return self.encoder_layers > 0

    @property
    def router(self) -> Router | None:
        return None if self.moe is None else self.moe.router

    @property
    def drops_tokens(self) -> bool:
        return self.moe is not None and self.moe.dispatch != "dropless"

    @property
    def queries(self) -> int:
        """Returns the query heads per key/value head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def has_dropout(self) -> bool:
        return any((self.dropout, self.hidden_dropout_rate, self.attention_dropout))

    @property
    def hidden_dropout_rate(self) -> float:
        """Returns the rate of dropout inside feed-forward layers."""
        return self.dropout if self.hidden_dropout is None else self.hidden_dropout

    @property
    def scales(self) -> tuple[float, float]:
        """Returns the factors of embeddings and of queries."""
        return self.embed_scale or self.d_model**0.5, self.query_scale or self.d_kv**-0.5

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the size of each axis of the weights, by letter."""
        experts = {"E": self.moe.experts} if self.moe else {}
        return experts | {
            "V": self.vocab_rows, "N": self.layers, "D": self.d_model, "F": self.d_ff,
            "K": self.d_kv, "J": self.heads // self.queries, "Q": self.queries,
            "L": self.length,
        }  # fmt: skip
