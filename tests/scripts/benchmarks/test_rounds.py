"""Rounds of systems from one checkout and from another."""

import sys
from pathlib import Path

import pytest

from scripts.benchmarks.rounds import CHECKOUT, Worker, ended, ratio, rounds, speedups

TOY_COMMAND = (sys.executable, "-m", "toy_benchmark")
TOY = """
import sys
sys.path.append({root!r})
from scripts.benchmarks.rounds import serve
serve({{"version": {version}}}, lambda steps: {seconds_a_step} * int(steps))
"""


def toy_checkout(folder: Path, version: int, seconds_a_step: float) -> Path:
    folder.mkdir()
    text = TOY.format(root=str(CHECKOUT), version=version, seconds_a_step=seconds_a_step)
    (folder / "toy_benchmark.py").write_text(text)
    return folder


def test_a_system_is_compared_with_itself_in_another_checkout(tmp_path: Path) -> None:
    new, old = (
        toy_checkout(tmp_path / name, version, seconds)
        for name, version, seconds in (("new", 2, 0.5), ("old", 1, 2.0))
    )
    workers = {
        "toy": Worker(*TOY_COMMAND, checkout=new),
        "baseline_toy": Worker(*TOY_COMMAND, checkout=old),
    }
    seconds = list(rounds(workers, 3, 2))
    assert speedups(seconds) == {"speedup_over_baseline": {"toy": ratio(seconds, *workers)}}
    assert ratio(seconds, *workers) == {"ratio": 4.0, "ratios": [4.0, 4.0]}
    systems = ended(workers, seconds)
    assert [systems[name]["version"] for name in workers] == [2, 1]
    assert systems["toy"]["median_s"] == pytest.approx(1.5)
    assert systems["toy"]["peak_memory_bytes"] > 0


def test_without_a_baseline_there_is_no_speedup() -> None:
    assert speedups([{"meshloom": 1.0, "torch": 2.0}]) == {}
