"""Measures the systems of a benchmark in alternating rounds, each in its own process.

If the machine's speed drifts, this affects all systems equally.  A ratio is the median over rounds
of the ratio within a round.
"""

import functools
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click

from configs.errors import UserError
from configs.imports import CHECKOUT as CHECKOUT
from data.vocab import cores as cores
from scripts.commands.shared_flags import JsonFile
from scripts.flag import Flag, FlagGroup

Count = Annotated[int, Flag(min=1)]
Answers = dict[str, float]  # of all systems in one round
LIBRARIES = {  # that a system needs, by the first word of its name
    "torch": ("torch",),
    "huggingface": ("torch", "transformers"),
    "ctranslate2": ("ctranslate2",),
}
MATRIX = {False: 2048, True: 8192}
"""Rows of the square matrices whose product measures matrix speed: on a CPU, and on a GPU."""
BASELINE = "baseline_"
MESHLOOM = (sys.executable, "-m", "scripts.meshloom")
"""Runs the command of this checkout, or of another checkout if that is the working directory."""


class JsonFlags(FlagGroup):
    """Names the file of the result."""

    json_file: JsonFile = None


class ComparisonFlags(JsonFlags):
    """Selects what a benchmark compares in alternating rounds, each in a process of its own."""

    worker: Annotated[str | None, Flag(is_hidden=True)] = None
    """Runs this system, which answers the questions of the process that compares."""
    rounds: Count
    """Rounds to measure."""
    systems: tuple[str, ...]
    """Systems to compare, separated by commas."""
    baseline: Annotated[Path | None, Flag(metavar="CHECKOUT")] = None
    """Also measures another checkout, and prints how many times as fast this checkout is."""
    one_at_a_time: bool = False
    """Ends each system before the next one starts, for when two do not fit in memory together."""


def seconds(call: Callable[[], object]) -> float:
    """Measures the seconds of a call, which must wait for its result."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best_seconds(call: Callable[[], object]) -> float:
    """Measures a call, which must wait for its result: the fastest of five after the first."""
    call()
    return min(seconds(call) for _ in range(5))


def device_seconds(start: Callable[[], Any], wait: Callable[[Any], object]) -> float:
    """Measures the time of the work that a call starts on a device.

    Ten calls are queued, so that the host's time to start a call does not count.
    """

    def queue() -> None:
        wait([start() for _ in range(10)][-1])

    return best_seconds(queue) / 10


def installed(systems: Sequence[str]) -> list[str]:
    """Returns the systems whose libraries are installed; prints how to install the others."""
    names = []
    for name in systems:
        libraries = LIBRARIES.get(name.split("_")[0], ())
        if missing := [x for x in libraries if importlib.util.find_spec(x) is None]:
            click.echo(f"{name} is left out: pip install {' '.join(missing)}", err=True)
        else:
            names.append(name)
    if not names:
        raise UserError(f"--systems={','.join(systems)}: none of them is installed.")
    return names


def serve(about: Mapping[str, object], answer: Callable[[str], float]) -> None:
    """Runs a worker: prints what it is, then answers each line of its input with a number."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        question = line.strip()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(memory if question == "memory" else answer(question), flush=True)


def serve_steps(about: Mapping[str, object], run: Callable[[int], object], warmup: int) -> None:
    """Runs a worker that answers a number of steps with the seconds per step, after a warmup."""
    run(warmup)
    serve(about, lambda question: seconds(lambda: run(int(question))) / int(question))


class Worker:
    """Runs one system in a separate process; the question "memory" returns its peak in bytes."""

    def __init__(self, *command: str, checkout: Path):
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        environment, pipe = os.environ | {"PYTHONPATH": path}, subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=checkout, env=environment
        )
        self.about = json.loads(self._read())

    def ask(self, question: str | int) -> float:
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit(f"a worker ended: exit code {self._process.wait()}")
        return line

    def close(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()


def starters(bench: str, flags: ComparisonFlags, *more: str) -> dict[str, Callable[[], Worker]]:
    """Returns a function that starts each system; with a baseline, also those of that checkout."""
    command = (*MESHLOOM, "bench", bench, *more)
    checkouts = {"": CHECKOUT}
    if flags.baseline is not None:
        if not (flags.baseline / "scripts" / "benchmarks").is_dir():
            raise UserError(
                f"--baseline={flags.baseline} is not a checkout: it has no scripts/benchmarks."
            )
        checkouts[BASELINE] = flags.baseline.resolve()
    systems = installed(flags.systems)
    return {
        prefix + name: functools.partial(Worker, *command, f"--worker={name}", checkout=checkout)
        for prefix, checkout in checkouts.items()
        for name in systems
        if not (prefix and name.startswith(tuple(LIBRARIES)))
    }


def rounds(workers: Mapping[str, Worker], question: str | int, count: int) -> Iterator[Answers]:
    """Yields the answers of all systems to a question; every other round is in reverse order."""
    for number in range(count):
        order = list(workers)[:: 1 if number % 2 == 0 else -1]
        yield {name: workers[name].ask(question) for name in order}


def ended(workers: Mapping[str, Worker], rounds: Sequence[Answers]) -> dict[str, dict[str, Any]]:
    """Stops the workers; returns each one's description, median seconds and peak memory."""
    systems = {}
    for name, worker in workers.items():
        median_s = statistics.median(answers[name] for answers in rounds)
        memory_bytes = worker.ask("memory")
        systems[name] = {"median_s": median_s, "peak_memory_bytes": memory_bytes, **worker.about}
        worker.close()
    return systems


def compare(
    bench: str, flags: ComparisonFlags, question: str | int, *more: str
) -> tuple[dict[str, Any], list[Answers]]:
    """Asks all systems in alternating rounds; returns their descriptions, and the rounds."""
    systems = starters(bench, flags, *more)
    groups = [[name] for name in systems] if flags.one_at_a_time else [list(systems)]
    results: dict[str, Any] = {}
    times: list[Answers] = [{} for _ in range(flags.rounds)]
    for group in groups:
        workers = {name: systems[name]() for name in group}
        answers = list(rounds(workers, question, flags.rounds))
        results |= ended(workers, answers)
        times = [before | now for before, now in zip(times, answers, strict=True)]
    return results, times


def ratio(rounds: Sequence[Answers], system: str, other: str) -> dict[str, object]:
    """Computes how many times as fast as another a system is: the median over rounds, and each."""
    ratios = [answers[other] / answers[system] for answers in rounds]
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def speedups(rounds: Sequence[Answers]) -> dict[str, object]:
    """Computes the speedup of each system over the baseline checkout, if there is one."""
    pairs = {name: BASELINE + name for name in rounds[0] if BASELINE + name in rounds[0]}
    ratios = {name: ratio(rounds, name, other) for name, other in pairs.items()}
    return {"speedup_over_baseline": ratios} if ratios else {}


def report(
    flags: ComparisonFlags, result: dict[str, Any], times: Sequence[Answers], **numbers: object
) -> None:
    """Shows the description of each system, its speedup, and the numbers of the benchmark."""
    numbers |= {"rounds": flags.rounds, "cores": cores()}
    show(result | speedups(times) | numbers, flags.json_file)


def show(result: Mapping[str, object], json_file: str | None) -> None:
    """Prints the result, and writes it to a file if one is given."""
    print(json.dumps(result, indent=2))
    if json_file is not None:
        from scripts.commands.common import write_json  # imports JAX, which --help does without

        write_json(json_file, result)
