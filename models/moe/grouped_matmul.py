"""Products of blocks of tokens, each with the weights of its expert."""

import functools

import jax
import jax.numpy as jnp

from layouts.layout import Layout, mesh_axes

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped_product(
    layout: Layout, equation: str, x: Array, weights: Array, expert_Gl: Array
) -> Array:
    """Multiplies each block by the weights of its expert: "Glcd,edF->GlcF"."""
    (x_axes, weight_axes), out_axes = _terms(equation)
    contracted = mesh_axes(layout.place(weight_axes)[1])

    def own(x: Array, weights: Array, expert_Gl: Array) -> Array:
        y = _blocks(x, weights, expert_Gl)
        return jax.lax.psum(y, contracted) if contracted else y

    return jax.shard_map(
        own,
        in_specs=(layout.place(x_axes), layout.place(weight_axes), layout.place("Gl")),
        out_specs=layout.place(out_axes),
        check_vma=False,
    )(x, weights, expert_Gl)


def _product_forward(
    layout: Layout, equation: str, x: Array, weights: Array, expert_Gl: Array
) -> tuple[Array, tuple[Array, ...]]:
    return grouped_product(layout, equation, x, weights, expert_Gl), (x, weights, expert_Gl)


def _product_backward(
    layout: Layout, equation: str, residuals: tuple[Array, ...], dy: Array
) -> tuple[Array, Array, None]:
    x, weights, expert_Gl = residuals
    (x_axes, weight_axes), out_axes = _terms(equation)
    turned_axes = weight_axes[0] + weight_axes[:0:-1]
    turned = layout.reshard(jnp.swapaxes(weights, 1, 2), turned_axes)
    dx = grouped_product(layout, f"{out_axes},{turned_axes}->{x_axes}", dy, turned, expert_Gl)
    summed = mesh_axes(layout.place(x_axes)[0])

    def own(x: Array, dy: Array, expert_Gl: Array) -> Array:
        dweights = _block_gradients(x, dy, expert_Gl, weights.shape[0])
        return jax.lax.psum(dweights, summed) if summed else dweights

    dweights = jax.shard_map(
        own,
        in_specs=(layout.place(x_axes), layout.place(out_axes), layout.place("Gl")),
        out_specs=layout.place(weight_axes),
        check_vma=False,
    )(x, dy, expert_Gl)
    return dx, dweights, None


grouped_product.defvjp(_product_forward, _product_backward)


def _blocks(x_Glcd: Array, weights_edf: Array, expert_Gl: Array) -> Array:
    """One device's blocks, each times the weights of its expert."""
    # On a CPU a ragged product costs as much as every expert on every token.
    own = (x_Glcd[0], weights_edf, expert_Gl[0])
    return jax.lax.platform_dependent(*own, cpu=in_turn, default=ragged)[None]


def in_turn(x_lcd: Array, weights_edf: Array, expert_l: Array) -> Array:
    """One block after the other."""
    return jax.lax.map(lambda own: own[0] @ weights_edf[own[1]], (x_lcd, expert_l))


def ragged(x_lcd: Array, weights_edf: Array, expert_l: Array) -> Array:
    """All at once, where the blocks of an expert stand together and experts are in order."""
    sizes_e = x_lcd.shape[1] * jnp.bincount(expert_l, length=weights_edf.shape[0])
    y = jax.lax.ragged_dot(x_lcd.reshape(-1, x_lcd.shape[-1]), weights_edf, sizes_e)
    return y.reshape(*x_lcd.shape[:-1], -1)


def _block_gradients(x_Glcd: Array, dy_Glcf: Array, expert_Gl: Array, experts: int) -> Array:
    """The gradient of one device's blocks by the weights."""
    shape = (experts, x_Glcd.shape[-1], dy_Glcf.shape[-1])

    def add(total_edf: Array, own: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x_cd, dy_cf, expert = own
        return total_edf.at[expert].add(x_cd.T @ dy_cf), None

    zero_edf = jnp.zeros(shape, x_Glcd.dtype)
    return jax.lax.scan(add, zero_edf, (x_Glcd[0], dy_Glcf[0], expert_Gl[0]))[0]


def _terms(equation: str) -> tuple[tuple[str, str], str]:
    inputs, out = equation.split("->")
    first, second = inputs.split(",")
    return (first, second), out
