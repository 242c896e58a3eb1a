"""Mesh sizes: what is legal, and what the errors say."""

import jax
import pytest

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import batch_shards, make_mesh, mesh_sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data:8", {"data": 8}),
        ("data:-1", {"data": 8}),
        ("rows:2,cols:4", {"rows": 2, "cols": 4}),
        ("model:4;batch:2", {"model": 4, "batch": 2}),
        ("x:-1 y:2 z:2", {"x": 2, "y": 2, "z": 2}),
        ("data:-1,model:8", {"data": 1, "model": 8}),
        ("data:2", {"data": 2}),
    ],
)
def test_sizes_by_mesh_axis(text: str, sizes: dict[str, int]) -> None:
    assert mesh_sizes(text, 8) == sizes
    assert list(mesh_sizes(text, 8)) == list(sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:3,data:2", "Layout.mesh = 'data:3,data:2': a mesh axis is named twice"),
        ("", "Layout.mesh = '' names no axis"),
        ("data:0", "sizes must be at least 1, or -1 for one of them"),
        ("data:-2", "sizes must be at least 1, or -1 for one of them"),
        ("data:-1,model:-1", "only one number may be -1, found 2"),
        ("data:-1,model:3", "the sizes multiply to 3, which does not divide the 8 devices"),
        ("data:4,model:4", "needs 16 devices, found 8.  Set one size to -1"),
        *(
            (text, f"Layout.mesh = {text!r}.  Legal: sizes by mesh axis, as in 'data:2,model:4'.")
            for text in ("data:two", "data=2", "data : 2", "data:4x", "data:4.0")
        ),
    ],
)
def test_errors_say_what_is_wrong_and_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(UserError, match=r"^Layout\.mesh = ") as error:
        mesh_sizes(text, 8)
    assert message in str(error.value)


def test_the_mesh_has_explicit_axes_and_only_the_devices_it_needs() -> None:
    mesh = make_mesh(Layout(mesh="rows:2,cols:2"))
    assert dict(mesh.shape) == {"rows": 2, "cols": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    assert len(set(mesh.devices.flat)) == 4


@pytest.mark.parametrize(
    ("rules", "shards", "of_groups"), [("batch:x", 2, 2), ("batch:x;groups:y", 2, 6), ("", 1, 1)]
)
def test_rows_that_are_groups_divide_over_their_devices_too(
    rules: str, shards: int, of_groups: int
) -> None:
    layout, sizes = Layout(rules=rules), {"x": 2, "y": 3}
    assert batch_shards(layout, sizes) == shards
    assert batch_shards(layout, sizes, rows_are_groups=True) == of_groups
