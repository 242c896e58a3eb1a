"""Lists the published peak rates of devices: the only table of such numbers."""

from collections.abc import Iterable
from typing import NamedTuple

import jax

GIB = 2**30
PRODUCT_UTILISATION = 0.85  # of the peak of most chips


class Chip(NamedTuple):
    """Describes one TPU chip or one GPU.  A device, as JAX counts, is a core where `cores` is 2."""

    kind: str  # what `Device.device_kind` begins with
    cores: int  # devices on a chip
    peak_flops: float  # of a device, matrix products in bfloat16
    clock_hz: float
    memory_bytes: int  # of a device
    memory_bandwidth: float  # of a device, bytes/s
    link_bandwidth: float  # of one link between chips in one direction, bytes/s
    axes: int  # of the torus
    wraps: int
    """An axis of the torus is a ring if its chips are a multiple of this, else a line."""
    source: str

    @property
    def host_bandwidth(self) -> float:
        """Returns the bytes/s between a device and the memory of its host.

        Of TPUs that of PCIe in "How to Scale Your Model" (Austin et al. 2025), part 2, of GPUs
        sixteen lanes of PCIe 5.
        """
        return 64e9 if self.platform == "gpu" else 15e9

    def peak_of(self, dtype: str) -> float:
        """Returns the peak FLOP/s of a device in products of this type.

        The pages below give 394, 918 and 1,836 TOPS in int8 for v5e, v5p and v6e, 4,614 TFLOP/s in
        8-bit floats for tpu7x, and 1,979 in both for H100: twice those in bfloat16.
        """
        fast = {"int8": ("TPU v5", "TPU v6", "NVIDIA"), "float8_e4m3fn": ("TPU7x", "NVIDIA")}
        return self.peak_flops * (2 if self.kind.startswith(fast.get(dtype, ())) else 1)

    @property
    def product_utilisation(self) -> float:
        """Returns the share of the peak that products reach whose sizes suit the matrix units.

        The Giant Models guide, section 2.4, and GShard, section 5.2.  For v6e, the mean of what its
        compiler expects of four products (docs/planning.md).
        """
        return 0.72 if self.kind == "TPU v6 lite" else PRODUCT_UTILISATION

    @property
    def platform(self) -> str:
        """Returns the name of the platform in JAX."""
        return "gpu" if self.kind.startswith("NVIDIA") else "tpu"


# A chip has two links along each axis of the torus.  Clocks of v4 and later are the peak over the
# FLOPs of a cycle: 2 x 128 x 128 x matrix units, of v6e and of a core of tpu7x 2 x 256 x 256 x 4,
# as their compilers count.
JOUPPI = "Jouppi et al. 2020, A Domain-Specific Supercomputer for Training, table 3"
CLOUD = "docs.cloud.google.com/tpu/docs"
CHIPS = {
    "v2": Chip("TPU v2", 2, 22.5e12, 700e6, 8 * GIB, 350e9, 496e9 / 8, 2, 16, JOUPPI),
    "v3": Chip("TPU v3", 2, 61.5e12, 940e6, 16 * GIB, 450e9, 656e9 / 8, 2, 32, JOUPPI),
    "v4": Chip("TPU v4", 1, 275e12, 1050e6, 32 * GIB, 1228e9, 50e9, 3, 4, f"{CLOUD}/v4"),
    "v5e": Chip("TPU v5 lite", 1, 197e12, 1500e6, 16 * GIB, 819e9, 50e9, 2, 16, f"{CLOUD}/v5e"),
    "v5p": Chip("TPU v5", 1, 459e12, 1750e6, 95 * GIB, 2765e9, 100e9, 3, 4, f"{CLOUD}/v5p"),
    "v6e": Chip("TPU v6 lite", 1, 918e12, 1750e6, 32 * GIB, 1638e9, 100e9, 2, 16, f"{CLOUD}/v6e"),
    "tpu7x": Chip("TPU7x", 2, 1153.5e12, 2200e6, 96 * GIB, 3690e9, 100e9, 3, 4, f"{CLOUD}/tpu7x"),
}

# GPUs of one node are joined by a switch: a "link" is all that one sends through it.  No compiler
# counts their cycles here, so their clocks are not needed.
NVIDIA = "NVIDIA's data sheets of H100 and H200 (SXM) and of DGX B200: products without sparsity"
GPUS = {
    "h100": Chip("NVIDIA H100", 1, 989e12, 0, 80 * 10**9, 3350e9, 450e9, 1, 1, NVIDIA),
    "h200": Chip("NVIDIA H200", 1, 989e12, 0, 141 * 10**9, 4800e9, 450e9, 1, 1, NVIDIA),
    "b200": Chip("NVIDIA B200", 1, 2250e12, 0, 180 * 10**9, 8000e9, 900e9, 1, 1, NVIDIA),
}
GPUS_OF_A_NODE = (1, 2, 4, 8)


class GpuTarget(NamedTuple):
    """Describes what the compiler asks of a GPU besides memory."""

    cores: int  # streaming multiprocessors
    capability: int  # major number of the compute capability
    clock_ghz: float
    cache_bytes: int  # of the second level


# NVIDIA's white papers of the H100 and of Blackwell.
GPU_TARGETS = {
    "NVIDIA H100": GpuTarget(132, 9, 1.98, 50 * 2**20),
    "NVIDIA H200": GpuTarget(132, 9, 1.98, 50 * 2**20),
    "NVIDIA B200": GpuTarget(148, 10, 1.965, 126 * 2**20),
}

# Of the data center's network between slices, in one direction and bytes/s: a chip's share of what
# these pages give for a pod of 256 chips, and of v5p and tpu7x for a chip.  For v2 to v4 they give
# none.  Between nodes each GPU has an adapter of 400 Gbit/s.
NETWORK_BANDWIDTH = {
    **{"v5e": 6.4e12 / 8 / 256, "v5p": 50e9 / 8, "v6e": 25.6e12 / 8 / 256, "tpu7x": 100e9 / 8},
    **dict.fromkeys(GPUS, 400e9 / 8),
}

# The share of its bandwidth that a link reaches: the Giant Models guide, section 2.4.
LINK_UTILISATION = 2 / 3

# Peak matrix-product FLOP/s of one JAX device in bfloat16, by the start of its device kind.
PEAK_BF16_FLOPS = {
    **{chip.kind: chip.peak_flops for chip in (*CHIPS.values(), *GPUS.values())},
    "NVIDIA A100": 312e12,
}


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
    """Returns the peak bfloat16 FLOP/s of all devices; None if a kind is not in the table."""
    total = 0.0
    for device in devices:
        peaks = [p for kind, p in PEAK_BF16_FLOPS.items() if device.device_kind.startswith(kind)]
        if not peaks:
            return None
        total += peaks[0]
    return total
