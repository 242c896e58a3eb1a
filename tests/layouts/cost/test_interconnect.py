"""How long exchanges take on a slice: the published estimates, and what follows from the shape."""

import dataclasses

import numpy as np
import pytest

from configs.errors import UserError
from layouts.cost.collectives import Collective
from layouts.cost.hardware import LINK_UTILISATION, NETWORK_BANDWIDTH, PRODUCT_UTILISATION
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import OpCost
from layouts.cost.step_time import compute_s, coordinates, seconds

POD = Topology.named("v3:32x32")


def row(chips: int, cores: int = 2, stride: int = 1) -> np.ndarray:
    """Cores of chips along the first axis of the torus."""
    return np.array([[stride * i, 0] for i in range(chips) for _ in range(cores)])


def square(side: int) -> np.ndarray:
    return np.array([[i, j] for i in range(side) for j in range(side) for _ in range(2)])


def test_the_guide_takes_as_long_for_its_activations() -> None:
    """The Giant Models guide, section 2.4: 1.01 s at 85 GB/s, 1.5 times that in truth."""
    gathered = 512 * 1024 * 8192 // 32 * 2  # BLD in bfloat16, split over 32 rows of the mesh
    total_s = 64 * 10 * POD.seconds("all-gather", gathered, row(32))
    assert total_s == pytest.approx(1.01 * 1.5, rel=0.1)


def test_a_ring_has_two_ways_and_a_line_one() -> None:
    ring = POD.seconds("all-gather", 1e9, row(32))
    line = Topology.named("v3:16x16").seconds("all-gather", 1e9, row(16))
    assert line / ring == pytest.approx(2 * (15 / 16) / (31 / 32))


def test_groups_that_share_links_wait_for_each_other() -> None:
    alone = POD.seconds("all-reduce", 1e9, row(32))
    assert POD.seconds("all-reduce", 1e9, row(32, cores=1)) == pytest.approx(2 * alone)
    apart = POD.seconds("all-reduce", 1e9, row(16, stride=2))
    assert apart == pytest.approx(2 * alone * (15 / 16) / (31 / 32))


def test_exchanges_of_all_with_all_grow_with_the_side() -> None:
    """GShard, section 5.2: the square root of the devices."""
    times = [POD.seconds("all-to-all", 1e6, square(side)) for side in (8, 16)]
    assert times[1] == pytest.approx(2 * times[0])
    wrapped = POD.seconds("all-to-all", 1e6, square(32))
    link = POD.chip.link_bandwidth * LINK_UTILISATION
    # Half of what a half of the chips sends crosses to the other half, over 2 x 32 links.
    assert wrapped == pytest.approx(512 * 2 * 1e6 / 2 / (2 * 32 * link))


def test_work_takes_as_long_as_its_products_or_its_way_through_memory() -> None:
    chip = POD.chip
    multiplies, reads = OpCost(10**12, 8, 0, 2), OpCost(8, 10**9, 0, 1)
    products_s, other_s = compute_s(chip, [multiplies, reads, OpCost(0, 10**9, 7, 3)])
    read_s = 1e9 / chip.memory_bandwidth
    assert products_s == pytest.approx(2e12 / chip.peak_flops / PRODUCT_UTILISATION + read_s)
    assert other_s == pytest.approx(3 * read_s)


@pytest.mark.parametrize(
    ("chip", "dtype", "times"),
    [("v4:2x2x1", "int8", 1), ("v6e:2x2", "int8", 2), ("v6e:2x2", "float8_e4m3fn", 1),
     ("h100:1x1", "float8_e4m3fn", 2), ("h100:1x1", "bfloat16", 1)],
)  # fmt: skip
def test_products_of_8_bits_take_half_as_long_where_chips_have_them(
    chip: str, dtype: str, times: int
) -> None:
    kind = Topology.named(chip).chip
    narrow, wide = (compute_s(kind, [OpCost(10**12, 8, 0, 1, each)])[0] for each in (dtype, ""))
    assert wide == pytest.approx(times * narrow)


TWO = Topology.named("2xv5e:16x16")
BOXES = {"slice": 2, "data": 256}


def seconds_over(kind: str, *mesh_axes: str) -> float:
    collective = Collective(kind, mesh_axes, 0, 10**9, 1, "")
    group = np.prod([BOXES[name] for name in mesh_axes])
    places = coordinates(TWO, BOXES, None, "slice:-1")
    return seconds(TWO, places, BOXES, collective._replace(group=int(group)))


def test_slices_exchange_over_the_network_what_a_chip_keeps() -> None:
    one = Topology.named("v5e:16x16")
    assert TWO.devices == 512 and Topology.named("1xv5e:16x16") == one
    rate = NETWORK_BANDWIDTH["v5e"] * LINK_UTILISATION
    inside = coordinates(one, {"data": 256}, None).reshape(-1, 2)
    for kind, times in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        inside_s = one.seconds(kind, 1e9, inside)
        assert seconds_over(kind, "data") == pytest.approx(inside_s)
        # Each of two slices sends its half to the other, of an all-reduce also the sums back.
        assert seconds_over(kind, "slice") == pytest.approx(times * 0.5e9 / rate)
        both_s = inside_s + times * 0.5e9 / 256 / rate
        assert seconds_over(kind, "slice", "data") == pytest.approx(both_s)
    inside_s = one.seconds("all-to-all", 1e9, inside)
    assert seconds_over("all-to-all", "slice", "data") == pytest.approx(inside_s + 0.5e9 / rate)
    assert seconds_over("collective-permute", "slice") == pytest.approx(1e9 / rate)


def test_several_slices_need_a_mesh_axis_for_the_network() -> None:
    with pytest.raises(UserError, match=r"Layout\.slices = None: the devices are in 2 slices"):
        coordinates(TWO, BOXES, None)


def test_cores_of_a_chip_use_no_link() -> None:
    one = POD.seconds("all-gather", 1e9, row(1))
    assert one == pytest.approx(1e9 / POD.chip.memory_bandwidth)


def test_a_group_lies_along_the_axes_in_which_it_differs() -> None:
    assert POD.along(row(8, stride=4)) == [(8, 4, True)]
    assert POD.along(row(8)) == [(8, 1, False)]
    assert POD.along(square(32)) == [(32, 1, True)] * 2


def test_of_three_axes_only_whole_cubes_are_rings() -> None:
    line = np.array([[0, 0, z] for z in range(4)])
    for name, wraps in (("v5p:2x2x4", False), ("v4:2x4x4", False), ("tpu7x:4x4x4", True)):
        assert Topology.named(name).along(line) == [(4, 1, wraps)]


def test_cores_are_numbered_as_tpus_number_them() -> None:
    places = coordinates(Topology.named("v3:4x2"), {"data": 4, "model": 4}, None)
    assert places.shape == (4, 4, 2)
    # Of a chip, then of a host of four chips.
    chips = [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1]]
    assert places.reshape(-1, 2).tolist() == [chip for chip in chips for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "Legal: v2, v3, v4, v5e, v5p, v6e"),
        ("v5:2x2", "Did you mean v5"),
        ("v3", "v3 has a torus of 2 axes.  Legal: v3:"),
        ("v3:4x4x4", "as in v3:4x4"),
        ("v4:4x4", "as in v4:4x4x4"),
        ("v3:0x4", "numbers of chips"),
        ("2xv3:4x4", "network between slices of v3 is not published.  Legal: one slice, v3:4x4"),
    ],
)
def test_an_unknown_slice_is_refused_with_what_is_legal(name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"--topology={name}.*{message}"):
        Topology.named(name)


@dataclasses.dataclass(frozen=True)
class Device:
    """What is asked of a device that is there."""

    device_kind: str
    coords: tuple[int, ...]
    slice_index: int = 0


def devices(kind: str) -> np.ndarray:
    """Two cores on each of 4 x 2 chips, which stand somewhere in a larger torus."""
    cores = [Device(kind, (x, y + 4, 0)) for x in range(4) for y in range(2) for _ in range(2)]
    devices = np.empty(len(cores), object)
    devices[:] = cores
    return devices


def test_devices_at_hand_are_a_slice_of_their_kind() -> None:
    assert Topology.of(devices("TPU v3")) == Topology.named("v3:4x2")
    assert Topology.of(devices("NVIDIA H200")) is None
    far = [dataclasses.replace(device, slice_index=1) for device in devices("TPU v5 lite")]
    several = np.array([*devices("TPU v5 lite"), *far], object)
    assert Topology.of(several) == Topology.named("2xv5e:4x2")


def test_a_permutation_sends_all_bytes_to_the_next_chip() -> None:
    topology, size = Topology.named("v5e:4x4"), 1e9
    alone_s = size / (topology.chip.link_bandwidth * LINK_UTILISATION)
    near, far = row(4, cores=1), row(2, cores=1, stride=2)  # two far groups share their links
    assert topology.seconds("collective-permute", size, near) == pytest.approx(alone_s)
    assert topology.seconds("collective-permute", size, far) == pytest.approx(2 * alone_s)


def test_a_permutation_leaves_a_chip_though_its_first_pair_does_not() -> None:
    topology, mesh, size = Topology.named("v3:2x2"), {"y": 8}, 10**9
    permute = Collective("collective-permute", ("y",), 2, size, 1, "")
    alone_s = size / (topology.chip.link_bandwidth * LINK_UTILISATION)
    assert seconds(topology, coordinates(topology, mesh, None), mesh, permute) >= alone_s


def test_a_switch_takes_what_every_gpu_sends_at_once() -> None:
    node = Topology.named("h100:1x8")
    gpus = np.arange(8)[:, None]
    rate = 450e9 * LINK_UTILISATION  # of the 900 GB/s of NVLink, those in one direction
    assert node.seconds("all-gather", 1e9, gpus) == pytest.approx(7 / 8 * 1e9 / rate)
    assert node.seconds("all-reduce", 1e9, gpus) == pytest.approx(2 * 7 / 8 * 1e9 / rate)
    assert node.seconds("all-to-all", 1e9, gpus) == pytest.approx(7 / 8 * 1e9 / rate)
    assert node.seconds("collective-permute", 1e9, gpus) == pytest.approx(1e9 / rate)
    assert node.seconds("all-to-all", 1e9, gpus[:4]) == pytest.approx(3 / 4 * 1e9 / rate)


def test_between_nodes_each_gpu_has_an_adapter() -> None:
    nodes, mesh = Topology.named("h100:4x8"), {"data": 4, "model": 8}
    places = coordinates(nodes, mesh, None)
    assert places.shape == (4, 8, 2)
    assert (places[:, 0, -1] == np.arange(4)).all()  # in the order of the processes, as in JAX
    inside, between = (
        seconds(nodes, places, mesh, Collective("all-reduce", (axis,), group, 10**9, 1, ""))
        for axis, group in (("model", 8), ("data", 4))
    )
    assert inside == pytest.approx(
        Topology.named("h100:1x8").seconds("all-reduce", 1e9, places[0, :, :1])
    )
    assert between == pytest.approx(2 * 3 / 4 * 1e9 / (50e9 * LINK_UTILISATION))


def test_a_group_that_straddles_nodes_waits_for_its_adapters() -> None:
    """Groups of 3 on nodes of 8: [0, 1, 2] is inside one; of [6, 7, 8], 8 is alone in a node."""
    nodes, mesh = Topology.named("h100:3x8"), {"data": 8, "model": 3}
    places = coordinates(nodes, mesh, None)
    assert places[2, :, -1].tolist() == [0, 0, 1]
    switch, adapter = 450e9 * LINK_UTILISATION, 50e9 * LINK_UTILISATION
    for kind, times in (("all-gather", 1), ("all-reduce", 2)):
        straddles_s = seconds(nodes, places, mesh, Collective(kind, ("model",), 3, 10**9, 1, ""))
        assert straddles_s == pytest.approx(times * (0.5e9 / switch + 0.5e9 / adapter))


def test_names_of_slices_say_how_many_devices_they_have() -> None:
    names = ("v3:32x32", "v4:4x4x8", "2xv5e:16x16", "h100:4x8")
    assert [Topology.named(name).devices for name in names] == [2048, 128, 512, 32]
