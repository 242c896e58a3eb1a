"""Multiplies blocks of tokens, each with the weights of its expert, on one device."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from layouts.einsum import has_tpu_kernels, platform
from models.feed_forward.moe.grouped_kernel import MIN_TOKENS, kernel_gradient, kernel_product

MAX_BLOCK, MAX_KERNEL_BLOCK, MAX_GPU_BLOCK = 128, 512, 1024  # tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    x_lcd: Array, weights_edf: Array, expert_l: Array, transposed: bool = False
) -> Array:
    """Multiplies each block by the weights of its expert, or by their transpose.

    Blocks are in the order of their experts; the last ones may have no expert, and give zeros.
    """
    if has_kernels():
        return kernel_product(
            x_lcd, weights_edf, expert_l, transposed=transposed, interpret=is_interpreted()
        )
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

    The gradient of gates is computed from the gradient of the hidden layer, so that it needs no
    result, and rematerialization computes none.  A gate of 0 has the gradient 0, which its router
    multiplies by the gate.
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
        gradient = functools.partial(kernel_gradient, interpret=is_interpreted())
        return gradient(left, right, expert_l, len(weights_edf)).astype(weights_edf.dtype)

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
    """Returns how many tokens of one expert a grouped product takes at a time.

    The last block of an expert is not full: small blocks waste less, large ones read weights
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
    """Tells whether the devices have kernels for grouped products."""
    return is_interpreted() or has_tpu_kernels()


def is_interpreted() -> bool:
    """Tells whether kernels run on a CPU, which is slow: tests replace this."""
    return False


def in_turn(x_lcd: Array, weights_edf: Array, expert_l: Array, transposed: bool) -> Array:
    """Multiplies one block after the other.

    XLA computes `jax.lax.ragged_dot` as every expert on every token, on GPUs as well.
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
