"""Multiplies blocks of tokens, each with the weights of its expert, on one device."""

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.custom_vjp
def grouped_product(x_lcd: Array, weights_edf: Array, expert_l: Array) -> Array:
    """Multiplies each block by the weights of its expert.

    Blocks are in the order of their experts; the last ones may have no expert, and give zeros.
    """
    # On CPUs and TPUs a ragged product costs as much as every expert on every token.
    return jax.lax.platform_dependent(
        x_lcd, weights_edf, expert_l, cpu=in_turn, tpu=in_turn, default=ragged
    )


def _product_backward(residuals: tuple[Array, ...], dy_lcf: Array) -> tuple[Array, Array, None]:
    x_lcd, weights_edf, expert_l = residuals
    dx_lcd = grouped_product(dy_lcf, jnp.swapaxes(weights_edf, 1, 2), expert_l)

    def add(total_edf: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x_cd, dy_cf, expert = block
        return total_edf.at[expert].add(x_cd.T @ dy_cf), None

    zero_edf = jnp.zeros_like(weights_edf)
    return dx_lcd, jax.lax.scan(add, zero_edf, (x_lcd, dy_lcf, expert_l))[0], None


grouped_product.defvjp(lambda *operands: (grouped_product(*operands), operands), _product_backward)


def in_turn(x_lcd: Array, weights_edf: Array, expert_l: Array) -> Array:
    """Multiplies one block after the other."""
    shape = (x_lcd.shape[1], weights_edf.shape[2])

    def multiply(block: tuple[Array, Array]) -> Array:
        x_cd, expert = block
        return jax.lax.cond(
            expert < len(weights_edf),
            lambda: x_cd @ weights_edf[expert],
            lambda: jnp.zeros_like(x_cd, shape=shape),
        )

    return jax.lax.map(multiply, (x_lcd, expert_l))


def ragged(x_lcd: Array, weights_edf: Array, expert_l: Array) -> Array:
    """Multiplies all blocks at once."""
    sizes_e = x_lcd.shape[1] * jnp.bincount(expert_l, length=len(weights_edf))
    y = jax.lax.ragged_dot(x_lcd.reshape(-1, x_lcd.shape[-1]), weights_edf, sizes_e)
    is_block_l11 = (expert_l < len(weights_edf))[:, None, None]
    return jnp.where(is_block_l11, y.reshape(*x_lcd.shape[:-1], -1), 0)
