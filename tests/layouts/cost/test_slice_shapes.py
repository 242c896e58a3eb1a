"""Which slices Google Cloud offers, and what is said of others."""

import pytest

from configs.errors import UserError
from layouts.cost.hardware import CHIPS, GPUS
from layouts.cost.interconnect import Topology, check_offered, offered_slices, shapes_of_cubes


@pytest.mark.parametrize(
    ("kind", "largest"),
    [
        ("v2", "v2:16x16"),
        ("v3", "v3:32x32"),
        ("v4", "v4:16x16x16"),
        ("v5e", "v5e:16x16"),
        ("v5p", "v5p:16x16x24"),
        ("v6e", "v6e:16x16"),
    ],
)
def test_slices_end_where_the_documentation_ends(kind: str, largest: str) -> None:
    slices = offered_slices(kind)
    largest_ones = [topology.name for topology in slices if topology.chips == slices[-1].chips]
    assert largest_ones[0] == largest
    assert len(set(slices)) == len(slices)


def test_every_chip_has_slices() -> None:
    assert all(offered_slices(kind) for kind in (*CHIPS, *GPUS))


@pytest.mark.parametrize(
    "name", ["v4:12x12x24", "v5p:2x2x1", "v5p:8x16x16", "v3:4x8", "v3:4x2", "2xv5e:16x16"]
)
def test_an_offered_or_published_slice_passes(name: str) -> None:
    check_offered(Topology.named(name))


@pytest.mark.parametrize(
    ("name", "nearby"),
    [
        ("v5e:32x32", "v5e:4x8, v5e:8x8, v5e:8x16, v5e:16x16."),
        ("2xv5e:32x32", "v5e:8x16, v5e:16x16."),
        ("v5e:8x4", "v5e:4x4, v5e:4x8, v5e:8x8"),
        ("v3:1x1", "v3:2x2"),
        ("v5p:4x8x4", "v5p:4x4x8"),
        ("v5p:16x24x24", "v5p:16x16x24"),
        ("v4:16x16x24", "v4:16x16x16"),
    ],
)
def test_another_slice_is_refused_in_a_line_with_those_nearby(name: str, nearby: str) -> None:
    with pytest.raises(UserError) as error:
        check_offered(Topology.named(name))
    text = str(error.value)
    assert text.startswith(f"--topology={name}: ") and "\n" not in text
    assert nearby in text


def test_slices_of_v4_are_whole_cubes() -> None:
    assert shapes_of_cubes(256) == ["4x4x4", "4x4x8", "4x4x12", "4x4x16", "4x8x8"]
