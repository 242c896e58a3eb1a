"""Holds the settings of a Transformer: its sizes, and the tree of its parts."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, Self

from configs.errors import UserError
from configs.spec import Count, Positive, abstract_spec
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.low_rank import RANK
from models.adapters.lora import Lora
from models.attention.flash import Call, Choice
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Router
from models.layers.pipeline import inside_stages
from models.norms import LayerNorm, RmsNorm
from models.parts import Attention, Block, BlockParts, FeedForward, Norm, Part, Positions
from models.positions.absolute import Learned, NoPositions, Sinusoidal
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.sizes import Sizes

Remat = Literal["none", "dots", "full"]
SavedProduct = Literal[
    "query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi"
]  # fmt: skip
OffloadedValue = Literal["layer_input", SavedProduct]
PARTS = (
    MultiHead, Latent, Mlp, Moe, RmsNorm, LayerNorm, Learned, NoPositions, Relative, Rotary,
    Sinusoidal,
)  # fmt: skip
"""Parts that gin files can name without an import."""


class PlacedBlock(NamedTuple):
    """Holds a block, the path of its weights, and the layers of its stack that use them."""

    path: str
    """Within the stack: "layers_N/block1", or "first/block0"."""
    parts: BlockParts
    layers: range


@abstract_spec
class TransformerSpec(Sizes):
    """Holds the settings that gin files know as `Transformer`."""

    free_on_resume: ClassVar[tuple[str, ...]] = (
        "scan", "remat", "remat_saves", "remat_offloads", "loss_chunks",
    )  # fmt: skip
    """Settings that may change while a model trains, since they leave its results as they are."""

    source_vocab: Count | None = None
    """Rows of a separate source embedding. None: source and target share one, unless vocab is None
    as well and the task has a separate source vocabulary."""
    attention: Attention = MultiHead()
    """Attention of all blocks that do not set another."""
    positions: Positions = Learned()
    """How the model encodes positions."""
    feed_forward: FeedForward = Mlp()
    """Feed-forward layer of all blocks that do not set another: @Mlp(), or experts, @Moe()."""
    norm: Norm = RmsNorm()
    """Norm of all blocks that do not set another, and at the end of a stack."""
    first_blocks: tuple[Block, ...] = ()
    """Blocks of the decoder's first layers, before the pattern; DeepSeek-V3 has 3 dense ones."""
    pattern: tuple[Block, ...] = (Block(),)
    """Blocks, repeated: (@Block(), @experts/Block()) can put experts in every second layer."""
    encoder_pattern: tuple[Block, ...] | None = None
    """Pattern of the encoder. None: the same as the decoder's."""
    tied: bool = True
    """Shares one matrix between the target embedding and the softmax."""
    embed_scale: Positive | None = None
    """Multiplies embeddings. None: the square root of d_model."""
    embed_norm: bool = False
    """Normalizes embeddings, with positions, before the first layer of each stack, as in BART."""
    logit_scale: Positive = 1.0
    """Multiplies the hidden states before the output matmul."""
    logit_bias: bool = False
    """Adds a bias to the logits of tokens, as in Marian. Training does not change it."""
    logit_cap: Positive | None = None
    """Bounds the logits softly: cap * tanh(logits / cap), as in Gemma 2. None: no bound."""
    scan: bool = True
    """Compiles one layer and loops over it, instead of compiling all. The results are the same."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing, everything except matmuls, or everything."""
    remat_saves: tuple[SavedProduct, ...] = ()
    """Matmuls that remat = "full" saves: queries, keys, values, the weighted sums of values
    ("context"; the TPU kernel then runs only once), the output of attention, and the inputs of the
    activation in dense feed-forward layers."""
    remat_offloads: tuple[OffloadedValue, ...] = ()
    """What remat = "full" saves in host memory, on TPUs and GPUs: these matmuls, and the input of
    each layer, which otherwise stays in device memory."""
    adapter: Lora | None = None
    """@Lora() trains adapters of the weights in Run.start_from. None: trains all weights."""
    loss_chunks: Count = 1
    """Computes the logits in this many slices of a row, so that they are never all in memory."""

    def __post_init__(self) -> None:
        Sizes.__post_init__(self)
        if self.source_vocab is not None and not self.encoder_layers:
            raise UserError(
                f"Transformer.source_vocab = {self.source_vocab}: the model has no encoder.  "
                "Set Transformer.encoder_layers, or unset source_vocab."
            )
        for name in ("remat_saves", "remat_offloads"):
            if (values := getattr(self, name)) and self.remat != "full":
                raise UserError(
                    f"Transformer.{name} = {values}: found remat = {self.remat!r}.  "
                    f"Legal: remat = 'full', or nothing in {name}."
                )
        if both := sorted({*self.remat_saves} & {*self.remat_offloads}):
            raise UserError(
                f"Transformer.remat_offloads = {self.remat_offloads}: {', '.join(both)} "
                "also in remat_saves.  Legal: each in one of them."
            )
        self._check_pattern("layers", self.pattern, len(self.first_blocks))
        if self.encoder_pattern is not None or self.has_encoder:
            pattern = self.pattern if self.encoder_pattern is None else self.encoder_pattern
            self._check_pattern("encoder_layers", pattern)
        for stack, causal in ((self.blocks, True), (self.encoder_blocks, False)):
            for block in stack:
                self._check_block(block, causal=causal)

    def _check_pattern(self, name: str, pattern: tuple[Block, ...], first: int = 0) -> None:
        layers, turn = getattr(self, name), len(pattern)
        if not pattern:
            raise UserError(f"Transformer.pattern of {name} = (): legal: at least one block.")
        repeats, rest = divmod(layers - first, turn)
        if rest or repeats < 1:
            counts = (first + n * turn for n in (repeats, repeats + 1) if n > 0)
            legal = " or ".join(map(str, counts)) or str(first + turn)
            after = f", after {first} first_blocks," if first else ""
            raise UserError(
                f"Transformer.{name} = {layers}{after} is not a multiple of the {turn} blocks of "
                f"its pattern.  Legal: {name} {legal}, or another pattern."
            )

    def _check_block(self, block: BlockParts, *, causal: bool) -> None:
        for part in block.parts:
            part.check(self, block, causal=causal)
        positions = block.positions
        if positions != self.positions and (positions.changes_embeddings or positions.shares_bias):
            raise UserError(
                f"Block.positions = @{type(positions).__name__}(): all layers share this "
                "encoding.  Set Transformer.positions, or use one inside attention: @Rotary(), "
                "@Relative() or @NoPositions()."
            )

    def _resolved(self, pattern: Iterable[Block]) -> tuple[BlockParts, ...]:
        return tuple(
            BlockParts(
                attention=block.attention or self.attention,
                source_attention=block.source_attention or block.attention or self.attention,
                positions=block.positions or self.positions,
                feed_forward=block.feed_forward or self.feed_forward,
                norm=block.norm or self.norm,
                norm_places=block.norm_places,
                residual_scale=block.residual_scale,
            )
            for block in pattern
        )

    @property
    def blocks(self) -> tuple[BlockParts, ...]:
        """Returns the parts of each block of the decoder: the first blocks, then the pattern."""
        return self._resolved((*self.first_blocks, *self.pattern))

    @property
    def encoder_blocks(self) -> tuple[BlockParts, ...]:
        """Returns the parts of each block of the encoder's pattern; none without an encoder."""
        return self._resolved(self.encoder_pattern or self.pattern) if self.has_encoder else ()

    def placed_blocks(self, stack: str) -> tuple[PlacedBlock, ...]:
        """Returns the blocks of "decoder" or "encoder", in order, with their weights' paths."""
        first, blocks, layers = len(self.first_blocks), self.blocks, self.layers
        if stack == "encoder":
            first, blocks, layers = 0, self.encoder_blocks, self.encoder_layers
        turn = len(blocks) - first
        placed = []
        for i, parts in enumerate(blocks):
            path, numbers = f"first/block{i}", range(i, i + 1)
            if i >= first:
                path = f"layers_N/block{i - first}" if turn > 1 else "layers_N"
                numbers = range(i, layers, turn)
            placed.append(PlacedBlock(path, parts, numbers))
        return tuple(placed)

    @property
    def blocks_by_layer(self) -> tuple[BlockParts, ...]:
        """Returns the parts of each layer of the decoder."""
        first = len(self.first_blocks)
        repeats = (self.layers - first) // len(self.pattern)
        return self.blocks[:first] + self.blocks[first:] * repeats

    @property
    def parts(self) -> tuple[Part, ...]:
        """Returns all parts once, those of the decoder first."""
        blocks = (*self.blocks, *self.encoder_blocks)
        return tuple(dict.fromkeys(part for block in blocks for part in block.parts))

    @property
    def moes(self) -> tuple[Moe, ...]:
        """Returns the kinds of experts in the model."""
        return tuple(part for part in self.parts if isinstance(part, Moe))

    def traced_blocks(self, stages: int) -> int:
        """Returns the number of blocks of both stacks in the trace of a stage."""
        if not self.scan:
            return -(-(self.layers + self.encoder_layers) // stages)
        return len(self.blocks) + len(self.encoder_blocks)

    @property
    def declared_axes(self) -> tuple[Axis, ...]:
        axes = dict.fromkeys(axis for part in self.parts for axis in part.axes)
        return (*axes, *((RANK,) if self.adapter is not None else ()))

    @property
    def max_length(self) -> int | None:
        parts = (part for part in (self.positions, *self.parts) if isinstance(part, Positions))
        return min(filter(None, (part.max_length(self) for part in parts)), default=None)

    @property
    def array_shapes(self) -> dict[str, tuple[int | None, ...]]:
        return {"inputs_BL": (None,)}

    @property
    def groups(self) -> dict[str, int]:
        stacks = {"targets_BL": self.blocks, "inputs_BM": self.encoder_blocks}
        sizes = {name: [b.feed_forward.group_tokens for b in of] for name, of in stacks.items()}
        return {name: math.lcm(*filter(None, of)) for name, of in sizes.items() if any(of)}

    @property
    def router(self) -> Router | None:
        routers = [part.router for part in self.parts if isinstance(part, FeedForward)]
        return next((router for router in routers if router is not None), None)

    @property
    def active(self) -> Self:
        if not self.moes:
            return self
        active = self.with_feed_forward(lambda part: part.active(self))
        return dataclasses.replace(active, adapter=None)  # adapters may name routers

    def with_feed_forward(self, change: Callable[[FeedForward], FeedForward]) -> Self:
        """Returns the model with `change` applied to each feed-forward part."""

        def changed(block: Block) -> Block:
            part = change(block.feed_forward or self.feed_forward)
            return dataclasses.replace(block, feed_forward=part)

        return dataclasses.replace(
            self,
            first_blocks=tuple(map(changed, self.first_blocks)),
            pattern=tuple(map(changed, self.pattern)),
            encoder_pattern=self.encoder_pattern and tuple(map(changed, self.encoder_pattern)),
        )

    def masked_flops(self, length: int) -> float:
        """Counts the FLOPs of keys after a token, as half of all in a decoder, and before a window.

        Megatron-LM, torchtitan and, since July 2025, MaxText count half, ignoring the diagonal.
        """
        flops = 0.0
        for block in self.blocks_by_layer:
            seen = min(block.attention.window or length, length)
            pairs = length**2 - (length * seen - seen**2 / 2)
            flops += block.attention.pair_flops(self) * pairs
        return flops

    @property
    def drops_tokens(self) -> bool:
        return any(part.drops_tokens for part in self.parts if isinstance(part, FeedForward))

    @property
    def has_dropout(self) -> bool:
        blocks = (*self.blocks, *self.encoder_blocks)
        return self.dropout > 0 or any(
            block.feed_forward.dropout_rate(self) > 0
            or block.attention.has_dropout
            or (self.has_encoder and block.source_attention.has_dropout)
            for block in blocks
        )

    def attention_choice(
        self,
        block: BlockParts,
        layout: Layout,
        lengths: tuple[int, int],
        *,
        is_cross: bool = False,
        training: bool = True,
    ) -> Choice:
        """Names the kernel that computes the attention of a block, or explains why none does.

        `lengths` are the lengths of queries and keys.
        """
        attention = block.source_attention if is_cross else block.attention
        layout, has_bias = inside_stages(layout), block.positions.adds_bias
        call = Call(attention, self, layout, lengths, is_cross, training, has_bias)
        return attention.kernel(call)

    def attention_choices(self, layout: Layout, lengths: Mapping[str, int]) -> dict[str, str]:
        length, memory = lengths["targets_BL"], lengths.get("inputs_BM")
        cases = [("decoder", self.blocks, (length, length), False)]
        if memory is not None:
            cases.append(("encoder", self.encoder_blocks, (memory, memory), False))
            cases.append(("source", self.blocks, (length, memory), True))
        choices: dict[str, str] = {}
        for name, blocks, case, is_cross in cases:
            made = (self.attention_choice(b, layout, case, is_cross=is_cross) for b in blocks)
            choices[name] = "; ".join(dict.fromkeys(map(str, made)))
        return choices
