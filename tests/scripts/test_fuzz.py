"""Mutated input is accepted or refused in one line; `make test-faults` runs many more cases."""

import warnings
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.scripts import fuzz
from tests.scripts.conftest import Place

CASES = 250


@settings(
    max_examples=CASES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a case is named by its arguments: making it smaller takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**32))
def test_mutated_input_is_accepted_or_refused_in_one_line(trained: Place, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name, problem, _ = fuzz.problem_of_seed(seed, fuzz.Inputs(trained))
    assert problem is None, f"seed {seed}, {name}: {problem}"


@pytest.mark.parametrize(
    ("code", "error", "problem"),
    [
        (0, "", None),
        (0, "Warning: a line\n", None),
        (2, "meshloom: Run: 2 problems.\n  Run.steps is missing.\n  Run.seed is missing.\n", None),
        (2, "some progress\nmeshloom: no.\n", None),
        (2, "", "without a reason"),
        (2, "meshloom: \n", "without a reason"),
        (2, "meshloom: no.\nAt:\n", "more than one line"),
        (2, f"meshloom: {'x' * 5000}\n", "length"),
        (1, "meshloom: the run failed.\n", "exit code 1"),
        (0, "Traceback (most recent call last):\n", "a traceback"),
        (2, "Traceback (most recent call last):\nmeshloom: no.\n", "a traceback"),
    ],
)
def test_a_wrong_end_is_found(code: int, error: str, problem: str | None) -> None:
    computed = fuzz.wrong_end(code, error)
    assert (computed is None) == (problem is None)
    assert problem is None or problem in str(computed)


def test_what_a_command_leaves_is_found(trained: Place) -> None:
    def leaves(random: Random, inputs: fuzz.Inputs, folder: Path) -> fuzz.Case:
        return fuzz.Case(["inspect", "settings", "Run.steps", f"--json={folder / 'half.tmp'}"])

    def raises(random: Random, inputs: fuzz.Inputs, folder: Path) -> fuzz.Case:
        return fuzz.Case(["inspect", "settings", "Run.step"])

    problem, code = fuzz.problem_of(leaves, Random(0), fuzz.Inputs(trained))
    assert code == 0 and problem is not None and "half.tmp" in problem
    assert fuzz.problem_of(raises, Random(0), fuzz.Inputs(trained)) == (None, 2)


def test_a_seed_names_one_case(trained: Place, tmp_path: Path) -> None:
    kinds = Counter(fuzz.chosen(Random(seed)) for seed in range(1000))
    assert set(kinds) == set(fuzz.KINDS)
    for kind in (fuzz.gin_file, fuzz.text, fuzz.flag):
        cases = [kind(Random(7), fuzz.Inputs(trained), tmp_path) for _ in range(2)]
        assert cases[0] == cases[1]
