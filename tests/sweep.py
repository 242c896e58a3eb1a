"""Searches for layouts that change a result, until stopped: `make test-sweep`.

    python -m tests.sweep --seed=0 --cases=1000 --run_every=4

Cases are numbered from --seed on, and a number determines its case.  To continue a stopped search,
pass --seed.  To repeat one case, pass `--seed=4711 --cases=1 --run_every=1`.
"""

import argparse
import dataclasses
import datetime
import itertools
import platform
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import jax

import tests.conftest as conftest  # eight devices, strict types
from tests.layout_search import Failure, Verdict, judge, simplest
from tests.random_layouts import LAYOUTS_A_RUN, Case, numbered_case

PROGRESS_S = 10
CASES_A_CHILD = 8 * LAYOUTS_A_RUN  # JAX keeps its traces, which would fill the memory


@dataclasses.dataclass
class Tally:
    """Counts the results of a search."""

    start: float = dataclasses.field(default_factory=time.monotonic)
    cases: int = 0
    accepted: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    codes: Counter[str] = dataclasses.field(default_factory=Counter)
    runs: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: dict[tuple[str, ...], list[int]] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        failed = sum(map(len, self.failures.values()))
        counts = f"{self.accepted.total()} accepted, {self.refused.total()} refused"
        runs = f"{self.runs.total()} run, {failed} failures"
        return f"{self.cases} cases: {counts}, {runs}; {time.monotonic() - self.start:,.0f} s"

    def summary(self) -> str:
        lines = [self.line(), "", "| model | accepted | refused | run |", "|---|---|---|---|"]
        for kind in sorted(self.accepted.keys() | self.refused.keys()):
            row = (kind, self.accepted[kind], self.refused[kind], self.runs[kind])
            lines.append(f"| {' | '.join(map(str, row))} |")
        codes = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        lines += ["", f"Cases refused with each error: {codes or 'none'}."]
        lines += [f"{' '.join(kind)}: seeds {seeds}" for kind, seeds in self.failures.items()]
        return "\n".join(lines)


class Child:
    """Judges cases in a child process, which XLA may abort."""

    pool: ProcessPoolExecutor | None = None

    def judge(self, case: Case, *, runs: bool) -> Verdict:
        self.pool = self.pool or ProcessPoolExecutor(
            1, get_context("spawn"), start_in_child, max_tasks_per_child=CASES_A_CHILD
        )
        try:
            return self.pool.submit(judge_in_child, case, runs).result()
        except BrokenProcessPool:
            self.pool = None
            phase = "run" if runs else "compile"
            return Verdict((), runs, (Failure("accepted", phase, "the process aborts"),))


def start_in_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    jax.config.update("jax_enable_compilation_cache", False)


def judge_in_child(case: Case, runs: bool) -> Verdict:
    verdict = judge(case, runs=runs, compiles=True)
    conftest.free_memory_maps()
    return verdict


def search(seed: int, cases: int | None, run_every: int, tries: int) -> Tally:
    """Judges one case after another; prints one failure of each kind, with few settings."""
    tally, child, shown = Tally(), Child(), time.monotonic()
    numbers = itertools.count(seed) if cases is None else range(seed, seed + cases)
    try:
        for number in numbers:
            case, options = numbered_case(number)
            runs = bool(run_every) and number // LAYOUTS_A_RUN % run_every == 0
            verdict = child.judge(case, runs=runs)
            tally.cases += 1
            (tally.refused if verdict.codes else tally.accepted)[case.kind] += 1
            tally.codes.update(set(verdict.codes))
            tally.runs[case.kind] += verdict.ran
            for failure in verdict.failures:
                seeds = tally.failures.setdefault(failure.signature, [])
                seeds.append(number)
                if len(seeds) == 1:
                    report(number, options, failure, tries, child)
            if time.monotonic() - shown > PROGRESS_S:
                print(f"seed {number}: {tally.line()}", flush=True)
                shown = time.monotonic()
    except KeyboardInterrupt:
        print(f"Stopped.  Continue with --seed={number}.", file=sys.stderr)
    return tally


def report(number: int, options: list[int], failure: Failure, tries: int, child: Child) -> None:
    """Prints a failure, and a case with few settings that fails in the same way."""
    print(f"\nFAILED seed {number}: {' '.join(failure.signature)}", flush=True)
    case, simple = simplest(options, failure, tries // 4 if failure.runs else tries, child.judge)
    print(f"{simple.line}\n{simple.error}\n\n{case.gin()}", flush=True)


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--cases", type=int, help="number of cases; until stopped without it")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--run_every", type=int, default=10, help="run each such model; 0: none")
    parser.add_argument("--tries", type=int, default=24, help="to show a failure in fewer settings")
    flags = parser.parse_args()
    tally = search(flags.seed, flags.cases, flags.run_every, flags.tries)
    today, python = datetime.date.today(), platform.python_version()
    print(f"\n{today}, jax {jax.__version__}, Python {python}, {platform.machine()}: "
          f"seeds {flags.seed} to {flags.seed + tally.cases - 1}\n{tally.summary()}")  # fmt: skip
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
