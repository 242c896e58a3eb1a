"""What devices of one machine cost: rates that are shared."""

import jax
import pytest

from layouts.cost.calibration import HostRates, estimate_host_timing, measure_host
from layouts.cost.collectives import Collective
from layouts.cost.jaxpr_cost import OpCost, WorkCounts

HOST = HostRates(
    devices=4,
    flops_per_s=400.0,
    bytes_per_s=80.0,
    elements_per_s=20.0,
    collective_s=0.5,
    received_per_s=40.0,
)
MESH = {"data": 2, "model": 2}


def test_devices_that_share_a_machine_take_turns() -> None:
    ops = OpCost(100, 20, 0, 3), OpCost(0, 0, 5, 1)
    timing = estimate_host_timing(HOST, MESH, WorkCounts(300, (), ops))
    assert timing.products_s == pytest.approx(3 * 4 * 100 / 400)
    assert timing.other_s == pytest.approx(3 * 4 * 20 / 80 + 4 * 5 / 20)
    assert timing.step_s == pytest.approx(timing.products_s + timing.other_s)


def test_an_exchange_takes_a_start_and_what_all_receive() -> None:
    collective = Collective("all-gather", ("model",), 2, 10, 3, "")
    timing = estimate_host_timing(HOST, MESH, WorkCounts(0, (collective,)))
    assert dict(timing.traffic_s) == {"model": pytest.approx(3 * 0.5 + 4 * 3 * 5 / 40)}


def test_the_rates_of_this_machine() -> None:
    rates = measure_host(jax.devices())
    assert rates.devices == 8 and all(rate > 0 for rate in rates[:4]) and rates.received_per_s > 0
    assert 1e8 < rates.flops_per_s < 1e14  # units, not speed
