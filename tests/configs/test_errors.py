"""How errors are written."""

import pytest

from configs.errors import UserError, brief, extra_required, listed


def test_several_problems_are_a_list() -> None:
    problem = "Run.steps is missing."
    assert listed("Run", [problem] * 2) == f"Run: 2 problems.\n  {problem}\n  {problem}"
    assert listed("Run", [problem] * 1234).splitlines()[0] == "Run: 1,234 problems."


def test_long_values_are_cut_in_the_middle() -> None:
    assert brief("x" * 500, 20) == "xxxxxxxxxx … xxxxxxxxxx (500 characters)"


def test_a_missing_extra_is_named() -> None:
    missing = extra_required("plot", "plot")
    with pytest.raises(UserError, match=r"^plot needs no_such_package, "), missing:
        import no_such_package  # noqa: F401
