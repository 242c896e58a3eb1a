"""What a plan says of traffic that differs from the layout."""

import pytest

from layouts.cost.collectives import (
    Collective,
    by_mesh_axis,
    checkout_file,
    size_text,
    unexpected_traffic,
)

MESH = {"data": 2, "model": 2}


def collective(kind: str, size_bytes: int, source: str, *mesh_axes: str) -> Collective:
    return Collective(kind, mesh_axes, 2 ** len(mesh_axes), size_bytes, 1, source)


@pytest.mark.parametrize(
    ("scale", "received", "required", "line"),
    [
        (1, "2 kB", "500 B", "+2 kB of all-reduce, -500 B of all-gather"),
        (10**6, "2 GB", "500 MB", "+2 GB of all-reduce, -500 MB of all-gather"),
    ],
)
def test_traffic_has_units_that_fit_it(scale: int, received: str, required: str, line: str) -> None:
    compiled = [collective("all-reduce", 1000 * scale, "models/a.py:1 x", "data")]
    compiled[0] = compiled[0]._replace(times=2)
    expected = [collective("all-gather", 1000 * scale, "models/a.py:1 x", "data")]
    (unexpected,) = unexpected_traffic(compiled, expected, MESH)
    assert unexpected == (
        f"over data a device receives {received} a step, more than the {required} that the layout "
        f"requires: models/a.py:1: {line}"
    )


def test_lines_with_equal_traffic_are_left_out() -> None:
    same = collective("all-reduce", 1, "models/b.py:2 x", "data")
    compiled = [collective("all-reduce", 4000, "models/a.py:1 x", "data"), same]
    (unexpected,) = unexpected_traffic(compiled, [same], MESH)
    assert unexpected.endswith(" requires: models/a.py:1: +4 kB of all-reduce")


def test_traffic_that_only_takes_another_mesh_axis_names_no_line() -> None:
    """By lines, both receive 1,500 bytes; along the mesh axes, they do not."""
    compiled = [collective("all-gather", 2000, "models/a.py:1 x", "data", "model")]
    expected = [collective("all-gather", 3000, "models/a.py:1 x", "data")]
    assert list(unexpected_traffic(compiled, expected, MESH)) == [
        "over data a device receives 1 kB a step, less than the 1.5 kB that the layout requires",
        "over model a device receives 500 B a step, more than the 0 B that the layout requires: "
        "models/a.py:1: +1.5 kB of all-gather",
    ]


def test_sizes_have_three_digits_and_a_unit() -> None:
    sizes = [size_text(size) for size in (640, 2_621_440, 999_700)]
    assert sizes == ["640 B", "2.62 MB", "1 MB"]
    assert size_text(34_628_173_824, "FLOPs") == "34.6 GFLOPs"


def test_source_lines_are_named_from_the_checkout_on() -> None:
    assert checkout_file("/elsewhere/models/feed_forward/mlp.py") == "models/feed_forward/mlp.py"
    assert checkout_file("/elsewhere/mlp.py") == ""


def test_a_collective_over_two_mesh_axes_is_received_along_both() -> None:
    both = Collective("all-reduce", ("x", "y"), 8, 800, 1, "")
    assert by_mesh_axis([both], {"x": 4, "y": 2}) == {"x": 1200, "y": 200}
    assert both.received_bytes == 1400
