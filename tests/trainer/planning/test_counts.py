"""Tests counts of work: parts are subtracted, and times follow from cycles, products or reads."""

import numpy as np
import pytest

from layouts.cost.collectives import Collective
from layouts.cost.hardware import PRODUCT_UTILISATION
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import OpCost, WorkCounts
from trainer.planning.counts import excess_flops, time_on_slice

SLICE = Topology.named("v3:1x1")
COORDS = np.zeros((2, 2), int)  # both cores of one chip


def test_a_whole_without_a_part_is_the_rest() -> None:
    once, each = (Collective("all-reduce", ("x",), 2, size, 1, "") for size in (8, 4))
    first, second = (OpCost(flops, bytes=1, elements=0, times=1) for flops in (2, 3))
    whole = WorkCounts(10, (once, each, each), (first, second), 9)
    token = WorkCounts(4, (each,), (second,), 3)
    prefill = WorkCounts(6, (once, each), (first,), 9)
    assert whole.without(token) == prefill


def test_cycles_include_the_time_of_reads() -> None:
    clock = round(SLICE.chip.clock_hz)
    product, other = (OpCost(flops, 10**15, 0, 2 - flops, cycles=clock) for flops in (1, 0))
    counts = WorkCounts(1, (), (product, other), read_bytes=10**15)
    timing = time_on_slice(SLICE, COORDS, {"x": 2}, counts)
    assert timing.step_s == pytest.approx(3) and timing.memory_s == 0


def test_products_of_a_trace_wait_for_reads() -> None:
    """A token reads all weights for few products: the memory decides, as by hand."""
    chip = SLICE.chip
    counts = WorkCounts(round(chip.peak_flops), (), read_bytes=round(5 * chip.memory_bandwidth))
    timing = time_on_slice(SLICE, COORDS, {"x": 2}, counts)
    assert timing.products_s == pytest.approx(1 / PRODUCT_UTILISATION)
    assert timing.step_s == timing.memory_s == pytest.approx(5)


def test_kernels_take_the_time_of_their_flops_or_bytes() -> None:
    """The compiler estimates no cycles of them."""
    chip = SLICE.chip
    multiplies = OpCost(round(2 * chip.peak_flops * PRODUCT_UTILISATION), 1, 0, 3)
    reads = OpCost(0, round(5 * chip.memory_bandwidth), 0, 1)
    counts = WorkCounts(1, (), (multiplies, reads))
    timing = time_on_slice(SLICE, COORDS, {"x": 2}, counts)
    assert (timing.products_s, timing.other_s) == pytest.approx((6, 5))


def test_flops_beyond_those_of_the_trace_are_reported() -> None:
    assert excess_flops(1.04e9, 1e9) is None
    assert "1.54 times" in (excess_flops(1.54e9, 1e9) or "")
