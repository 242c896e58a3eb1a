"""Implements the model of a Transformer: weights, training loss and cached decoding."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import Array

from configs.spec import spec
from layouts.axes import axes_of_path
from layouts.einsum import platform
from layouts.layout import Layout
from layouts.padding import of_rows, pad_batch
from layouts.shards import num_shards
from models import loss
from models.api import Batch, Cache, Params, step_layout
from models.attention.context import AttentionContext, cached_context, cross_context, packed_context
from models.dropout import Key, dropout, split_key
from models.initializers import Weights
from models.layers.blocks import Contexts
from models.layers.pipeline import stage_axes, with_nested_maps
from models.layers.stack import Loads, Stack
from models.loss import Criterion, LogitOperands, LossSums, bounded_logits, counted_targets
from models.network_model import NetworkModel
from models.parts import BlockParts
from models.preferences import preference_loss
from models.spec import PlacedBlock, TransformerSpec

T = TypeVar("T")
OUTPUT = "output_VD"
"""The name of the prepared weights that compute logits."""
SOURCE_ARRAYS = ("inputs_BM", "segments_BM", "positions_BM")


class Network(nnx.Module):
    """Embeds and decodes tokens; if there is a source, encodes it as well."""

    def __init__(self, spec: TransformerSpec, layout: Layout, weights: Weights):
        self.spec = spec
        self.layout = layout
        self.embed_VD = weights.normal("VD", fan_in="D")
        if not spec.tied:
            self.softmax_VD = weights.normal("VD", fan_in="D")
        if spec.logit_bias:
            self.logit_bias_V = weights.zeros("V")
        self.positions_LD = spec.positions.build_table(weights)
        if spec.source_vocab is not None:
            self.source_embed_VD = weights.with_sizes(V=spec.source_vocab).normal("VD", fan_in="D")
        self.source_positions_LD = spec.positions.build_source_table(weights)
        if spec.embed_norm:
            self.embed_norm = spec.norm.build(layout, weights)
        if spec.embed_norm and spec.has_encoder:
            self.source_embed_norm = spec.norm.build(layout, weights)
        if spec.has_encoder:
            self.encoder = Stack(spec, of_rows(layout, "memory"), weights, is_encoder=True)
        self.decoder = Stack(spec, layout, weights)

    def __call__(
        self, batch: Batch, key: Key = None, *, drop_tokens: bool = True
    ) -> tuple[Array, dict[str, Loads]]:
        """Returns the last layer's normed output for every target, and the loads of each stack."""
        segments_BL, memory_BMD = batch["segments_BL"], None
        loads, training = dict[str, Loads](), key is not None
        see_row = functools.partial(self.row_context, drop_tokens=drop_tokens, training=training)
        if self.spec.has_encoder:
            key, source_key = split_key(key)
            memory_BMD, loads["encoder"] = self.encode(batch, source_key, drop_tokens=drop_tokens)

        def contexts(block: BlockParts) -> Contexts:
            row = see_row(block, batch["positions_BL"], segments_BL)
            if memory_BMD is None:
                return Contexts(row)
            lengths = (segments_BL.shape[1], memory_BMD.shape[1])
            choice = self.spec.attention_choice(
                block, self.layout, lengths, is_cross=True, training=training
            )
            segments_BM, kernel = batch["segments_BM"], choice.kernel
            source = cross_context(self.layout, segments_BL, segments_BM, memory_BMD, kernel=kernel)
            return Contexts(row, source)

        x_BLD = self.embed(batch["inputs_BL"], batch["positions_BL"])
        key, input_key = split_key(key)
        x_BLD = dropout(self.layout, input_key, self.spec.dropout, x_BLD, "BLD")
        x_BLD, loads["decoder"] = self.decoder(x_BLD, contexts, key)
        return x_BLD, loads

    def row_context(
        self,
        block: BlockParts,
        positions_BL: Array,
        segments_BL: Array,
        *,
        causal: bool = True,
        drop_tokens: bool,
        training: bool,
    ) -> AttentionContext:
        """Returns what the tokens of packed rows see in a block."""
        lengths = (segments_BL.shape[1], segments_BL.shape[1])
        choice = self.spec.attention_choice(block, self.layout, lengths, training=training)
        return packed_context(
            self.layout,
            positions_BL,
            segments_BL,
            causal=causal,
            window=block.attention.window if causal else None,
            drop_tokens=drop_tokens,
            kernel=choice.kernel,
        )

    @jax.named_scope("encoder")
    def encode(
        self, batch: Batch, key: Key = None, *, drop_tokens: bool = True
    ) -> tuple[Array, Loads]:
        """Encodes the sources; also returns the loads of the encoder.

        If no tokens are dropped, the encoding of a source depends only on that source.
        """
        tokens_BL, segments_BL, positions_BL = (
            self.layout.reshard(batch[name], "BL") for name in SOURCE_ARRAYS
        )
        x_BLD = self.embed(tokens_BL, positions_BL, of_source=True)
        key, input_key = split_key(key)
        x_BLD = dropout(of_rows(self.layout, "memory"), input_key, self.spec.dropout, x_BLD, "BLD")
        row_context = functools.partial(
            self.row_context, causal=False, drop_tokens=drop_tokens, training=key is not None
        )

        def contexts(block: BlockParts) -> Contexts:
            return Contexts(row_context(block, positions_BL, segments_BL))

        x_BLD, loads = self.encoder(x_BLD, contexts, key)
        return self.layout.reshard(x_BLD, "BMD"), loads

    @jax.named_scope("embed")
    def embed(self, tokens_BL: Array, positions_BL: Array, *, of_source: bool = False) -> Array:
        """Embeds tokens and positions, scaled to variance 1 (Vaswani et al. 2017, 3.4)."""
        take, spec = self.layout.take, self.spec
        has_table = of_source and spec.source_vocab is not None
        table_VD = (self.source_embed_VD if has_table else self.embed_VD)[...]
        has_positions = of_source and self.source_positions_LD is not None
        positions_LD = self.source_positions_LD if has_positions else self.positions_LD
        # In the wider type: for float32 products, weights in bfloat16 are scaled in float32.
        types = table_VD.dtype, jnp.dtype(spec.precision.compute)
        dtype = max(types, key=lambda each: each.itemsize)
        x_BLD = take(table_VD, tokens_BL, "BLD").astype(dtype)
        table_LD = None if positions_LD is None else positions_LD[...]
        scale = spec.embed_scale or spec.d_model**0.5
        x_BLD = spec.positions.embed(self.layout, x_BLD, positions_BL, table_LD, scale)
        if spec.embed_norm:
            x_BLD = (self.source_embed_norm if of_source else self.embed_norm)(x_BLD)
        return x_BLD.astype(spec.precision.compute)

    def output_weights(self) -> Array:
        weights_VD = self.embed_VD if self.spec.tied else self.softmax_VD
        return weights_VD[...].astype(self.spec.precision.compute)


def router_loss(blocks: Sequence[PlacedBlock], loads: Loads) -> Array:
    """Returns what the routers of a stack's layers add to the loss, summed over the tokens."""
    total = jnp.zeros(())
    for path, parts, _ in blocks:
        load, router = loads[path], parts.feed_forward.router
        if router is not None:
            total += jnp.sum(router.aux_loss * load.aux + router.z_loss * load.z)
    return total


def with_updated_biases(
    layout: Layout, blocks: Sequence[PlacedBlock], stack: Params, loads: Loads
) -> Params:
    """Updates the biases of a stack's routers, given the choices that experts kept in a step."""
    weights = traverse_util.flatten_dict(stack, sep="/")
    for path, parts, _ in blocks:
        load, router = loads[path], parts.feed_forward.router
        if router is None or not router.has_bias:
            continue
        bias_path = f"{path}/mlp/bias_E"
        bias, axes = weights[bias_path], axes_of_path(bias_path)
        choices = load.kept_e if axes == "NE" else load.kept_e[0]
        whole_axes = axes.replace("E", "e")
        whole, choices = (layout.reshard(x, whole_axes, stored=True) for x in (bias, choices))
        updated = router.updated_bias(whole[..., : choices.shape[-1]], choices)
        weights[bias_path] = layout.reshard(updated.astype(bias.dtype), axes, stored=True)
    return traverse_util.unflatten_dict(weights, sep="/")


def pass_keys(criterion: Criterion, key: Key) -> list[Array | None]:
    """Returns the key of each forward pass: R-drop has two, with different dropout.

    If each microbatch has a key, each pass has a key for each microbatch.
    """
    if key is None or not criterion.r_drop:
        return [key]
    split = jax.random.split if key.ndim == 0 else jax.vmap(jax.random.split, out_axes=1)
    return list(split(key))


def mean_of_passes(passes: Sequence[T]) -> T:
    """Averages the trees of one or two forward passes."""
    if len(passes) == 1:
        return passes[0]
    return jax.tree.map(lambda first, second: (first + second) / 2, *passes)


def join_microbatches(layout: Layout, x: Array, axes: str) -> Array:
    """Merges microbatches, the first axis, into the length: [A, B, L, ...] -> [B, A*L, ...]."""
    whole = axes.replace("L", "l")
    rows = jnp.swapaxes(layout.reshard(x, f"a{whole}"), 0, 1)
    shape = (len(rows), rows.shape[1] * rows.shape[2], *rows.shape[3:])
    return layout.reshard(layout.reshape(rows, shape, whole), axes)


@dataclasses.dataclass(frozen=True)
class TransformerModel(NetworkModel[Network]):
    """Implements `models.api.Model` for a Transformer under a layout."""

    spec: TransformerSpec

    def make_network(self, weights: Weights) -> Network:
        return Network(self.spec, self.layout, weights)

    def pad_rows(self, params: Params, batch: Batch) -> tuple[Network, Batch]:
        """Returns the network with these weights, and the batch with empty rows if needed."""
        layout, batch = pad_batch(self.layout, batch, self.groups)
        blocks = self.spec.traced_blocks(num_shards(stage_axes(layout)))
        batch = {**batch, "segments_BL": with_nested_maps(layout, batch["segments_BL"], blocks)}
        return dataclasses.replace(self, layout=layout).network(params), batch

    @property
    def groups(self) -> dict[str, int]:
        """Returns the tokens in a group, for each array of a batch whose tokens are grouped."""
        return self.spec.groups

    @property
    def unrounded(self) -> Self:
        """Returns the model without rounding in products, as in decoding."""
        precision = dataclasses.replace(self.spec.precision, products="compute")
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, precision=precision))

    @property
    def runs_stages(self) -> bool:
        return bool(stage_axes(self.layout))

    def loss(self, params: Params, batch: Batch, criterion: Criterion, key: Key = None) -> LossSums:
        criterion = dataclasses.replace(criterion, logit_cap=self.spec.logit_cap)
        if self.runs_stages and batch["targets_BL"].ndim == 2:  # one microbatch
            batch, key = jax.tree.map(lambda x: x[None], (batch, key))
        network, batch = self.pad_rows(params, batch)
        layout, weights_VD = network.layout, network.output_weights()
        targets_BL, segments_BL = batch["targets_BL"], batch["segments_BL"]
        counted_BL = counted_targets(batch)
        bias_V = self.logit_bias(params)
        microbatches = len(targets_BL) if self.runs_stages else 1
        chunks = self.spec.loss_chunks * microbatches
        joined = of_rows(layout, "length", microbatches)
        run = functools.partial(network, drop_tokens=criterion.drop_tokens)
        if self.runs_stages:
            targets_BL, counted_BL, segments_BL = (
                join_microbatches(layout, x, "BL") for x in (targets_BL, counted_BL, segments_BL)
            )

        def forward(key: Key) -> tuple[LogitOperands, dict[str, Loads]]:
            if not self.runs_stages:
                x_BLD, loads = run(batch, key)
            else:
                x_ABLD, loads = jax.vmap(run)(batch, key)
                loads = jax.tree.map(lambda x: jnp.sum(x, axis=0), loads)
                x_BLD = join_microbatches(layout, x_ABLD, "BLD")
            return LogitOperands(x_BLD * self.spec.logit_scale, weights_VD, bias_V), loads

        teacher = dataclasses.replace(self, layout=layout).teacher_output(params, batch)

        def sums_of(output: LogitOperands) -> LossSums:
            if criterion.dpo_beta is not None and teacher is not None:
                return preference_loss(
                    joined, criterion, output, teacher, targets_BL, counted_BL, segments_BL
                )
            return loss.softmax_loss(
                joined, criterion, chunks, output, targets_BL, counted_BL, teacher
            )

        passes = [forward(key) for key in pass_keys(criterion, key)]
        sums = mean_of_passes([sums_of(output) for output, _ in passes])
        loads = mean_of_passes([loads for _, loads in passes])
        if len(passes) == 2:
            (first, _), (second, _) = passes
            kl_sum = loss.divergence(joined, criterion, chunks, first, second.x_BLD, counted_BL)
            sums = sums._replace(objective=sums.objective + criterion.r_drop / 2 * kl_sum)
        if self.spec.router is None:
            return sums
        blocks = {stack: self.spec.placed_blocks(stack) for stack in loads}
        objectives = {stack: router_loss(of, loads[stack]) for stack, of in blocks.items()}
        return sums._replace(router_objectives=objectives, loads=loads)

    def teacher_output(self, params: Params, batch: Batch) -> LogitOperands | None:
        """Returns the output of the teacher for a batch, if there is one."""
        return None

    def update_routers(self, params: Params, loads: dict[str, Loads]) -> Params:
        placed = self.spec.placed_blocks
        return params | {
            stack: with_updated_biases(self.layout, placed(stack), params[stack], of_stack)
            for stack, of_stack in loads.items()
        }

    def hidden(self, params: Params, batch: Batch) -> tuple[Layout, Batch, Array, Array]:
        network, batch = self.unrounded.pad_rows(params, batch)
        x_BLD = network(batch, drop_tokens=False)[0] * self.spec.logit_scale
        return network.layout, batch, x_BLD, network.output_weights()

    def prepare(self, params: Params, *, for_one_call: bool = False) -> Params:
        if OUTPUT in params:
            return params
        params = self.merged(params)
        # On CPUs a scan copies the weights and the cache of each layer at each step.
        scan = self.spec.scan and (for_one_call or platform() != "cpu")
        layout, decoder = step_layout(self.layout), params["decoder"]
        layers = self.spec.precision.to_compute(decoder["layers_N"])
        layers = layout.gather_stack(layers) if scan else layout.unstack(layers)
        decoder = {**decoder, "layers_N": layers}
        if "first" in decoder:
            decoder["first"] = self.spec.precision.to_compute(decoder["first"])
        prepared = {**params, "decoder": decoder}
        output_VD = prepared.pop("embed_VD" if self.spec.tied else "softmax_VD")
        prepared[OUTPUT] = self.spec.precision.to_compute(output_VD)
        if self.spec.tied and prepared[OUTPUT].dtype != output_VD.dtype:
            prepared["embed_VD"] = output_VD
        return prepared

    def decoding_network(self, prepared: Params) -> Network:
        """Returns the network of `step`; its layers and output weights have only shapes."""
        graph, state = nnx.split(self.unrounded.with_layout(step_layout(self.layout)).abstract())
        shapes = nnx.to_pure_dict(state)
        weights = shapes | {"embed_VD": prepared[OUTPUT]} | prepared
        del weights[OUTPUT]
        decoder = {**prepared["decoder"], "layers_N": shapes["decoder"]["layers_N"]}
        return nnx.merge(graph, weights | {"decoder": decoder})

    def init_cache(
        self, prepared: Params, source: Batch | None, batch_sequences: int, cache_length: int
    ) -> Cache:
        network, memory_BMD = self.decoding_network(prepared), None
        reshard = network.layout.reshard
        positions_BM = jnp.zeros((batch_sequences, cache_length), jnp.int32)
        cache: Cache = {"positions_BM": reshard(positions_BM, "BM")}
        if source is not None:
            memory_BMD, _ = network.encode(source, drop_tokens=False)
            cache["source_segments_BM"] = reshard(source["segments_BM"], "BM")
        cache["layers"] = network.decoder.init_cache(
            prepared["decoder"]["layers_N"], batch_sequences, cache_length, memory_BMD
        )
        return cache

    def step(
        self,
        prepared: Params,
        cache: Cache,
        tokens_BL: Array,
        positions_BL: Array,
        mask_BLM: Array,
        cache_index: Array,
    ) -> tuple[Cache, Array]:
        network = self.decoding_network(prepared)
        layout = network.layout
        tokens_BL, positions_BL = (layout.reshard(x, "BL") for x in (tokens_BL, positions_BL))
        positions_BM = jax.lax.dynamic_update_slice_in_dim(
            cache["positions_BM"], positions_BL, cache_index, axis=1
        )

        def contexts(block: BlockParts) -> Contexts:
            window = block.attention.window
            row = cached_context(layout, positions_BL, positions_BM, mask_BLM, cache_index, window)
            if "source_segments_BM" not in cache:
                return Contexts(row)
            one_BL = jnp.ones_like(tokens_BL)
            return Contexts(row, cross_context(layout, one_BL, cache["source_segments_BM"]))

        x_BLD = network.embed(tokens_BL, positions_BL)
        x_BLD, layers = network.decoder.step(
            prepared["decoder"]["layers_N"], x_BLD, cache["layers"], contexts
        )
        x_BLD *= self.spec.logit_scale
        output = LogitOperands(x_BLD, prepared[OUTPUT], self.logit_bias(prepared))
        logits_BLV = bounded_logits(layout, "BLV", output, self.spec.logit_cap)
        logits_BLV = layout.mask_padding(logits_BLV, "BLV", "V", -jnp.inf)
        return {**cache, "positions_BM": positions_BM, "layers": layers}, logits_BLV


@spec
class Transformer(TransformerSpec):
    """Defines a decoder, or an encoder and decoder.  Vaswani et al. 2017; norms before each part,
    unless the blocks say otherwise."""

    def model(self, layout: Layout) -> TransformerModel:
        return TransformerModel(self, layout)
