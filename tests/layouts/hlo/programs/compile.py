"""Compiles the programs beside this file for absent TPUs, without what no test reads.

python -m tests.layouts.hlo.programs.compile
"""

import os
import re
from pathlib import Path

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}
os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas, topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from tests.layouts.hlo.programs.sizes import B, D, F, N


def explicit_mesh(shape: str) -> Mesh:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{shape}")
    return Mesh(np.array(topology.devices), ("y",), axis_types=(AxisType.Explicit,))


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


def trimmed(text: str) -> str:
    """Leaves out layouts, other settings of the compiler, and the code of kernels."""
    text = re.sub(r"^HloModule.*", "HloModule trimmed", text)
    text = text.replace(str(Path(__file__).parents[4]), "/checkout")
    text = re.sub(r"(?<=\])\{[^}]*\}", "", text)
    cycles = r'backend_config=\{"flag_configs.*?("estimated_cycles":"\d+").*'
    text = re.sub(cycles, r"backend_config={\1}", text)
    return re.sub(r', backend_config=\{"flag_configs.*', "", text)


def write(name: str, function, shape: str, *arrays) -> None:
    mesh = explicit_mesh(shape)
    with jax.set_mesh(mesh):
        arguments = [
            jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, jax.P(*place)))
            for sizes, place in arrays
        ]
        text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    Path(__file__).with_name(f"{name}.txt").write_text(trimmed(text))


if __name__ == "__main__":
    x, wi, wo = (B, D), (D, F), (F, D)
    write("windowed_product", windowed_product, "2x4",
          (x, (None, "y")), (wi, (None, "y")), (wo, ("y", None)))  # fmt: skip
    write("gathered_weights", gathered_weights, "4x4", ((16 * B, D), ("y", None)),
          ((N, *wi), (None, "y", None)), ((N, *wo), (None, None, "y")))  # fmt: skip
