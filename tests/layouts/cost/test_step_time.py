"""Seconds of a step, from its parts."""

import pytest

from layouts.cost.dataflow import KernelWork
from layouts.cost.hardware import CHIPS, GPUS, PRODUCT_UTILISATION
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import OpCost
from layouts.cost.step_time import Timing, compute_s, op_seconds

CHIP = Topology.named("v3:2x2").chip


def test_overlapped_traffic_counts_only_beyond_the_compute() -> None:
    timing = Timing(2.0, 1.0, {"x": 0.5}, {"y": 2.5})
    assert timing.step_s == 3.5
    assert Timing(2.0, 1.0, {"x": 0.5}, {"y": 2.5, "x": 1.5}).step_s == 4.5
    assert Timing(2.0, 1.0, {}, {}, memory_s=7.0).step_s == 7.0
    assert Timing(2.0, 1.0, {}, {}, memory_s=7.0).parts["waiting for memory"] == 4.0


def test_an_operation_takes_its_flops_or_its_bytes() -> None:
    dense = OpCost(flops=10**12, bytes=8, elements=0, times=3)
    narrow = OpCost(flops=8, bytes=10**9, elements=0, times=2)
    look_up = OpCost(flops=0, bytes=10**9, elements=0, times=5)
    products_s, other_s = compute_s(CHIP, [dense, narrow, look_up])
    read_s = 1e9 / CHIP.memory_bandwidth
    multiply_s = 1e12 / CHIP.peak_flops / PRODUCT_UTILISATION
    assert products_s == pytest.approx(3 * multiply_s + 2 * read_s)
    assert other_s == pytest.approx(5 * read_s)


def test_a_kernel_takes_the_longest_of_three_times() -> None:
    """Of its products, padded to the matrix units of the chip, its exponentials and its bytes."""
    flops = 10**12
    kernel = OpCost(0, 8, 0, times=3).with_kernel(KernelWork(flops, 2 * flops, 4 * flops))
    for name, padding in {"v5p": 2, "v6e": 4}.items():
        chip = CHIPS[name]
        multiply_s = padding * flops / chip.peak_flops / chip.product_utilisation
        assert op_seconds(chip, kernel) == pytest.approx(3 * multiply_s)
        assert op_seconds(chip, kernel._replace(bytes=10**15)) > 3 * multiply_s
        many = kernel.with_kernel(KernelWork(flops, exponentials=chip.exponentials_per_s))
        assert op_seconds(chip, many) == pytest.approx(3)
    h100 = GPUS["h100"]  # whose kernels are not padded
    assert op_seconds(h100, kernel) == pytest.approx(
        3 * flops / h100.peak_flops / PRODUCT_UTILISATION
    )
