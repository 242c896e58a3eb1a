"""Multiplies blocks of tokens by the weights of their experts, on one device.

On TPUs, kernels skip blocks without an expert.  If the summed axis is one tile, weights stay on the
chip during consecutive blocks of one expert; otherwise each block reads them.  Gale et al. 2022
(MegaBlocks).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from layouts.einsum import has_tpu_kernels, platform

MAX_BLOCK, MAX_KERNEL_BLOCK, MAX_GPU_BLOCK = 128, 512, 1024  # tokens
TILES = tuple(range(1024, 0, -128))
"""Rows and columns of a tile of weights: multiples of the size of matrix units."""
WIDE = 512
"""Longer axes are padded to a multiple of it, so that tiles are large."""
MIN_TOKENS = 16
"""A block's tokens must be a multiple of this: the rows of a register of 16-bit numbers."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    x_lcd: Array, weights_edf: Array, expert_l: Array, transposed: bool = False
) -> Array:
    """Multiplies each block by the weights of its expert, or by their transpose.

    Blocks are in the order of their experts; the last ones may have no expert, and give zeros.
    """
    if has_kernels():
        return kernel_product(x_lcd, weights_edf, expert_l, transposed)
    return in_turn(x_lcd, weights_edf, expert_l, transposed)


def _product_backward(
    transposed: bool, operands: tuple[Array, Array, Array], dy_lcf: Array
) -> tuple[Array, Array, None]:
    x_lcd, weights_edf, expert_l = operands
    dx_lcd = grouped_product(dy_lcf, weights_edf, expert_l, not transposed)
    left, right = (dy_lcf, x_lcd) if transposed else (x_lcd, dy_lcf)
    return dx_lcd, weight_gradient(left, right, weights_edf, expert_l), None


grouped_product.defvjp(lambda *given: (grouped_product(*given), given[:3]), _product_backward)


@jax.custom_vjp
def gated_product(h_lcf: Array, weights_efd: Array, expert_l: Array, gate_lc: Array) -> Array:
    """Multiplies each block by the weights of its expert, and each token's result by its gate.

    The gradient of gates is computed from the gradient of the hidden layer.  It does not need the
    result, so rematerialization does not compute it.  The gradient of a gate of 0 is set to 0, as
    its router multiplies it by the gate.
    """
    return times_gates(grouped_product(h_lcf, weights_efd, expert_l), gate_lc)


def _gated_backward(
    operands: tuple[Array, Array, Array, Array], dy_lcd: Array
) -> tuple[Array, Array, None, Array]:
    h_lcf, weights_efd, expert_l, gate_lc = operands
    dy_lcd = times_gates(dy_lcd, gate_lc)
    dh_lcf = grouped_product(dy_lcd, weights_efd, expert_l, True)
    gated_lc = jnp.sum(h_lcf.astype(float) * dh_lcf.astype(float), axis=-1)
    is_zero_lc = gate_lc == 0
    dgate_lc = jnp.where(is_zero_lc, 0, gated_lc / jnp.where(is_zero_lc, 1, gate_lc).astype(float))
    dweights_efd = weight_gradient(h_lcf, dy_lcd, weights_efd, expert_l)
    return dh_lcf, dweights_efd, None, dgate_lc.astype(gate_lc.dtype)


gated_product.defvjp(lambda *operands: (gated_product(*operands), operands), _gated_backward)


def times_gates(x_lcd: Array, gate_lc: Array) -> Array:
    return x_lcd * gate_lc[:, :, None].astype(x_lcd.dtype)


def weight_gradient(left: Array, right: Array, weights_edf: Array, expert_l: Array) -> Array:
    """Adds up the products of blocks with their gradients, for each expert."""
    if has_kernels():
        gradient = kernel_gradient(left, right, expert_l, len(weights_edf))
        return gradient.astype(weights_edf.dtype)

    def add(total_edf: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        left, right, expert = block
        sums = jax.lax.cond(
            expert < len(total_edf),
            lambda: jnp.matmul(left.T, right, preferred_element_type=total_edf.dtype),
            lambda: jnp.zeros_like(left, shape=total_edf.shape[1:], dtype=total_edf.dtype),
        )
        return total_edf.at[expert].add(sums), None

    zeros_edf = jnp.zeros_like(weights_edf, dtype=float)
    return jax.lax.scan(add, zeros_edf, (left, right, expert_l))[0].astype(weights_edf.dtype)


def block_tokens(choices: int, experts: int) -> int:
    """Returns the number of tokens in a block of a grouped product.

    The last block of an expert may not be full: small blocks waste less, large ones read weights
    less often.
    """
    mean = choices // experts
    if has_kernels():
        size, most = MAX_KERNEL_BLOCK, mean // 4
    elif platform() == "gpu":  # large: each block moves the weights of an expert
        size, most = MAX_GPU_BLOCK, mean
    else:
        return min(MAX_BLOCK, max(1, mean))
    while size > max(MIN_TOKENS, most):
        size //= 2
    return size


def has_kernels() -> bool:
    """Returns whether the devices have kernels for grouped products."""
    return is_interpreted() or has_tpu_kernels()


def is_interpreted() -> bool:
    """Returns whether kernels are interpreted on a CPU, which is slow; tests replace this."""
    return False


def in_turn(x_lcd: Array, weights_edf: Array, expert_l: Array, transposed: bool) -> Array:
    """Multiplies one block after the other.

    XLA computes `jax.lax.ragged_dot` with every expert on every token, even on GPUs.
    """
    shape = (x_lcd.shape[1], weights_edf.shape[1 if transposed else 2])
    equation = "cf,df->cd" if transposed else "cd,df->cf"

    def multiply(block: tuple[Array, Array]) -> Array:
        x_cd, expert = block
        return jax.lax.cond(
            expert < len(weights_edf),
            lambda: jnp.einsum(equation, x_cd, weights_edf[expert].astype(x_cd.dtype)),
            lambda: jnp.zeros_like(x_cd, shape=shape),
        )

    return jax.lax.map(multiply, (x_lcd, expert_l))


def tile_of(size: int) -> int:
    """Returns the largest tile that divides an axis; a short axis is one tile."""
    return size if size < TILES[-1] else next(tile for tile in TILES if size % tile == 0)


def padded_size(size: int) -> int:
    """Returns the size of an axis in the kernels: the next one that tiles divide."""
    if size < TILES[-1] or size % TILES[-1] == 0:
        return size
    multiple = TILES[-1] if size < WIDE else WIDE
    return -(-size // multiple) * multiple


def padded(x: Array, *axes: int) -> Array:
    """Pads axes with zeros to the sizes that they have in the kernels."""
    sizes = [padded_size(size) if axis in axes else size for axis, size in enumerate(x.shape)]
    ends = [(0, after - before) for before, after in zip(x.shape, sizes, strict=True)]
    return jnp.pad(x, ends) if any(end for _, end in ends) else x


def kernel_product(x_lcd: Array, weights_edf: Array, expert_l: Array, transposed: bool) -> Array:
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
    )
    return y_lcf[:, :, :width]


def kernel_gradient(x_lcd: Array, dy_lcf: Array, expert_l: Array, experts: int) -> Array:
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
    # If none is missing, the last expert's blocks continue.
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
) -> Array:
    """Calls a kernel with the experts of blocks, two arrays and a float32 accumulator."""
    varies = [jax.typeof(x).manual_axis_type.varying for x in operands]
    over = frozenset().union(*varies)
    pairs = zip(operands, varies, strict=True)
    operands = tuple(jax.lax.pcast(x, tuple(over - axes), to="varying") for x, axes in pairs)
    dtype, axis_type = operands[1].dtype, jax.typeof(operands[1]).manual_axis_type
    flops = 2 * operands[1].size * shape[-1]
    blocks = len(operands[0])  # each reads at most one expert
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
        interpret=is_interpreted(),
    )(*operands)
