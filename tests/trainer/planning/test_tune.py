"""Tuning: the search compiles what may be the fastest, and goes on where it was stopped."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from configs.errors import UserError
from layouts.cost.interconnect import Topology
from models.attention.multi_head import MultiHead
from tests.toys import SPLITTABLE, optax_promotion
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.planning import tune as tune_module
from trainer.planning.child import CompilerAborted
from trainer.planning.training import plan_from_trace
from trainer.planning.tune import Candidate, Trial, TrialLog, Tuner, ladders_of

RUN = toy_run(dataclasses.replace(SPLITTABLE, dropout=0.0, attention=MultiHead()))
LAYOUTS = [layout_named(name) for name in ("data_parallel", "fsdp")]
OPTIONS = ("tpu:xla_enable_async_all_gather=true",)
SLICE = Topology.named("v5e:2x2")
Measure = Callable[[Candidate], Trial]


ALL_RECOMPUTATIONS = tune_module.recomputations


def test_a_model_that_saves_products_is_compared_with_others() -> None:
    """Without recomputation it has none to save."""
    model = dataclasses.replace(SPLITTABLE, remat="full", remat_saves=("mlpwi",))
    kinds = [(kind.remat, kind.remat_saves) for kind in ALL_RECOMPUTATIONS(model, offload=False)]
    assert kinds[0] == ("full", ("mlpwi",)) and len(set(kinds)) == len(kinds)
    assert {("none", ()), ("full", ()), ("full", tune_module.PROJECTIONS)} < set(kinds)
    assert ("full", ("context",)) in kinds


@pytest.fixture(autouse=True)
def two_recomputations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def recomputations(model: Any, *, offload: bool) -> list[Any]:
        return [dataclasses.replace(model, remat=remat) for remat in ("none", "full")]

    monkeypatch.setattr(tune_module, "recomputations", recomputations)
    with optax_promotion():
        yield


def candidates() -> list[list[Candidate]]:
    return list(ladders_of([RUN], LAYOUTS, [(), OPTIONS], SLICE))


@functools.cache
def trace(candidate: Candidate) -> Trial:
    return Trial.of(plan_from_trace(*candidate, {"data": 4}, SLICE))


def traced(candidate: Candidate) -> Trial:
    return trace(candidate._replace(run=dataclasses.replace(candidate.run, compiler_options=())))


def compiled(memory_bytes: float) -> Measure:
    """Returns a compiler under which options save 30 % of the time, in 5/6 of a trace's memory."""

    def measure(candidate: Candidate) -> Trial:
        trace, faster = traced(candidate), 0.7 if candidate.run.compiler_options else 1.0
        assert trace.step_s is not None and trace.needed_bytes is not None
        needed_bytes = trace.needed_bytes * 5 // 6
        fits = needed_bytes <= memory_bytes
        return Trial(faster * trace.step_s if fits else None, needed_bytes, fits)

    return measure


def first_steps(memory_bytes: float) -> list[Candidate]:
    """Returns the first step of each ladder that may fit by its trace."""
    may_fit = 1.25 * memory_bytes
    return [
        next(c for c in ladder if (traced(c).needed_bytes or 0) <= may_fit)
        for ladder in candidates()
        if any((traced(c).needed_bytes or 0) <= may_fit for c in ladder)
    ]


def tuner(
    folder: Path, measure: Measure, memory_bytes: float = 1e9, deadline_s: float = math.inf
) -> Tuner:
    chip = SLICE.chip._replace(memory_bytes=int(memory_bytes))
    log = TrialLog(folder / "log.jsonl", {"run": "toy"})
    return Tuner(dataclasses.replace(SLICE, chip=chip), measure, log, deadline_s)


@pytest.mark.long
def test_the_fastest_that_fits_is_among_the_trials(tmp_path: Path) -> None:
    everything = [candidate for ladder in candidates() for candidate in ladder]
    needs = sorted(traced(candidate).needed_bytes * 5 // 6 for candidate in everything)  # type: ignore[operator]
    for memory_bytes in (1e9, needs[len(needs) // 2]):
        folder = tmp_path / str(memory_bytes)
        folder.mkdir()
        measure = compiled(memory_bytes)
        search = tuner(folder, measure, memory_bytes)
        search.search(candidates())
        best, trial = search.ranking[0]
        times = [measure(candidate).step_s or math.inf for candidate in everything]
        assert trial.step_s == min(times)
        assert len(search.trials) < len(everything)  # it compiles not all of them
        first, *_ = search.trials  # before any is compiled, the fastest by its trace
        assert first == min(first_steps(memory_bytes), key=lambda c: traced(c).step_s or math.inf)
        assert best.run.compiler_options == OPTIONS


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    measure, calls = compiled(1e9), list[Candidate]()

    def counted(candidate: Candidate) -> Trial:
        calls.append(candidate)
        return measure(candidate)

    def stopped(candidate: Candidate) -> Trial:
        if len(calls) == 2:
            raise KeyboardInterrupt
        return counted(candidate)

    with pytest.raises(KeyboardInterrupt):
        tuner(tmp_path, stopped).search(candidates())
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"name": ["trial", {"Lay')  # as a kill leaves it
    again = tuner(tmp_path, counted)
    again.search(candidates())
    assert len(calls) == len(set(calls)) == len(again.trials) > 2
    third = tuner(tmp_path, counted)
    third.search(candidates())
    assert third.ranking == again.ranking and len(calls) == len(again.trials)


def test_the_deadline_leaves_out_the_rest(tmp_path: Path) -> None:
    search = tuner(tmp_path, compiled(1e9), deadline_s=time.monotonic() - 1)
    search.search(candidates())
    assert not search.trials
    assert len(search.left) == len(candidates())


def test_a_program_that_the_compiler_refuses_is_no_end(tmp_path: Path) -> None:
    def refusing(candidate: Candidate) -> Trial:
        if candidate.run.compiler_options:
            raise CompilerAborted("no such option")
        return compiled(1e9)(candidate)

    search = tuner(tmp_path, refusing)
    search.search(candidates())
    assert search.ranking and all(not c.run.compiler_options for c, _ in search.ranking)
    assert {trial.problem for trial in search.trials.values()} == {None, "no such option"}


def test_memory_that_runs_out_is_no_end(tmp_path: Path) -> None:
    def measured(candidate: Candidate) -> Trial:
        if candidate.run.compiler_options:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return compiled(1e9)(candidate)

    search = tuner(tmp_path, measured)
    search.search(candidates())
    assert search.ranking and any(trial.problem for trial in search.trials.values())


def test_what_a_search_begins_with_is_computed_once(tmp_path: Path) -> None:
    """Another measurement of the machine would rank other layouts, and forget their trials."""
    path = tmp_path / "log.jsonl"
    for number in (7, 8):
        assert TrialLog(path, {"run": "toy"}).once("rates", lambda number=number: [number]) == [7]
    with path.open("a") as log:
        log.write('{"name": "lay')  # as a kill leaves it
    assert TrialLog(path, {"run": "toy"}).once("layouts", lambda: [1]) == [1]
    assert TrialLog(path, {"run": "toy"}).once("layouts", lambda: [2]) == [1]


def test_the_log_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    TrialLog(path, {"run": "one"})
    text = path.read_text()
    with pytest.raises(UserError, match="log of another search"):
        TrialLog(path, {"run": "two"})
    assert path.read_text() == text and json.loads(text) == {"subject": {"run": "one"}}
