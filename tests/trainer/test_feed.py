"""Host batches to device batches: whatever the mesh, each host brings the rows that it holds."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from jax.sharding import NamedSharding

from configs.errors import UserError
from data.batch_sizes import BatchSizes
from data.order import batches
from data.packing.rows import PairRows, Rows
from layouts.layout import Layout
from layouts.mesh import make_mesh
from tests.toys import row_ids
from tests.trainer.bigram import text_rows
from trainer.feed import BatchSharding, dispatch_ahead, part_of

HOSTS = {
    "batch over both hosts": ("batch:data", (slice(0, 2),), (0, 12)),
    "the second host": ("batch:data", (slice(2, 4),), (12, 24)),
    "each host sees every data place": ("batch:data", (slice(None), slice(1, 2)), (0, 24)),
    "batch over two mesh axes": ("batch:data;batch:model", (slice(1, 2),), (6, 12)),
    "the same, the other way round": ("batch:model;batch:data", (slice(None), slice(1)), (0, 12)),
    "rows apart": ("batch:data", (slice(0, 4, 2),), (0, 18)),
    "batch whole, length split": ("length:model", (slice(3, 4),), (0, 24)),
    "batch makes way for length": ("batch:model?;length:model", (slice(0, 4), slice(1)), (0, 24)),
}


@pytest.mark.parametrize("case", HOSTS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_host_reads_the_rows_that_its_devices_hold(
    case: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the other devices of the mesh were some other host's."""
    rules, slices, expected = HOSTS[case]
    layout = Layout(mesh="data:4,model:2", rules=rules)
    mesh = make_mesh(layout)
    devices = set(mesh.devices[slices].flat)

    def indices(sharding: NamedSharding, shape: tuple[int, ...]) -> dict:
        return {d: i for d, i in sharding.devices_indices_map(shape).items() if d in devices}

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", indices)
    assert BatchSharding(layout, mesh, 24, microbatches).host_rows() == expected


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_device_gets_its_part_of_what_its_host_has_read(microbatches: int) -> None:
    """Of 24 rows a host has read 6 to 18; a microbatch has every third of them."""
    every = np.arange(24 * 5).reshape(24, 5)
    slices = [every[i::microbatches] for i in range(microbatches)]
    read = [rows[6 // microbatches : 18 // microbatches] for rows in slices]
    index = (slice(12 // microbatches, 18 // microbatches), slice(None))
    actual = part_of(read[-1], 6 // microbatches, index, 24 // microbatches)
    assert np.array_equal(actual, every[12:18][microbatches - 1 :: microbatches])
    both = part_of(np.stack(read), 6 // microbatches, (slice(None), *index), 24 // microbatches, 1)
    assert np.array_equal(both[-1], actual)


def pair_rows(count: int) -> PairRows:
    """Rows of some segments with a source side beside each, of another length."""
    targets, sources = text_rows(count), text_rows(count, seed=1)
    return PairRows(
        {
            **targets.arrays,
            "sources": sources.targets_BL[:, :16],
            "source_segments": sources.segments_BL[:, :16],
        },
        targets.counts,
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(mesh="data:1"),
        Layout(mesh="data:4,model:2", rules="batch:data;length:model"),
        Layout(mesh="data:2,model:4", rules="batch:data;batch:model"),
        Layout(mesh="data:4,model:2", rules="batch:data;memory:model"),
    ],
    ids=lambda layout: layout.rules,
)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", [text_rows, pair_rows])
def test_a_device_batch_is_the_rows_of_its_step(
    layout: Layout, microbatches: int, kind: Callable[[int], Rows]
) -> None:
    """Microbatch m holds the rows m, m + 3, m + 6 … of the batch: together each row once."""
    rows, mesh = kind(41), make_mesh(layout)
    sharding = BatchSharding(layout, mesh, 24, microbatches)
    on_host = batches(rows, 3, BatchSizes(24), 5, sharding.host_rows())
    fed = ((ids, sharding.to_global_arrays(batch)) for ids, batch in on_host)
    for step, (ids, batch) in zip(range(5, 8), itertools.islice(fed, 3), strict=True):
        assert list(ids) == list(row_ids(3, step, 24, 41))
        for name, expected in rows.batch(ids).items():
            axes = name[-2:] if microbatches == 1 else f"a{name[-2:]}"
            assert batch[name].sharding == NamedSharding(mesh, layout.place(axes))
            actual = np.asarray(batch[name])
            if microbatches > 1:
                for slot in range(microbatches):
                    np.testing.assert_array_equal(actual[slot], expected[slot::microbatches])
            else:
                np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mesh", ["data:1", "data:2"])
def test_rows_of_a_group_stay_together(mesh: str) -> None:
    """Microbatch m holds the pairs of rows m, m + 3, m + 6 …, and its neighbours stay so."""
    layout, rows = Layout(mesh=mesh), text_rows(24).batch(np.arange(24))
    sharding = BatchSharding(layout, make_mesh(layout), 24, 3, rows_together=2)
    batch = sharding.to_global_arrays(rows)
    for name, array in batch.items():
        pairs = rows[name].reshape(12, 2, -1)
        for slot in range(3):
            together = pairs[slot::3].reshape(8, -1)
            np.testing.assert_array_equal(np.asarray(array)[slot], together)


def test_one_row_differs_where_one_row_differs() -> None:
    """The comparison above would see two rows that changed places."""
    layout = Layout(mesh="data:2", rules="batch:data")
    sharding = BatchSharding(layout, make_mesh(layout), 8)
    batch = text_rows(8).batch(np.arange(8))
    actual = sharding.to_global_arrays(text_rows(8).batch(np.array([1, 0, *range(2, 8)])))
    assert (np.asarray(actual["targets_BL"]) != batch["targets_BL"]).any(axis=1).sum() == 2


def test_the_next_call_is_dispatched_before_an_output_is_read() -> None:
    events = []

    def dispatched() -> Iterator[int]:
        for number in range(3):
            events.append(f"dispatch {number}")
            yield number

    for number in dispatch_ahead(dispatched()):
        events.append(f"read {number}")
    assert events == ["dispatch 0", "dispatch 1", "read 0", "dispatch 2", "read 1", "read 2"]
    assert not list(dispatch_ahead([]))


def test_a_batch_that_the_mesh_does_not_divide_is_refused() -> None:
    layout = Layout(mesh="data:4,model:2", rules="batch:data;batch:model")
    mesh = make_mesh(layout)
    with pytest.raises(UserError) as error:
        BatchSharding(layout, mesh, 36, 3).host_rows()
    assert str(error.value) == (
        "Run.batch_sequences = 36 in 3 microbatches: 12 rows do not divide over the mesh "
        "{'data': 4, 'model': 2} by batch = ('data', 'model').  Choose a multiple, or fewer "
        "microbatches."
    )
    with pytest.raises(UserError, match=r"Run.batch_sequences = 12 in 1 microbatches"):
        BatchSharding(layout, mesh, 12).host_rows()
