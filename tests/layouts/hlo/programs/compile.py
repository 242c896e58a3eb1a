"""Compiles the programs beside this file for absent TPUs and GPUs, without what no test reads.

python -m tests.layouts.hlo.programs.compile
"""

import os
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.sharding import NamedSharding

from layouts.absent_devices import topology_mesh
from layouts.cost.interconnect import Topology
from tests.layouts.hlo.programs.sizes import B, D, F, N


def windowed_product(h_BD, wi_DF, wo_FD):
    """Gathers an operand while it is multiplied, then scatters a sum likewise."""
    h_BF = jnp.einsum("bd,df->bf", h_BD, wi_DF, out_sharding=jax.P(None, "y"))
    return jnp.einsum("bf,fd->bd", jax.nn.relu(h_BF), wo_FD, out_sharding=jax.P(None, "y"))


def double(x_ref, out_ref):
    """Multiplies a block by a matrix."""
    twice = 2 * jnp.eye(128, dtype=jnp.bfloat16)
    product = jnp.dot(x_ref[...], twice, preferred_element_type=jnp.float32)
    out_ref[...] = product.astype(jnp.bfloat16)


def kernel(x_BD):
    """Runs the kernel over blocks of 512 x 128."""
    block = pallas.BlockSpec((512, 128), lambda i, j: (i, j))
    grid = (x_BD.shape[0] // 512, x_BD.shape[1] // 128)
    shape = jax.ShapeDtypeStruct(x_BD.shape, x_BD.dtype)
    metadata = {"xprof_metadata": "{}"}
    return pallas.pallas_call(
        double, grid=grid, in_specs=[block], out_specs=block, out_shape=shape, name="double",
        metadata=metadata,
    )(x_BD)  # fmt: skip


def gathered_weights(x_BD, w_NDF, w_NFD):
    """Gathers each layer's weights; a kernel runs in each layer."""

    def layer(x_BD, weights):
        wi_DF, wo_FD = (jax.sharding.reshard(w, jax.P(None, None)) for w in weights)
        place = jax.P("y", None)
        x_BD = jax.shard_map(kernel, in_specs=place, out_specs=place, check_vma=False)(x_BD)
        h_BF = jnp.einsum("bd,df->bf", x_BD, wi_DF, out_sharding=place)
        return jnp.einsum("bf,fd->bd", jax.nn.relu(h_BF), wo_FD, out_sharding=place), None

    return jax.lax.scan(layer, x_BD, (w_NDF, w_NFD))[0]


def layers(x_BD, w_NDF, w_NFD):
    """Gathers each layer's weights, and uses them without a kernel."""

    def layer(x_BD, weights):
        wi_DF, wo_FD = (jax.sharding.reshard(w, jax.P(None, None)) for w in weights)
        h_BF = jnp.einsum("bd,df->bf", x_BD, wi_DF, out_sharding=jax.P("y", None))
        return jnp.einsum(
            "bf,fd->bd", jax.nn.relu(h_BF), wo_FD, out_sharding=jax.P("y", None)
        ), None

    return jax.lax.scan(layer, x_BD, (w_NDF, w_NFD))[0]


def trimmed(text: str) -> str:
    """Leaves out layouts, other settings of the compiler, and the code of kernels."""
    text = re.sub(r"^HloModule.*", "HloModule trimmed", text)
    text = text.replace(str(Path(__file__).parents[4]), "/checkout")
    text = re.sub(r"(?<=\])\{[^}]*\}", "", text)
    cycles = r'backend_config=\{"flag_configs.*?("estimated_cycles":"\d+").*'
    text = re.sub(cycles, r"backend_config={\1}", text)
    return re.sub(r', backend_config=\{"flag_configs.*', "", text)


def write(name: str, function, topology: str, *arrays) -> None:
    mesh = topology_mesh(topology, {"y": Topology.named(topology).devices})
    with jax.set_mesh(mesh):
        arguments = [
            jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, jax.P(*place)))
            for sizes, place in arrays
        ]
        text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    Path(__file__).with_name(f"{name}.txt").write_text(trimmed(text))


if __name__ == "__main__":
    x, wi, wo = (B, D), (D, F), (F, D)
    write("windowed_product", windowed_product, "v5e:2x4",
          (x, (None, "y")), (wi, (None, "y")), (wo, ("y", None)))  # fmt: skip
    write("gathered_weights", gathered_weights, "v5e:4x4", ((16 * B, D), ("y", None)),
          ((N, *wi), (None, "y", None)), ((N, *wo), (None, None, "y")))  # fmt: skip
    write("layers_on_gpus", layers, "h100:1x8", ((16 * B, D), ("y", None)),
          ((N, *wi), (None, "y", None)), ((N, *wo), (None, None, "y")))  # fmt: skip
