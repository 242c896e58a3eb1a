"""GShard's annotation calls, and the layers of docs/layers.md that are written with them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from tests.toys import ROOT

SENT = r" (all-[a-z-]+|reduce-scatter|collective-permute)\("
LAYOUT = Layout(mesh="rows:2,cols:4", rules="")


def placed(call: str, *arguments: Any, shape: tuple[int, ...] = (8, 16)) -> jax.Array:
    with jax.set_mesh(make_mesh(LAYOUT)):
        x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        return jax.jit(lambda x: getattr(LAYOUT, call)(x, *arguments))(x)


def devices_of(x: jax.Array) -> dict[int, tuple[int, ...]]:
    """Where the part of each device begins."""
    return {
        shard.device.id: tuple(part.start or 0 for part in shard.index)
        for shard in x.addressable_shards
    }


def test_replicate_holds_all_everywhere() -> None:
    assert placed("replicate").sharding.is_fully_replicated


@pytest.mark.parametrize(("parts", "place"), [(2, "rows"), (4, "cols"), (8, ("rows", "cols"))])
def test_split_takes_the_mesh_axis_of_that_size_or_all(parts: int, place: Any) -> None:
    assert placed("split", 1, parts).sharding.spec == jax.P(None, place)


@pytest.mark.parametrize(
    "devices",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[0], [4], [1], [5], [2], [6], [3], [7]],
    ],
)
def test_shard_puts_each_part_on_its_device(devices: list[list[int]]) -> None:
    rows, columns = 8 // len(devices), 16 // len(devices[0])
    expected = {
        device: (i * rows, k * columns)
        for i, row in enumerate(devices)
        for k, device in enumerate(row)
    }
    assert devices_of(placed("shard", devices)) == expected


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("split", (0, 3), "no mesh axis has that size.  The mesh: rows:2,cols:4."),
        ("split", (5, 4), "split axis 5 of a tensor with 2 axes"),
        ("split", (-1, 4), "split axis -1 of a tensor with 2 axes"),
        ("shard", ([0, 1],), "of 1 axes for a tensor of 2"),
        ("shard", ([[1, 0, 2, 3], [4, 5, 6, 7]],), "does not follow the mesh rows:2,cols:4"),
    ],
)
def test_what_the_mesh_does_not_have_is_refused(call: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        placed(call, *arguments)


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """What the code in docs/layers.md defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/layers.md").read_text(), re.S):
        exec(block, names)
    return names


def test_algorithm_2_as_documented_has_two_all_to_alls(documented: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    shapes = [(8, 4, 12), (8, 4, 16, 2), (8, 4, 16, 2), (16, 12, 20), (16, 20, 12)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    inputs, combine, dispatch, wi, wo = arrays
    with jax.set_mesh(make_mesh(documented["layout"])):
        arguments = [jax.device_put(array, jax.P("all")) for array in arrays]  # by group or expert
        program = jax.jit(documented["moe"]).lower(*arguments).compile()
        computed = program(*arguments)
    text = program.as_text() or ""
    assert re.findall(SENT, text) == ["all-to-all", "all-to-all"]
    hidden = np.maximum(np.einsum("GSEC,GSM,EMH->EGCH", dispatch, inputs, wi), 0)
    expected = np.einsum("GSEC,EGCH,EHM->GSM", combine, hidden, wo)
    np.testing.assert_allclose(computed, expected, rtol=2e-4, atol=2e-3)


def test_a_step_by_hand_as_documented_sends_nothing(documented: dict[str, Any]) -> None:
    layout: Layout = documented["experts"]
    tokens = np.arange(8 * 5 * 3, dtype=np.float32).reshape(8, 5, 3)
    index = np.random.default_rng(0).integers(0, 5, (8, 2))
    with jax.set_mesh(make_mesh(layout)):
        arguments = (
            jax.device_put(tokens, layout.place("GSD")),
            jax.device_put(index, layout.place("GC")),
        )
        program = jax.jit(documented["take"]).lower(*arguments).compile()
        computed = program(*arguments)
    assert not re.search(
        r" (all-[a-z-]+|reduce-scatter|collective-permute)\(", program.as_text() or ""
    )
    np.testing.assert_array_equal(computed, np.take_along_axis(tokens, index[..., None], axis=1))
