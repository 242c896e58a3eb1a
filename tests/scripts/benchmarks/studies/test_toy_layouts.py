"""Tests Mesh-TensorFlow's Table 1: compiled programs cost what the formulas say."""

import pytest

from scripts.benchmarks.studies.toy_layouts import LAYOUTS, formulas, illegal, measure


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_programs_cost_what_table_1_says(name: str) -> None:
    assert measure(LAYOUTS[name]) == formulas(LAYOUTS[name])


def test_the_formulas_are_those_of_the_paper() -> None:
    """By hand, from sections 8.1 to 8.3: values that a device sums, times four bytes."""
    b, d_io, d_h = 64, 96, 160
    assert formulas(LAYOUTS["batch"]).summed_bytes == 4 * (2 * d_io * d_h + d_h)
    assert formulas(LAYOUTS["hidden"]).summed_bytes == 4 * 2 * b * d_io
    both = 2 * b * d_io // 2 + (2 * d_io * d_h + d_h) // 4
    assert formulas(LAYOUTS["batch, hidden"]).summed_bytes == 4 * both


def test_the_illegal_layout_is_refused_with_its_reason() -> None:
    assert "batch and d_ff both want the mesh axis all" in illegal()
