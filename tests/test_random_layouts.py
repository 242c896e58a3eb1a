"""Random layouts never change a result, and the lint tells which are legal.

A small part of the search that `make test-sweep` goes on with, the same in each run.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings

from layouts.layout import Layout
from layouts.lint.report import lint
from layouts.mesh import mesh_sizes
from models.feed_forward.moe.layer import Moe
from models.positions.relative import Relative
from tests import layout_search
from tests.layout_search import Failure, Result, Verdict, judge, simplest
from tests.random_layouts import LAYOUTS_A_RUN, Case, cases, chosen_case, numbered_case
from trainer.checks import record_loss

SIMPLEST = chosen_case([])
# Dropless experts in stages, with padded heads and rows, updated by Adafactor and served.
RUNS = (1233,)


def under(mesh: str, rules: str, param_rules: str = "") -> Case:
    layout = Layout(mesh=mesh, rules=rules, param_rules=param_rules)
    return dataclasses.replace(SIMPLEST, layout=layout)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_what_the_lint_accepts_traces_and_what_it_refuses_has_a_reason(case: Case) -> None:
    note(case.gin())
    assert judge(case, runs=False).failures == ()


@pytest.mark.long
@pytest.mark.parametrize("number", RUNS)
def test_a_run_under_a_random_layout_is_that_of_one_device(number: int) -> None:
    assert judge(numbered_case(number)[0], runs=True) == Verdict((), True, ())


# Settings that the search once failed with.
GATHER = {"feed_forward": Moe(experts=8), "dropout": 0.1}
DROPLESS = {**GATHER, "feed_forward": Moe(experts=8, dispatch="dropless")}
FOUND = {
    "layers split under scan": ("x:2", "layers:x", {"layers": 2, "scan": True}),
    "groups give way to d_ff": ("x:2", "groups:x?;d_ff:x", DROPLESS),
    "rows of experts give way to d_ff": ("x:2", "batch:x?;d_ff:x", GATHER),
    "more devices than rows": ("x:8", "experts:x+", GATHER),
    "relative positions give way to heads in stages": (
        "x:2,y:2,z:2", "batch:x;heads:y;length:y?;layers:z",
        {"positions": Relative(buckets=8), "layers": 2, "heads": 2, "scan": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_the_search_found_traces(name: str) -> None:
    """What runs in stages compiles as well."""
    mesh, rules, changes = FOUND[name]
    case = under(mesh, rules)
    run = dataclasses.replace(case.run, model=dataclasses.replace(case.spec, **changes))
    case = dataclasses.replace(case, run=run)
    assert judge(case, runs=False, compiles=True) == Verdict((), False, ())


def kinds(case: Case, *, runs: bool = False) -> set[str]:
    return {failure.kind for failure in judge(case, runs=runs).failures}


def test_the_search_has_all_kinds_of_models_and_layouts() -> None:
    some = [numbered_case(number)[0] for number in range(0, 4000, LAYOUTS_A_RUN // 2)]
    assert min(Counter(case.kind for case in some).values()) > 20
    assert len({case.kind for case in some}) == 8
    counts = Counter(
        (name, getattr(case.spec, name))
        for case in some
        for name in ("remat", "scan", "loss_chunks", "tied")
    )
    counts.update(("positions", type(case.spec.positions)) for case in some)
    counts.update(("chunks", case.spec.attention.chunks) for case in some)
    assert len(counts) == 17 and min(counts.values()) > 50
    patterns = [case.spec.blocks[-2:] for case in some if len(case.spec.blocks) > 1]
    assert sum(first.attention != second.attention for first, second in patterns) > 50
    assert sum(first.positions != second.positions for first, second in patterns) > 50
    rules = Counter(
        rule.partition(":")[0] for case in some for rule in case.layout.rules.split(";")
    )
    assert {"batch", "length", "memory", "capacity", "group_tokens", "choices"} <= rules.keys()
    texts = [f"{case.layout.rules} {case.layout.param_rules}" for case in some]
    assert sum("?" in text for text in texts) > 300 and sum("+" in text for text in texts) > 100
    assert {case.layout.mesh.count(":") for case in some} == {1, 2, 3}


def test_a_case_follows_from_its_number_and_from_its_options() -> None:
    case, options = numbered_case(1234)
    assert case == numbered_case(1234)[0] == chosen_case(options)
    assert case.run == numbered_case(1234 // LAYOUTS_A_RUN * LAYOUTS_A_RUN)[0].run


def test_a_lint_that_accepts_what_jax_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "lint", lambda *_: [])
    assert kinds(under("x:8", "vocab:x")) == set()
    assert kinds(under("x:3", "vocab:x")) == {"accepted"}


@pytest.mark.parametrize(("mesh", "rules"), [("x:3", "batch:x"), ("x:8", "batch:x;d_model:x")])
def test_a_lint_that_refuses_without_a_reason_is_found(
    mesh: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of another layout is no reason here."""
    other = under(mesh, rules)
    errors = lint(other.layout, mesh_sizes(mesh, None), record_loss(other.run), {})
    assert judge(other, runs=False) == Verdict((errors[0].code,), False, ())
    monkeypatch.setattr(layout_search, "lint", lambda *_: errors[:1])
    assert kinds(under("x:8", "batch:x")) == {"refused"}


@pytest.mark.parametrize("name", ["sums/loss", "gradients/w_DF", "texts"])
def test_a_layout_that_changes_a_number_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(case: Case, rows: int, folder: str | None) -> Result:
        is_split = bool(case.layout.rules)
        numbers = {"sums/loss": np.ones(3), "gradients/w_DF": np.ones(3)}
        numbers = {key: x + 1e-4 * (is_split and key == name) for key, x in numbers.items()}
        texts = [[5, 6 + (is_split and name == "texts")]]
        return Result(numbers, texts)

    monkeypatch.setattr(layout_search, "result", result)
    (failure,) = judge(under("x:8", "batch:x"), runs=True).failures
    assert (failure.kind, failure.phase) == ("differs", name)
    layout_search.plain_result.cache_clear()


def test_a_failure_is_shown_with_few_settings() -> None:
    """Of the many of a random case, the two that it takes."""

    def judged(case: Case, *, runs: bool) -> Verdict:
        fails = case.spec.remat == "full" and case.run.microbatches == 2
        failure = Failure("accepted", "train", "TypeError: no")
        return Verdict((), False, (failure,) * fails)

    for number in range(0, 800, LAYOUTS_A_RUN):
        case, options = numbered_case(number)
        for failure in judged(case, runs=False).failures:
            simple, same = simplest(options, failure, 200, judged)
            assert same == failure
            assert simple.spec == dataclasses.replace(SIMPLEST.spec, remat="full")
            assert simple.run.microbatches == 2 and "remat = 'full'" in simple.gin()
            assert simple.layout == SIMPLEST.layout
            return
    raise AssertionError("no such case")
