"""Groups of devices, in every form that XLA prints."""

import numpy as np
import pytest

from layouts.hlo.parser import Instruction, first_group, group_axes

MESH = {"x": 4, "y": 2}


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", [0, 2, 4, 6]),
        ("replica_groups=[4,2]<=[8]", [0, 1]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", [0, 2, 4, 6]),
        ("source_target_pairs={{0,0},{1,3},{3,1}}", [1, 3]),
        ("channel_id=1", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_first_group_is_read(text: str, group: list[int]) -> None:
    np.testing.assert_array_equal(first_group(text, 8), group)


@pytest.mark.parametrize(
    ("group", "axes"),
    [("{{0,1}}", ("y",)), ("{{0,2,4,6}}", ("x",)), ("{{0,1,2,3,4,5,6,7}}", ("x", "y"))],
)
def test_a_group_lies_along_the_mesh_axes_in_which_its_devices_differ(
    group: str, axes: tuple[str, ...]
) -> None:
    reduction = Instruction("r", "f32[2]{0}", "all-reduce", ("a",), f"replica_groups={group}")
    assert group_axes(reduction, MESH)[0] == axes
