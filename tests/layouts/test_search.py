"""Which layouts are tried, and how the best is written."""

from pathlib import Path

import pytest

from configs.load import load
from layouts.layout import Layout
from layouts.lint import lint
from layouts.mesh import mesh_sizes
from layouts.search import as_gin, candidates, shapes
from tests.layouts.recorded import recorded
from tests.toys import SPLITTABLE

SEEN = recorded(SPLITTABLE, 16, 24)


def test_all_candidates_are_legal_and_use_all_devices() -> None:
    found = list(candidates(SEEN, 8))
    assert len(set(found)) == len(found) > 12
    for layout in found:
        sizes = mesh_sizes(layout.mesh, 8)
        problems = lint(layout, sizes, SEEN, {})
        assert not [problem for problem in problems if problem.severity == "error"]
        product = 1
        for size in sizes.values():
            product *= size
        assert product == 8


def test_the_published_kinds_are_among_them() -> None:
    found = {(layout.rules, layout.param_rules) for layout in candidates(SEEN, 8)}
    model = "heads:model;d_ff:model;vocab:model"
    assert {
        ("batch:data", ""),
        ("batch:data", "d_model:data"),
        (model, ""),
        (f"batch:data;{model}", ""),
        (f"batch:data;{model};length:model?", ""),
        (f"batch:data;{model};d_model:model?", "d_model:data"),
    } <= found


@pytest.mark.parametrize("devices", [1, 6, 8])
def test_shapes_multiply_to_the_devices(devices: int) -> None:
    assert {data * model for data, model in shapes(devices)} == {devices}


def test_what_is_written_is_a_layout_file(tmp_path: Path) -> None:
    layout = next(iter(candidates(SEEN, 8)))
    (tmp_path / "best.gin").write_text(as_gin(layout, ["The best.", "+3%: another"]))
    assert load([str(tmp_path / "best.gin")]).make(Layout) == layout
    assert (tmp_path / "best.gin").read_text().startswith("# The best.\n# +3%: another\n")
