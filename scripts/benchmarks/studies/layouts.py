"""Measures every legal layout of a small model, compared with a search's predictions.

    python -m scripts.benchmarks.studies.layouts --json=layouts.json   (15 minutes)

The search knows rates of this machine, measured first, and each layout's trace.  Then the real
training steps of all layouts alternate; a layout's ratio is the median over rounds of its time by
the best of the same round.  Ratios of the search's first, and of the best of its first three by
their own steps (`meshloom layouts --search`), are printed under the table.
"""

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import jax

from configs.load import load
from layouts.cost.calibration import measure_host
from layouts.mesh import cache_compilations, simulate_devices
from scripts.benchmarks.options import Count, JsonFlags
from scripts.benchmarks.rounds import cores, show
from scripts.command_line import run_command
from scripts.commands.planning.layouts import BEST
from scripts.flag import Flag
from scripts.terminal import print_note, print_table
from trainer.planning.report import as_json
from trainer.planning.search import rank_layouts
from trainer.planning.step_benchmark import StepBenchmark, slowdown, time_rounds
from trainer.run import Run


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Searches the layouts of a model, measures all of them, and prints both."""

    gin_file: tuple[str, ...] = ("configs/runs/quickstart.gin",)
    """Settings file. Repeat it for several files."""
    gin_param: tuple[str, ...] = (
        "Transformer.layers=2",
        "Transformer.vocab=2048",
        "Run.batch_sequences=16",
        "Run.microbatches=1",
    )
    """Settings of a small model. Repeat it for several."""
    device_count: Annotated[int, Flag(name="devices", min=1)] = 8
    """Virtual CPU devices."""
    rounds: Count = 9
    """Rounds to measure."""
    clock: Literal["wall", "cpu"] = "wall"
    """The clock. cpu adds up all threads, for a first look on a machine that others use as well."""


def study(flags: Flags) -> None:
    """Searches, measures all, and prints both."""
    simulate_devices(flags.device_count)
    cache_compilations()  # an interrupted study resumes
    run = load(flags.gin_file, flags.gin_param).make(Run)
    host = measure_host(jax.devices())
    print_note(str(host))
    start = time.perf_counter()
    ranking = rank_layouts(run, host)
    search_s = time.perf_counter() - start
    timer = time.perf_counter if flags.clock == "wall" else time.process_time
    benchmarks = {}
    for number, ranked in enumerate(ranking, 1):
        benchmarks[ranked.name] = StepBenchmark(run, ranked.layout, timer)
        print_note(f"compiled {number} of {len(ranking)}")
    times = time_rounds(benchmarks, flags.rounds)
    ratios = {name: slowdown(times, name) for name in benchmarks}
    first = [ranked.name for ranked in ranking[:BEST]]
    rows = [
        (ranked.name, f"{ranked.step_s:.3f}", f"{min(t[ranked.name] for t in times):.3f}",
         f"{ratios[ranked.name]:.2f}")
        for ranked in ranking
    ]  # fmt: skip
    print_table(["layout, by the search's order", "predicted s", "least s", "by the best"], rows)
    result = {
        "layouts": len(ranking),
        "winner": first[0],
        "winner_ratio": ratios[first[0]],
        "best_of_first": min(first, key=lambda name: ratios[name]),
        "best_of_first_ratio": min(ratios[name] for name in first),
        "best": min(ratios, key=lambda name: ratios[name]),
        "search_s": search_s,
        "host": host._asdict(),
        "clock": flags.clock,
        "cores": cores(),
        "jax": jax.__version__,
        "predicted_s": {ranked.name: ranked.step_s for ranked in ranking},
        "parts_s": {
            ranked.name: as_json(ranked.plan, ranked.layout)["step_time_parts_s"]
            for ranked in ranking
        },
        "seconds": {name: [seconds[name] for seconds in times] for name in benchmarks},
        "ratios": ratios,
    }
    show(result, flags.json_file)


if __name__ == "__main__":
    run_command(Flags, study)
