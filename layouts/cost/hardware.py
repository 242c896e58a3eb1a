"""Reads the published rates of devices from chips.toml, the only table of such numbers."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax

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

        The sources in chips.toml give 394, 918 and 1,836 TOPS in int8 for v5e, v5p and v6e, 4,614
        TFLOP/s in 8-bit floats for tpu7x, and 1,979 in both for H100: twice those in bfloat16.
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


TABLE = tomllib.loads(Path(__file__).with_name("chips.toml").read_text())
CHIPS = {name: Chip(**numbers) for name, numbers in TABLE["tpu"].items()}
GPUS = {name: Chip(**numbers) for name, numbers in TABLE["gpu"].items()}
GPUS_OF_A_NODE = (1, 2, 4, 8)
GPU_TARGETS = {GPUS[name].kind: numbers for name, numbers in TABLE["gpu_target"].items()}
"""What the compiler asks of a GPU besides memory."""
NETWORK_BANDWIDTH: dict[str, float] = TABLE["network_bandwidth"]
"""Bytes/s of a chip to other slices, or of a GPU to other nodes."""

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
