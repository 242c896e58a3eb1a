"""What devices can do at their best, from their makers' data sheets."""

from collections.abc import Iterable

import jax

# Peak matrix-product FLOP/s of one JAX device in bfloat16, by the start of its device kind.
PEAK_BF16_FLOPS = {
    "TPU v2": 22.5e12,  # one core
    "TPU v3": 61.5e12,  # one core
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(devices: Iterable[jax.Device]) -> float | None:
    """Peak bfloat16 FLOP/s of these devices together; None where a kind is not in the table."""
    total = 0.0
    for device in devices:
        peaks = [p for kind, p in PEAK_BF16_FLOPS.items() if device.device_kind.startswith(kind)]
        if not peaks:
            return None
        total += peaks[0]
    return total
