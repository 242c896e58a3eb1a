"""Tests the table of published rows: which runs it plans, and what it prints of them."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks.published_rows import (
    ONE_SLICE,
    OVER_SLICES,
    UTILISATION,
    PublishedRun,
    compiled_plan,
    one_slice_cells,
    over_slices,
    slices_cells,
)

BY_NAME = {row.name: row for row in ONE_SLICE}
FIGURES = {UTILISATION: 0.45, "step_time_s": 2.0, "fits": True, "bytes_per_device": 3.14e9}


@pytest.mark.parametrize("row", ONE_SLICE, ids=lambda row: row.name)
def test_a_row_names_settings_that_exist_and_a_mesh_of_its_slice(row: PublishedRun) -> None:
    inputs = row.plan_inputs()
    unused = {binding.name for binding in inputs.config.unused(type(inputs.run))}
    assert {name for name in unused if not name.startswith("Layout.")} == set()


def test_a_row_that_decodes_plans_its_samples() -> None:
    plan = BY_NAME["giant_64b decodes, 16 cores"].plan(analytic=True)
    names = ("batch_sequences", "hypotheses", "prompt_tokens", "new_tokens", "suffix_tokens")
    assert [plan[name] for name in names] == [1, 16, 1024, 64, 16]
    assert plan["draws"] is True and plan["devices"] == 16


def test_a_plan_in_the_folder_is_not_compiled_again(tmp_path: Path) -> None:
    row = BY_NAME["giant_64b"]
    assert compiled_plan(row, None) is None
    (tmp_path / "giant_64b.json").write_text(json.dumps(FIGURES))
    assert compiled_plan(row, tmp_path) == FIGURES


@pytest.mark.parametrize("name", OVER_SLICES)
def test_each_of_several_slices_has_the_rows_and_the_weights_of_one(name: str) -> None:
    one, many = BY_NAME[name].plan_inputs(), over_slices(BY_NAME[name], 3, 0.5).plan_inputs()
    assert many.sizes == {"slice": 3} | one.sizes
    assert many.run.batch_sequences == 3 * one.run.batch_sequences
    assert many.layout.param_rules == one.layout.param_rules
    assert many.layout.rules.startswith("batch:slice;batch:")


def test_the_table_says_what_is_not_compiled_and_what_does_not_fit() -> None:
    row = PublishedRun("mine", "v3:2x2", (), (), UTILISATION, 0.5)
    compiled = FIGURES | {UTILISATION: 0.55, "fits": False}
    rows = [(row, FIGURES, None), (row, FIGURES, compiled)]
    head = ["mine", "v3:2x2", "utilisation full attention", "50.0%", "45.0%", "-10%"]
    assert [one_slice_cells(*row) for row in rows] == [
        [*head, "not compiled", "", "3.1 GB"],
        [*head, "55.0%", "+10%", "3.1 GB, does not fit"],
    ]


def test_several_slices_are_compared_by_what_they_keep_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = BY_NAME["maxtext_16b"]._replace(published=0.5)
    monkeypatch.setitem(OVER_SLICES, row.name, (0.4,) * 5)
    planned = FIGURES | {UTILISATION: 0.36}
    monkeypatch.setattr(PublishedRun, "plan", lambda _, analytic: planned)
    lines = [*slices_cells({row: FIGURES})]
    assert [line[-1] for line in lines] == ["80.0%", "80.0%"]
    assert not [*slices_cells({row._replace(name="mine"): FIGURES})]
