"""The order of devices: what it means, that it loses none, and what is said of a wrong one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from configs.errors import UserError
from layouts.absent_devices import has_compiler, topology_mesh
from layouts.cost.interconnect import Topology
from layouts.cost.step_time import coordinates
from layouts.device_order import (
    check_order,
    device_permutation,
    order_problems,
    orders,
    splits,
    topology_devices,
    torus_of,
)
from layouts.layout import Layout
from layouts.lint.report import lint
from layouts.mesh import in_order, make_mesh
from tests.layouts.lint.recorded import recorded
from tests.toys import SPLITTABLE

POD = Topology.named("v3:4x4").torus
MESH = {"data": 4, "model": 8}
ORDER = "data:y;model:x;model:core"
RECORD = recorded(SPLITTABLE, 16, 24)


def test_a_mesh_axis_lies_along_the_axes_that_it_names() -> None:
    devices = in_order(topology_devices(POD, "TPU v3"), MESH, ORDER)
    assert [(*d.coords[:2], d.core_on_chip) for d in devices[3]] == [
        (x, 3, core) for x in range(4) for core in range(2)
    ]
    assert [d.coords[:2] for d in devices[:, 2]] == [(1, y) for y in range(4)]


def test_what_is_named_later_lies_nearer() -> None:
    order = "data:x2;model:y;model:x2;data:core"
    devices = in_order(topology_devices(POD, "TPU v3"), MESH, order)
    assert {d.coords[0] for d in devices[0]} == {0, 1}
    assert {d.coords[0] for d in devices[:, 0]} == {0, 2}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v3:4x4", {"data": 4, "model": 8}),
        ("v3:4x4", {"data": 1, "model": 32}),
        ("v3:4x2", {"data": 4, "fsdp": 2, "model": 2}),
        ("v4:4x2x3", {"data": 6, "model": 4}),
    ],
)
def test_every_order_has_each_device_once(name: str, mesh: dict[str, int]) -> None:
    torus = Topology.named(name).torus
    all_orders = list(orders(mesh, torus))
    assert len(set(all_orders)) == len(all_orders)
    for order in all_orders:
        assert order_problems(order, mesh, torus) == []
        numbers = device_permutation(order, mesh, torus)
        assert numbers.shape == tuple(mesh.values())
        assert sorted(numbers.flat) == list(range(numbers.size))


def test_mesh_axes_take_axes_of_the_torus() -> None:
    torus = {"x": 2, "y": 3, "core": 1}
    numbers = device_permutation("data:x;model:y", {"data": 2, "model": 3}, torus)
    assert numbers.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert list(splits([2, 4], [4, 2])) == [[(1, 4), (2, 1)], [(2, 2), (1, 2)]]


def test_orders_that_cost_the_same_are_tried_once() -> None:
    """Along x or along y is the same on a square, spread out or side by side is not."""
    all_orders = list(orders({"data": 8, "model": 4}, POD))
    assert all_orders[0] == "data:y;data:core;model:x"
    assert "data:x;data:core;model:y" not in all_orders
    assert {"data:x2;data:y;model:x2;model:core", "model:y2;model:core;data:x;data:y2"} <= {
        *all_orders
    }


def test_one_device_has_no_order() -> None:
    assert list(orders({"data": 1}, Topology.named("v5e:1x1").torus)) == []


def test_without_coordinates_the_order_is_that_of_jax() -> None:
    plain, ordered = (make_mesh(Layout(mesh="data:2,model:4", order=o)) for o in (None, ORDER))
    assert plain == ordered


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("data=y", "'data=y' is not mesh_axis:torus_axis, as in 'model:x', 'model:x8'."),
        ("data:y;modle:x", "no such mesh axis: modle.  Did you mean model?"),
        ("data:y;model:z", "no such torus axis: z.  Legal: x, y, core."),
        ("data:y;model:x", "core has 2, and nothing is placed along it."),
        ("data:y;model:x2;model:core", "x has 4, and model:x2 takes 2."),
        ("data:y;model:y;model:x;model:core", "y is used whole more than once."),
        ("data:x;data:y;data:core", "data = 4, and data:x;data:y;data:core gives it 32."),
    ],
)
def test_an_order_that_does_not_fit_is_refused_with_some_that_do(order: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_order(order, MESH, POD)
    assert str(error.value).startswith(f"Layout.order = {order!r}: ") and message in str(
        error.value
    )
    assert f"Legal: {ORDER!r}" in str(error.value)


def test_a_mesh_of_some_of_the_devices_has_no_order() -> None:
    with pytest.raises(UserError, match=r"data = 2, and data:y gives it 4\.  Legal: none"):
        check_order(ORDER, {"data": 2, "model": 8}, POD)


def test_the_lint_reports_it_beside_all_else() -> None:
    layout = Layout(mesh="data:4,model:8", rules="bach:data", order="data:y;model:x")
    origins = {"Layout.order": "layouts/mine.gin:4"}
    messages = [str(problem) for problem in lint(layout, MESH, RECORD, origins, POD)]
    head = "order 'data:y;model:x' (Layout.order, layouts/mine.gin:4): core has 2"
    assert any(text.startswith(head) and ORDER in text for text in messages)
    assert any(text.startswith("rule bach:data") for text in messages)
    elsewhere = dataclasses.replace(layout, order="data:q")
    assert any(
        "no such torus axis: q" in str(problem) for problem in lint(elsewhere, MESH, RECORD, {})
    )


def numbers(count: int) -> jax.Array:
    return jnp.sin(jnp.arange(count, dtype=jnp.float32))


def test_the_order_of_devices_changes_no_result() -> None:
    """Two layers and their gradients on eight devices, wherever each has its place in the mesh."""
    layout = Layout(
        mesh="data:2,model:4", rules="batch:data;d_ff:model", param_rules="d_model:data"
    )
    torus, mesh = Topology.named("v3:2x2").torus, {"data": 2, "model": 4}

    def loss(w_DF: jax.Array, x_BD: jax.Array) -> jax.Array:
        h_BF = jnp.tanh(layout.einsum("BD,DF->BF", x_BD, w_DF))
        return jnp.sum(jnp.square(layout.einsum("BF,DF->BD", h_BF, w_DF)))

    def step() -> tuple[jax.Array, jax.Array]:
        w_DF = layout.reshard(numbers(280).reshape(10, 28), "DF", stored=True)
        return jax.value_and_grad(loss)(w_DF, layout.reshard(numbers(40).reshape(4, 10), "BD"))

    def computed(order: str) -> tuple[list[object], list[np.ndarray]]:
        devices = np.array(jax.devices())[device_permutation(order, mesh, torus)]
        with jax.set_mesh(Mesh(devices, tuple(mesh), axis_types=(AxisType.Explicit,) * 2)):
            results = jax.jit(step)()
        return list(devices.flat), [np.asarray(leaf) for leaf in jax.tree.leaves(results)]

    devices, results = computed("data:y;model:x;model:core")
    other_devices, other_results = computed("model:y;data:x;model:core")
    assert devices != other_devices and set(devices) == set(other_devices)
    for result, other in zip(results, other_results, strict=True):
        np.testing.assert_array_equal(result, other)


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize(
    ("name", "order"), [("v3:4x4", None), ("v3:4x4", ORDER), ("v5e:4x8", None), ("v6e:4x8", None)]
)
def test_absent_tpus_stand_where_the_plan_thinks(name: str, order: str | None) -> None:
    topology = Topology.named(name)
    devices = topology_mesh(name, MESH, order).devices
    places = [device.coords[:2] for device in devices.flat]
    assert np.array_equal(coordinates(topology, MESH, order).reshape(-1, 2), places)


def test_devices_with_coordinates_but_no_cores_are_on_no_torus() -> None:
    """As JAX's GPUs: an order is for TPUs, and the devices stay in JAX's order."""

    class Gpu:
        platform, device_kind, process_index = "gpu", "NVIDIA H100 80GB HBM3", 0

        def __init__(self, index: int) -> None:
            self.id, self.coords = index, [0, 0, index]

    gpus = [Gpu(index) for index in range(4)]
    assert torus_of(gpus) is None
    for order in (None, "data:x;model:y"):
        devices = in_order(gpus, {"data": 2, "model": 2}, order)
        assert [[device.id for device in row] for row in devices] == [[0, 1], [2, 3]]
