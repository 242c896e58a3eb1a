"""Runs the systems of a benchmark in turns, each in a process of its own."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Answers = dict[str, float]  # of each system in one round


def cores() -> int:
    """Counts the processors that this process may use."""
    return len(os.sched_getaffinity(0))


def matrix_rate(product: Callable[[], object]) -> float:
    """Measures the FLOP/s of 2048 x 2048 products in float32, the best of a few."""
    product()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def serve(about: Mapping[str, object], answer: Callable[[str], float]) -> None:
    """Runs a worker: prints what it is, then answers each line of its input with a number."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        question = line.strip()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(memory if question == "memory" else answer(question), flush=True)


class Worker:
    """Runs one system in a process of its own; "memory" asks for its peak in bytes."""

    def __init__(self, module: str, system: str, *arguments: str):
        command = [sys.executable, "-m", module, f"--worker={system}", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.about = json.loads(self._read())

    def ask(self, question: str | int) -> float:
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a worker ended: exit code {self._process.wait()}")
        return line

    def close(self) -> None:
        self._process.kill()


def rounds(
    workers: Mapping[str, Worker], questions: Mapping[str, str | int], count: int
) -> Iterator[Answers]:
    """Yields what each system answers to its question; every other round goes backwards."""
    for number in range(count):
        order = list(workers)[:: 1 if number % 2 == 0 else -1]
        yield {name: workers[name].ask(questions[name]) for name in order}


def ended(workers: Mapping[str, Worker], seconds: Sequence[Answers]) -> dict[str, dict[str, Any]]:
    """Ends the workers; returns what each is, its median seconds and its peak memory."""
    systems = {}
    for name, worker in workers.items():
        systems[name] = {
            "turn_s": statistics.median(answers[name] for answers in seconds),
            "peak_memory_bytes": worker.ask("memory"),
            **worker.about,
        }
        worker.close()
    return systems


def ratio(seconds: Sequence[Answers], mine: str, theirs: str) -> dict[str, object]:
    """Computes how many times as fast mine is as theirs: the median over rounds, and each."""
    ratios = [answers[theirs] / answers[mine] for answers in seconds]
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def show(result: Mapping[str, object], json_file: str | None) -> None:
    """Prints the result, and writes it to the file if there is one."""
    text = json.dumps(result, indent=2)
    print(text)
    if json_file:
        Path(json_file).write_text(text + "\n")
