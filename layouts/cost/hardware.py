"""Reads the published rates of devices from chips.toml, the only table of such numbers."""

import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax

# Of most chips: the Giant Models guide, section 2.4, and GShard, section 5.2.
PRODUCT_UTILISATION = 0.85


class Chip(NamedTuple):
    """Describes one TPU chip or one GPU.  If `cores` is 2, each core is a JAX device."""

    platform: str  # its name in JAX
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
    fast_types: str = ""  # types whose products are twice as fast as bfloat16's
    host_bandwidth: float = 15e9  # between a device and the memory of its host, bytes/s
    product_utilisation: float = PRODUCT_UTILISATION
    """Share of the peak that products reach if their sizes suit the matrix units."""
    matrix_unit: int = 0
    """Rows and columns of a TPU's matrix units, to which the products of a kernel are padded."""
    exponentials_per_s: float = math.inf  # of a kernel

    def peak_of(self, dtype: str) -> float:
        """Returns the peak FLOP/s of a device in products of this type."""
        return self.peak_flops * (2 if dtype in self.fast_types.split() else 1)


TABLE = tomllib.loads(Path(__file__).with_name("chips.toml").read_text())
CHIPS = {name: Chip("tpu", **numbers) for name, numbers in TABLE["tpu"].items()}
GPUS = {name: Chip("gpu", **numbers) for name, numbers in TABLE["gpu"].items()}
GPUS_OF_A_NODE = (1, 2, 4, 8)
GPU_TARGETS = {GPUS[name].kind: numbers for name, numbers in TABLE["gpu_target"].items()}
"""What the compiler needs to know about a GPU besides its memory."""
NETWORK_BANDWIDTH: dict[str, float] = TABLE["network_bandwidth"]
"""Bytes/s from a chip to other slices, or from a GPU to other nodes."""

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
