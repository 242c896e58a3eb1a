"""How errors are written."""

from configs.errors import listed


def test_several_problems_are_a_list() -> None:
    problem = "Run.steps is missing."
    assert listed("Run", [problem] * 2) == f"Run: 2 problems.\n  {problem}\n  {problem}"
    assert listed("Run", [problem] * 1234).splitlines()[0] == "Run: 1,234 problems."
