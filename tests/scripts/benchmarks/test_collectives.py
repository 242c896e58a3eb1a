"""The benchmark of collectives computes each of them, and predicts how they grow."""

import jax
import numpy as np
import pytest

from scripts.benchmarks.collectives import AXIS, KINDS, collective, growth, measured, predicted

COUNT = 4


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_the_collective_that_it_names(kind: str) -> None:
    rows = np.arange(COUNT * COUNT, dtype=np.float32).reshape(COUNT, COUNT)  # one a device
    expected = {
        "all-reduce": np.tile(rows.sum(axis=0), (COUNT, 1)),
        "all-gather": np.tile(rows.ravel(), (COUNT, 1)),
        "reduce-scatter": rows.sum(axis=0)[:, None],
        "all-to-all": rows.T,
        "collective-permute": np.roll(rows, 1, axis=0),
    }[kind]
    mesh = jax.make_mesh((COUNT,), (AXIS,), devices=jax.devices()[:COUNT])
    function = jax.shard_map(
        collective(kind, COUNT), mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)
    )
    placed = jax.device_put(rows.ravel(), jax.NamedSharding(mesh, jax.P(AXIS)))
    np.testing.assert_array_equal(jax.jit(function)(placed), expected.ravel())


def test_times_are_measured_on_powers_of_two() -> None:
    times = measured("all-to-all", 4096)
    assert [*times] == [2, 4, 8] and min(times.values()) > 0


def test_an_all_to_all_grows_with_the_devices_and_an_all_reduce_does_not() -> None:
    """GShard, section 5.3: by the square root of the devices, but for where a torus wraps."""
    exchange, reduction = (
        predicted(kind, 32 * 10**6, "v3") for kind in ("all-to-all", "all-reduce")
    )
    assert [*exchange] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert exchange[512] / exchange[32] == pytest.approx(4)
    assert growth(exchange) == pytest.approx(4)
    assert 0.5 < (growth(reduction) or 0) < 1.1
