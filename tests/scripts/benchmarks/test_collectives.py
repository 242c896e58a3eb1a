"""The benchmark of collectives computes each of them, and predicts how they grow."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.errors import UserError
from layouts.cost.interconnect import Topology
from scripts.benchmarks.collectives import (
    AXIS,
    KINDS,
    Flags,
    benchmark,
    collective,
    measure_call,
    neighbours,
    predict,
    slices_of,
)

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


def test_the_program_that_is_measured_has_the_collective() -> None:
    for kind in KINDS:
        row = measure_call(kind, 1, COUNT)
        assert row["compiled"] == (kind,)
        assert row["seconds"] > 0 and row["devices"] == COUNT
        assert row["received_bytes_per_s"] * row["seconds"] == pytest.approx(
            1e6 * {"all-reduce": 1.5, "collective-permute": 1}.get(kind, 0.75)
        )


def times(kind: str, *topologies: str) -> list[float]:
    return [
        row["seconds"]
        for name in topologies
        for row in predict(Topology.named(name), [32])
        if row["kind"] == kind
    ]


def test_an_all_to_all_grows_by_the_root_of_the_devices_and_the_others_stay() -> None:
    """GShard, section 5.3; squares of chips that are no ring, 32 to 512 cores."""
    squares = ("v3:4x4", "v3:8x8", "v3:16x16")
    first, second, third = times("all-to-all", *squares)
    assert (second / first, third / first) == (pytest.approx(4**0.5), pytest.approx(16**0.5))
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        assert times(kind, *squares) == pytest.approx(times(kind, "v3:8x8") * 3, rel=0.06)
    assert len(set(times("collective-permute", *squares))) == 1


def test_a_permutation_on_a_slice_is_between_neighbours() -> None:
    box = np.array([*itertools.product(range(3), range(4), range(2), range(2))])[:, :3]
    steps = np.abs(np.diff(box[neighbours(box)], axis=0)).sum(axis=1)
    assert len(steps) == 47 and steps.max() == 1


def test_the_slices_of_a_chip_double() -> None:
    assert [topology.name for topology in slices_of("v3")][:3] == ["v3:2x2", "v3:2x4", "v3:4x4"]
    assert [topology.devices for topology in slices_of("v5p")] == [4 * 2**i for i in range(11)]


def test_a_command_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topologies = ("v3:32x32", "v3:8x8", "2xv5e:4x8", "h100:4x8")
    json_file = tmp_path / "result.json"
    benchmark(Flags(topologies=topologies, predict_only=True, json_file=str(json_file)))
    shown = capsys.readouterr().out
    written = json.loads(json_file.read_text())
    assert [row["topology"] for row in written["predicted"][::10]] == [
        "v3:32x32", "v3:8x8", "2xv5e:4x8", "h100:4x8",
    ]  # fmt: skip
    assert written["measured"] == [] and min(row["seconds"] for row in written["predicted"]) > 0
    assert "v3:32x32" in shown


def test_a_slice_that_nobody_offers_is_refused() -> None:
    with pytest.raises(UserError, match=r"v3:32x33.*Legal nearby: .*v3:32x32"):
        benchmark(Flags(topologies=("v3:32x33",)))


@pytest.mark.parametrize("topology", ["h100:1x1", "v5e:1x1"])
def test_one_device_runs_no_collectives(topology: str) -> None:
    with pytest.raises(UserError, match=f"{topology}: one device runs no collectives.*several"):
        benchmark(Flags(topologies=(topology,), predict_only=True))


def test_what_is_named_twice_is_predicted_once(tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    twice, sizes = ("v3:2x2", "v3:2x2"), (8, 2, 8)
    benchmark(Flags(topologies=twice, megabytes=sizes, predict_only=True, json_file=str(json_file)))
    rows = json.loads(json_file.read_text())["predicted"]
    assert [(row["megabytes"], row["kind"]) for row in rows] == [
        (size, kind) for size in (8, 2) for kind in KINDS
    ]
