"""Tests counts of work: parts are subtracted, and times follow from cycles, products or reads."""

import numpy as np
import pytest

from layouts.cost.collectives import Collective
from layouts.cost.interconnect import Slice
from layouts.cost.jaxpr_cost import OpCost
from layouts.cost.step_time import PRODUCT_UTILISATION
from trainer.planning.counts import WorkCounts, time_on_slice

SLICE = Slice.named("v3:1x1")
COORDS = np.zeros((2, 2), int)  # both cores of one chip


def test_a_whole_without_a_part_is_the_rest() -> None:
    once, each = (Collective("all-reduce", ("x",), 2, size, 1, "") for size in (8, 4))
    first, second = (OpCost(flops, bytes=1, elements=0, times=1) for flops in (2, 3))
    whole = WorkCounts(10, (once, each, each), (first, second), {"products": 7, "other": 5}, 9)
    token = WorkCounts(4, (each,), (second,), {"products": 2, "other": 1}, 3)
    prefill = WorkCounts(6, (once, each), (first,), {"products": 5, "other": 4}, 9)
    assert whole.without(token) == prefill


def test_cycles_include_the_time_of_reads() -> None:
    clock = round(SLICE.chip.clock_hz)
    counts = WorkCounts(1, (), cycles={"products": 2 * clock, "other": clock}, read_bytes=10**15)
    timing = time_on_slice(SLICE, COORDS, {"x": 2}, counts)
    assert timing.step_s == pytest.approx(3) and timing.memory_s == 0


def test_products_of_a_trace_wait_for_reads() -> None:
    """A token reads all weights for few products: the memory decides, as by hand."""
    chip = SLICE.chip
    counts = WorkCounts(round(chip.peak_flops), (), read_bytes=round(5 * chip.memory_bandwidth))
    timing = time_on_slice(SLICE, COORDS, {"x": 2}, counts)
    assert timing.products_s == pytest.approx(1 / PRODUCT_UTILISATION)
    assert timing.step_s == timing.memory_s == pytest.approx(5)
