"""Multiplies blocks of tokens, each with the weights of its expert, in kernels for TPUs.

Blocks without an expert are not multiplied.  Where the summed axis is one tile, weights stay on the
chip while blocks of one expert follow each other; else each block reads them.  Gale et al. 2022
(MegaBlocks).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILES = tuple(range(1024, 0, -128))
"""Rows and columns of a tile of weights: multiples of what the matrix units take."""
WIDE = 512
"""Above it an axis is padded to a multiple of it, so that tiles are large."""
MIN_TOKENS = 16
"""A block's tokens must be a multiple of this: the rows of a register in 16 bits."""


def tile_of(size: int) -> int:
    """Returns the largest tile that divides an axis; a short axis is a tile."""
    return size if size < TILES[-1] else next(tile for tile in TILES if size % tile == 0)


def padded_size(size: int) -> int:
    """Returns the size of an axis in the kernels: the next one that tiles divide.

    >>> [padded_size(size) for size in (64, 200, 1536, 2880)]
    [64, 256, 1536, 3072]
    """
    if size < TILES[-1] or size % TILES[-1] == 0:
        return size
    multiple = TILES[-1] if size < WIDE else WIDE
    return -(-size // multiple) * multiple


def padded(x: Array, *axes: int) -> Array:
    """Pads axes with zeros to the sizes that they have in the kernels."""
    sizes = [padded_size(size) if axis in axes else size for axis, size in enumerate(x.shape)]
    ends = [(0, after - before) for before, after in zip(x.shape, sizes, strict=True)]
    return jnp.pad(x, ends) if any(end for _, end in ends) else x


def kernel_product(
    x_lcd: Array, weights_edf: Array, expert_l: Array, *, transposed: bool, interpret: bool
) -> Array:
    """Multiplies each block by the weights of its expert, or by their transpose."""
    width = weights_edf.shape[1 if transposed else 2]
    x_lcd, weights_edf = padded(x_lcd, 2), padded(weights_edf, 1, 2)
    blocks, tokens, d = x_lcd.shape
    experts = len(weights_edf)
    f = weights_edf.shape[1 if transposed else 2]
    tile_d, tile_f = tile_of(d), tile_of(f)
    summed = (((1,), (1 if transposed else 0,)), ((), ()))

    def kernel(expert_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any, sum_ref: Any) -> None:
        part = pl.program_id(2)

        @pl.when(part == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(expert_ref[pl.program_id(1)] < experts)
        def _() -> None:
            sum_ref[...] += jax.lax.dot_general(
                x_ref[...],
                w_ref[...].astype(x_ref.dtype),  # of quantized weights
                summed,
                preferred_element_type=jnp.float32,
            )

        @pl.when(part == pl.num_programs(2) - 1)
        def _() -> None:
            y_ref[...] = sum_ref[...].astype(y_ref.dtype)

    def weights_at(column: Any, block: Any, part: Any, expert_ref: Any) -> tuple[Any, Any, Any]:
        place = (column, part) if transposed else (part, column)
        return (jnp.minimum(expert_ref[block], experts - 1), *place)

    tile = (tile_f, tile_d) if transposed else (tile_d, tile_f)
    y_lcf = pallas_call(
        kernel,
        "grouped_product",
        (f // tile_f, blocks, d // tile_d),
        [
            pl.BlockSpec((None, tokens, tile_d), lambda column, block, part, _: (block, 0, part)),
            pl.BlockSpec((None, *tile), weights_at),
        ],
        pl.BlockSpec((None, tokens, tile_f), lambda column, block, part, _: (block, 0, column)),
        (blocks, tokens, f),
        (expert_l, x_lcd, weights_edf),
        flops=2 * blocks * tokens * d * f,
        interpret=interpret,
    )
    return y_lcf[:, :, :width]


def kernel_gradient(
    x_lcd: Array, dy_lcf: Array, expert_l: Array, experts: int, *, interpret: bool
) -> Array:
    """Sums the products of each expert's blocks with their gradients."""
    shape = x_lcd.shape[2], dy_lcf.shape[2]
    x_lcd, dy_lcf = padded(x_lcd, 2), padded(dy_lcf, 2)
    blocks, tokens, d = x_lcd.shape
    f = dy_lcf.shape[2]
    tile_d, tile_f = tile_of(d), tile_of(f)
    has_block_e = jnp.isin(jnp.arange(experts), expert_l)

    def kernel(expert_ref: Any, x_ref: Any, dy_ref: Any, dw_ref: Any, sum_ref: Any) -> None:
        block, last = pl.program_id(2), pl.num_programs(2) - 1

        def expert_of(block: Any) -> Any:
            return expert_ref[block] % experts

        @pl.when((block == 0) | (expert_of(block) != expert_of(jnp.maximum(block - 1, 0))))
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(expert_ref[block] < experts)
        def _() -> None:
            over_tokens = (((0,), (0,)), ((), ()))
            sum_ref[...] += jax.lax.dot_general(
                x_ref[...], dy_ref[...], over_tokens, preferred_element_type=jnp.float32
            )

        @pl.when((block == last) | (expert_of(block) != expert_of(jnp.minimum(block + 1, last))))
        def _() -> None:
            dw_ref[...] = sum_ref[...].astype(dw_ref.dtype)

    dw_edf = pallas_call(
        kernel,
        "grouped_weight_gradient",
        (d // tile_d, f // tile_f, blocks),
        [
            pl.BlockSpec((None, tokens, tile_d), lambda row, column, block, _: (block, 0, row)),
            pl.BlockSpec((None, tokens, tile_f), lambda row, column, block, _: (block, 0, column)),
        ],
        pl.BlockSpec(
            (None, tile_d, tile_f),
            lambda row, column, block, expert_ref: (expert_ref[block] % experts, row, column),
        ),
        (experts, d, f),
        (zeroing_blocks(expert_l, has_block_e), x_lcd, dy_lcf),
        flops=2 * blocks * tokens * d * f,
        interpret=interpret,
    )
    dw_edf = dw_edf[:, : shape[0], : shape[1]]
    if blocks >= 2 * experts:
        return dw_edf
    # There may be too few blocks without an expert.
    return jnp.where(has_block_e[:, None, None], dw_edf, 0)


def zeroing_blocks(expert_l: Array, has_block_e: Array) -> Array:
    """Lets blocks without an expert write the zeros of experts without a block.

    Such a block gets the number of the expert plus the number of experts.
    """
    experts = len(has_block_e)
    last_missing = jnp.sum(~has_block_e) - 1
    missing_first_e = jnp.argsort(has_block_e, stable=True).astype(jnp.int32)
    is_left_l = expert_l >= experts
    rank_l = jnp.minimum(jnp.cumsum(is_left_l) - 1, last_missing)
    # Where none is missing, the last expert's blocks continue.
    missing_l = missing_first_e.at[rank_l].get(mode="clip")
    missing_l = jnp.where(last_missing < 0, experts - 1, missing_l)
    return jnp.where(is_left_l, experts + missing_l, expert_l).astype(jnp.int32)


def pallas_call(
    kernel: Any,
    name: str,
    grid: tuple[int, ...],
    in_specs: list[Any],
    out_spec: Any,
    shape: tuple[int, ...],
    operands: tuple[Array, Array, Array],
    *,
    flops: int,
    interpret: bool,
) -> Array:
    """Calls a kernel that reads the experts of blocks, two arrays, and has sums in float32."""
    varies = [jax.typeof(x).manual_axis_type.varying for x in operands]
    over = frozenset().union(*varies)
    pairs = zip(operands, varies, strict=True)
    operands = tuple(jax.lax.pcast(x, tuple(over - axes), to="varying") for x, axes in pairs)
    dtype, axis_type = operands[1].dtype, jax.typeof(operands[1]).manual_axis_type
    blocks = len(operands[0])  # which read as many experts at most
    accessed_bytes = sum(x.nbytes * min(blocks, len(x)) // len(x) for x in operands)
    cost = pl.CostEstimate(flops=flops, bytes_accessed=accessed_bytes, transcendentals=0)
    params = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axis_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=[pltpu.VMEM(out_spec.block_shape[1:], jnp.float32)],
        ),
        compiler_params=params,
        cost_estimate=cost,
        interpret=interpret,
    )(*operands)
