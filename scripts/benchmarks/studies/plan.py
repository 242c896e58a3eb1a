"""Plans the published models and compares the predictions with the published figures.

    python -m scripts.benchmarks.studies.plan --folder=/tmp/plans   (90 minutes; needs libtpu)

Each row is a process of its own, `meshloom plan`, and leaves a JSON file in the folder; a row whose
file is there is not planned again.  The table goes to the standard output, as Markdown.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from configs.imports import CHECKOUT

POD = "v3:32x32"
# Bits for dropout came from the hardware then; ours are computed.  No row pays for them.
NO_DROPOUT = ("Transformer.dropout=0.0", "Transformer.attention_dropout=0.0")
# In what the rows of GShard and Mesh-TensorFlow were predicted; their files now say bfloat16.
FLOAT32 = "Precision.compute='float32'"
# Rows of 256 source and 256 target tokens.  With a million of each, GShard's 37B would do 1.0e16
# FLOPs in 1.49 s on 128 cores, 86 % of their peak; but 28 % of its cycles computed things again.
MILLION_TOKENS, ROW_TOKENS = 2048, 256


class PublishedRun(NamedTuple):
    """Holds a published run and its figure."""

    name: str
    topology: str
    files: tuple[str, ...]
    settings: tuple[str, ...]
    figure: str  # of the plan's JSON
    published: float

    @property
    def command(self) -> list[str]:
        return [
            *(f"--gin_file={file}" for file in self.files),
            *(f"--gin_param={setting}" for setting in self.settings),
            f"--topology={self.topology}",
        ]


def giant(size: str, published: float) -> PublishedRun:
    files = (f"configs/models/giant_{size}.gin", "layouts/two_dimensional.gin")
    settings = ("Layout.mesh='x:32,y:64'",)
    return PublishedRun(f"giant_{size}", POD, files, settings, "utilisation", published)


def gshard(size: str, topology: str, rows: int, remat: str, steps_per_s: float) -> PublishedRun:
    """Makes a row; a model of 12 layers keeps all activations, one of 36 recomputes (5.1)."""
    files = (f"configs/models/gshard_{size}.gin", "configs/runs/gshard.gin",
             "layouts/expert_parallel.gin")  # fmt: skip
    settings = (*NO_DROPOUT, FLOAT32, f"Run.batch_sequences={rows}", f"Transformer.remat='{remat}'")
    return PublishedRun(f"gshard_{size}", topology, files, settings, "step_time_s", 1 / steps_per_s)


def with_tokens(row: PublishedRun, tokens: int, cores: int) -> PublishedRun:
    """Makes the same row with this many tokens of either side on each core, as one group."""
    rows = f"Run.batch_sequences={tokens * cores // ROW_TOKENS}"
    settings = (*row.settings, rows, f"Moe.group_tokens={tokens}")
    return row._replace(name=f"{row.name}_{tokens}", settings=settings)


def mesh_tensorflow(
    name: str, topology: str, data: str, published: float, *settings: str
) -> PublishedRun:
    files = (f"configs/{data}.gin", f"configs/models/{name}.gin",
             "layouts/data_and_model_parallel.gin")  # fmt: skip
    return PublishedRun(
        name, topology, files, (*NO_DROPOUT, FLOAT32, *settings), "step_time_s", published
    )


SMALL = gshard("37b", "v3:8x8", MILLION_TOKENS, "full", 0.67)
LARGE = gshard("600b", POD, 4 * MILLION_TOKENS, "full", 0.72)
ROWS = (
    giant("64b", 0.522),
    giant("128b", 0.553),
    giant("1t", 0.500),
    giant("4t", 0.288),
    mesh_tensorflow(
        "mtf_lm_4.90b", "v2:16x16", "runs/lm1b_mtf", 0.344, "Layout.mesh='data:16,model:32'"
    ),
    mesh_tensorflow(  # the paper does not print this mesh
        "mtf_wmt_2.89b",
        "v2:8x8",
        "tasks/wmt14_enfr",
        0.514,
        "Layout.mesh='data:8,model:16'",
        "Run.batch_sequences=128",
        "Run.steps=154000",
    ),
    LARGE,
    gshard("200b", POD, 4 * MILLION_TOKENS, "none", 2.15),
    gshard("150b", "v3:16x16", MILLION_TOKENS, "full", 1.05),
    gshard("50b", "v3:16x16", MILLION_TOKENS, "none", 3.28),
    SMALL,
    gshard("12.5b", "v3:8x8", MILLION_TOKENS, "none", 2.16),
)
# GShard (5.2) does not print the tokens per core at which 16 times the experts take 1.7 times as
# long, but that all-to-alls take 3.75 times as long: so they do, nearly, at one of these numbers.
GROWTH = {t: (with_tokens(SMALL, t, 128), with_tokens(LARGE, t, 2048)) for t in (1024, 2048, 4096)}


@click.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path))
@click.option(
    "--only", default="", metavar="TEXT", help="Plan only the rows whose name contains TEXT."
)
def main(folder: Path, only: str) -> None:
    """Plans what is missing and prints the table."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in ROWS if only in row.name]
    plans = [(row, plan(row, folder)) for row in chosen]
    print("| model | slice | bytes per core | figure | predicted | published | off | compile |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row, figures in plans:
        print(line(row, figures))
    print_growth(folder, only)


def print_growth(folder: Path, only: str) -> None:
    """Compares 128 with 2,048 experts at the same tokens per core: time, memory, compilation."""
    lines = []
    for tokens, rows in GROWTH.items():
        small, large = (plan(row, folder) if only in row.name else None for row in rows)
        if small is None or large is None:
            continue
        for name in ("step_time_s", "bytes_per_device", "compile_s"):
            lines.append(growth(tokens, name, small[name], large[name]))
        lines.append(growth(tokens, "all-to-all", exchange_s(small), exchange_s(large)))
    if lines:
        print("\n| tokens per core | figure | 128 experts | 2,048 experts | ratio |")
        print("| --- | --- | --- | --- | --- |", *lines, sep="\n")


def growth(tokens: int, name: str, first: float, last: float) -> str:
    return f"| {tokens:,} | {name} | {first:.4g} | {last:.4g} | {last / first:.2f} |"


def exchange_s(figures: dict[str, Any]) -> float:
    """Sums the seconds of a step that bring tokens to experts and back."""
    rows = figures["collectives"]
    return sum(row["seconds"] for row in rows if row["kind"] == "all-to-all")


def plan(row: PublishedRun, folder: Path) -> dict[str, Any] | None:
    """Reads the plan's JSON, after making it if it is missing; returns None where that fails."""
    file = folder / f"{row.name}.json"
    if not file.exists():
        command = [sys.executable, "-m", "scripts.meshloom", "plan", *row.command]
        done = subprocess.run([*command, f"--json={file}"], cwd=CHECKOUT, capture_output=True)
        (folder / f"{row.name}.log").write_bytes(done.stdout + done.stderr)
        peak_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        click.echo(f"{row.name}: exit {done.returncode}, at most {peak_kb / 1e6:.1f} GB", err=True)
    return json.loads(file.read_text()) if file.exists() else None


def line(row: PublishedRun, figures: dict[str, Any] | None) -> str:
    """Writes a row of the table."""
    if figures is None:
        return f"| {row.name} | {row.topology} | failed |  |  |  |  |  |"
    predicted, figure = figures[row.figure], row.figure.removesuffix("_s").replace("_", " ")
    values = (
        f"{x:.1%}" if row.figure == "utilisation" else f"{x:.3f} s"
        for x in (predicted, row.published)
    )
    misfit = ", does not fit" * (not figures["fits"])
    memory = f"{figures['bytes_per_device'] / 1e9:.1f} GB{misfit}"
    return (
        f"| {row.name} | {row.topology} | {memory} | {figure} "
        f"| {' | '.join(values)} | {predicted / row.published - 1:+.0%} "
        f"| {figures['compile_s']:.0f} s |"
    )


if __name__ == "__main__":
    main()
