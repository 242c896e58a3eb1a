"""Which layouts are tried, and how the best is written."""

import dataclasses

import pytest

from layouts.layout import Layout
from layouts.lint.report import lint
from layouts.mesh import mesh_sizes
from models.feed_forward.moe.layer import Moe
from models.parts import Block
from tests.layouts.lint.recorded import recorded
from tests.toys import SPLITTABLE
from trainer.planning.search import (
    DATA_PARALLEL,
    FSDP,
    FSDP_AND_MODEL,
    candidates,
    shapes,
    with_shard_axis,
)

DENSE = recorded(SPLITTABLE, 16, 24)
EXPERTS = recorded(
    dataclasses.replace(
        SPLITTABLE,
        layers=2,
        pattern=(Block(), Block(feed_forward=Moe(experts=16, dispatch="einsum"))),
    ),
    16,
    24,
)


def test_candidates_divide_the_rows() -> None:
    dividing = [x for x in candidates(DENSE, 8) if 4 % mesh_sizes(x.mesh, 8).get("data", 1) == 0]
    assert list(candidates(DENSE, 8, rows=4)) == dividing
    assert 0 < len(dividing) < len(list(candidates(DENSE, 8)))


def test_all_candidates_are_legal_and_use_all_devices() -> None:
    layouts = list(candidates(DENSE, 8))
    assert len(set(layouts)) == len(layouts) > 12
    for layout in layouts:
        sizes = mesh_sizes(layout.mesh, 8)
        problems = lint(layout, sizes, DENSE, {})
        assert not [problem for problem in problems if problem.severity == "error"]
        product = 1
        for size in sizes.values():
            product *= size
        assert product == 8


def test_the_published_kinds_are_among_them() -> None:
    rules = {(layout.rules, layout.param_rules) for layout in candidates(DENSE, 8)}
    model = "heads:model;d_ff:model;vocab:model"
    assert {
        ("batch:data", ""),
        ("batch:data", "d_model:data"),
        (model, ""),
        (f"batch:data;{model}", ""),
        (f"batch:data;{model};length:model?", ""),
        (f"batch:data;{model};d_model:model?", "d_model:data"),
    } <= rules


def test_standard_layouts_are_tried_with_experts_too() -> None:
    rules = {(layout.rules, layout.param_rules) for layout in candidates(EXPERTS, 8)}
    assert {DATA_PARALLEL, FSDP, FSDP_AND_MODEL} <= rules


def test_experts_take_the_devices_of_the_rows_or_all() -> None:
    """GShard's layout, the one with model parallelism, and both with other weights split too."""
    rules = {(layout.rules, layout.param_rules) for layout in candidates(EXPERTS, 8)}
    model = "heads:model;d_ff:model;vocab:model"
    every = "heads:model;d_ff:model?;vocab:model"
    assert {
        ("batch:data;experts:data", ""),
        ("batch:data;experts:data", "d_model:data?"),
        (f"batch:data;{model};experts:data", ""),
        (f"batch:data;{every};experts:data;experts:model", ""),
    } <= rules


def test_a_third_mesh_axis_splits_weights_over_some_of_the_rows_only() -> None:
    layouts = list(with_shard_axis(DENSE, Layout(mesh="data:4,model:2")))
    assert {layout.mesh for layout in layouts} == {"data:2,shard:2,model:2"}
    assert {layout.param_rules for layout in layouts} == {"d_model:shard"}
    assert all(layout.rules.startswith("batch:data;batch:shard;heads:model") for layout in layouts)
    expert_rules = {layout.rules for layout in with_shard_axis(EXPERTS, Layout(mesh="data:8"))}
    assert expert_rules == {"batch:data;batch:shard", "batch:data;batch:shard;experts:shard"}
    assert not list(with_shard_axis(DENSE, Layout(mesh="data:2,model:4")))


@pytest.mark.parametrize("devices", [1, 6, 8])
def test_shapes_multiply_to_the_devices(devices: int) -> None:
    assert {data * model for data, model in shapes(devices)} == {devices}
