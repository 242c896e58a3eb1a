"""Builds meshes of TPUs and GPUs that this machine lacks, for ahead-of-time compilation."""

import importlib.util
import math
import os
from importlib.metadata import entry_points
from pathlib import Path

import jax
from jax.sharding import Mesh

from configs.errors import UserError, one_line
from layouts.cost.hardware import GPU_TARGETS, Chip
from layouts.cost.interconnect import Topology
from layouts.mesh import mesh_of_devices

# The modules that contain each platform's compiler, and the extra that installs it.
COMPILERS = {
    "tpu": (("libtpu",), "plan"),
    "gpu": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "plan-gpu"),
}
JAX_PLUGINS = {"xla_cuda13", "xla_cuda12"}  # the names of these modules as JAX plugins
DEVICE_FILES = {"tpu": ("accel[0-9]*", "vfio/[0-9]*"), "gpu": ("nvidia*", "nvhost*", "dxg")}

# Without the first three, libtpu queries the network for the type of the machine.  The last allows
# several processes to compile at once.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# The device description that XLA's GPU compiler needs (`stream_executor::GpuTargetConfigProto`).
# Its literal numbers are the same for Hopper and Blackwell (NVIDIA's tuning guides of both).
GPU_TARGET = Path(__file__).with_name("gpu_target.txtpb").read_text()


def has_compiler(platform: str) -> bool:
    """Returns whether the compiler for absent TPUs or GPUs is installed."""
    modules, _ = COMPILERS[platform]
    return any(importlib.util.find_spec(name) is not None for name in modules)


def has_device_files(platform: str, folder: Path = Path("/dev")) -> bool:
    """Returns whether the machine has device files of TPUs or GPUs."""
    return any(next(folder.glob(pattern), None) for pattern in DEVICE_FILES[platform])


def leave_absent_devices(device_files: Path = Path("/dev")) -> None:
    """Keeps JAX from starting a TPU or GPU runtime if only the compiler is installed.

    Without TPUs, libtpu prints that it finds none; without GPUs, the CUDA plugin fails.
    """
    installed = [platform for platform in COMPILERS if has_compiler(platform)]
    if jax.config.values["jax_platforms"] or not installed:
        return  # already set by the user, or by JAX itself on a TPU host
    plugins = {plugin.name for plugin in entry_points(group="jax_plugins")}
    is_present = any(has_device_files(platform, device_files) for platform in installed)
    if not is_present and plugins <= JAX_PLUGINS:
        jax.config.update("jax_platforms", "cpu")


def topology_mesh(name: str, sizes: dict[str, int], order: str | None = None) -> Mesh:
    """Builds a mesh of a TPU slice, or of GPU nodes, that this machine lacks.

    Requires the compiler for their platform.
    """
    from jax.experimental import topologies

    topology = Topology.named(name)
    platform, options = "tpu", dict[str, str]()
    if topology.is_gpu:
        platform, target = "cuda", gpu_target(topology.chip)
        shape = f"1x{topology.count}x{topology.extents[0]}"  # slices, hosts, GPUs
        options = {"topology": shape, "target_config": target}
    for variable, value in LIBTPU.items():
        os.environ.setdefault(variable, value)
    try:
        description = topologies.get_topology_desc(name, platform, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={name}: the compiler rejects it: {one_line(error)}") from None
    if len(description.devices) != math.prod(sizes.values()):
        raise UserError(
            f"--topology={name}: the compiler knows it as {len(description.devices)} devices, not "
            f"{math.prod(sizes.values())} of whole chips.  Add --analytic, or choose v5p."
        )
    return mesh_of_devices(description.devices, sizes, None if topology.is_gpu else order)


def gpu_target(chip: Chip) -> str:
    """Returns the description of a GPU for XLA's compiler."""
    numbers = {"bandwidth": round(chip.memory_bandwidth), "memory_bytes": chip.memory_bytes}
    return GPU_TARGET.format(**GPU_TARGETS[chip.kind], **numbers, kind=chip.kind)
