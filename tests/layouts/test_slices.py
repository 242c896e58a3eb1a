"""Meshes of several slices: which mesh axis leaves a slice, and what is said of a wrong one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax.experimental import mesh_utils

from configs.errors import UserError
from layouts.cost.interconnect import Topology
from layouts.device_order import TopologyDevice, coordinates, device_permutation, topology_devices
from layouts.layout import Layout
from layouts.lint.report import lint
from layouts.mesh import make_mesh, over_slices, slice_counts, slices_of
from tests.layouts.lint.recorded import recorded
from tests.toys import SPLITTABLE

TORUS = Topology.named("v3:4x2").torus  # 16 cores
MESH = {"data": 12, "model": 4}


def pod(slices: int) -> list[TopologyDevice]:
    """The cores of several slices, in an order that mixes them."""
    devices = topology_devices(TORUS, "TPU v3", slices)
    return devices[::3] + devices[1::3] + devices[2::3]


def slice_of_each(devices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.vectorize(lambda device: device.slice_index)(devices)


def test_one_mesh_axis_leaves_a_slice_and_the_other_stays() -> None:
    devices = over_slices(pod(3), MESH, None, "data:3")
    assert devices.shape == (12, 4)
    assert slice_of_each(devices).tolist() == [[i // 4] * 4 for i in range(12)]
    assert len({device.id for device in devices.flat}) == 48


@pytest.mark.parametrize("counts", [(3, 1), (1, 3)])
def test_it_is_the_mesh_of_jax(counts: tuple[int, int]) -> None:
    sizes = {"data": 4 * counts[0], "model": 4 * counts[1]}
    devices = over_slices(pod(3), sizes, None, f"data:{counts[0]},model:-1")
    hybrid = mesh_utils.create_hybrid_device_mesh(
        (4, 4), counts, pod(3), allow_split_physical_axes=True
    )
    np.testing.assert_array_equal(devices, hybrid)


def test_each_slice_has_its_devices_in_order() -> None:
    order, inside = "data:x;model:y;model:core", {"data": 4, "model": 4}
    devices = over_slices(pod(2), {"data": 8, "model": 4}, order, "data:2")
    for index, part in enumerate(np.split(devices, 2)):
        cores = sorted((d for d in pod(2) if d.slice_index == index), key=coordinates)
        numbers = device_permutation(order, inside, TORUS)
        np.testing.assert_array_equal(part, np.array(cores, object)[numbers])


def test_processes_are_slices_of_devices_that_have_none() -> None:
    def devices(platform: str) -> list[TopologyDevice]:
        return [
            dataclasses.replace(device, platform=platform, process_index=device.id // 4)
            for device in topology_devices(TORUS, "")
        ]

    assert [len(group) for group in slices_of(devices("cpu"))] == [4] * 4
    assert [len(group) for group in slices_of(devices("tpu"))] == [16]


def test_one_slice_alone_says_nothing_of_several() -> None:
    plain, spread = (make_mesh(Layout(mesh="data:8", slices=s)) for s in (None, "data:2"))
    assert plain == spread


def test_several_slices_of_tpus_need_a_word() -> None:
    with pytest.raises(UserError, match=r'in 2 slices\..*Layout\.slices = "data:-1"'):
        over_slices(pod(2), {"data": 32}, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "Legal: slices by mesh axis, as in 'data:2', or 'data:-1' for all."),
        ("data:two", "Legal: slices by mesh axis, as in 'data:2', or 'data:-1' for all."),
        ("dat:2", "no such mesh axis: dat.  Did you mean data?  Legal: data, model."),
        ("data:0", "data:0 is not a number of slices."),
        ("data:2,data:4", "a mesh axis is named twice."),
        ("data:-1,model:-1", "only one number may be -1, found 2."),
        ("data:4", "4 slices, and the devices are in 6."),
        ("model:6", "6 slices do not divide model = 4."),
    ],
)
def test_slices_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        slice_counts(text, MESH, 6)
    head, rest = f"Layout.slices = {text!r}", str(error.value)
    assert rest.startswith(head) and rest.removeprefix(head).lstrip(":. ").startswith(message)


def test_the_lint_reports_it_beside_all_else() -> None:
    layout = Layout(mesh="data:4,model:2", rules="bach:data", slices="dta:2")
    messages = [
        str(problem)
        for problem in lint(layout, {"data": 4, "model": 2}, recorded(SPLITTABLE, 16, 24),
                            {"Layout.slices": "layouts/mine.gin:4"})
    ]  # fmt: skip
    head = "slices 'dta:2' (Layout.slices, layouts/mine.gin:4): no such mesh axis: dta."
    assert any(text.startswith(head) for text in messages)
    assert any(text.startswith("rule bach:data") for text in messages)


def test_slices_divide_the_axis_that_takes_the_remaining_devices() -> None:
    assert slice_counts("data:-1", {"data": 8, "model": 4}, 2) == {"data": 2, "model": 1}
