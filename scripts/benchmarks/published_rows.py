"""Plans the published runs and compares the predictions with the published figures.

    python -m scripts.benchmarks.published_rows                   (5 minutes)
    python -m scripts.benchmarks.published_rows --folder=plans    (2 hours)

All rows are planned with the constants of layouts/cost/hardware.py.  By its trace, each row takes
seconds.  With --folder (needs compilers), each is compiled too, which leaves `meshloom plan`'s JSON
there; one whose file is there is not compiled again.  Several slices are planned by their traces
alone.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import UserError
from configs.load import load
from layouts.absent_devices import has_compiler
from layouts.cost.interconnect import Topology
from scripts.command_line import run_command
from scripts.commands.common import write_json
from scripts.commands.doctor.machine import installed
from scripts.commands.planning.flags import DecodePlanFlags, PlanFlags
from scripts.commands.planning.inputs import PlanInputs, best_plan, no_compiler
from scripts.commands.planning.plan_decode import plan_batch
from scripts.terminal import print_note, print_table
from trainer.planning.child import CompilerAborted
from trainer.planning.report import as_json, decode_as_json

POD, V5E = "v3:32x32", "v5e:16x16"
# Bits for dropout came from the hardware then; ours are computed.  No row pays for them.
NO_DROPOUT = ("Transformer.dropout=0.0", "MultiHead.dropout=0.0")
# In what the rows of GShard and Mesh-TensorFlow were predicted; their files now say bfloat16.
FLOAT32 = "Precision.compute='float32'"
# Rows of 256 source and 256 target tokens.  With a million of each, GShard's 37B would do 1.0e16
# FLOPs in 1.49 s on 128 cores, 86 % of their peak; but 28 % of its cycles computed things again.
MILLION_TOKENS = 2048
Figures = Mapping[str, Any]
UTILISATION = "utilisation_full_attention"  # all of these count masked pairs of tokens


class PublishedRun(NamedTuple):
    """Holds a published run and its figure."""

    name: str
    topology: str
    files: tuple[str, ...]
    settings: tuple[str, ...]
    figure: str  # of the plan's JSON
    published: float
    decoding: DecodePlanFlags | None = None
    """What is decoded; None for a training step."""

    def plan_inputs(self) -> PlanInputs:
        """Reads the settings."""
        return PlanInputs.read(load(self.files, self.settings), Topology.named(self.topology))

    def plan(self, *, analytic: bool) -> Figures:
        """Plans the run, by its trace or compiled."""
        inputs = self.plan_inputs()
        if self.decoding is None:
            return as_json(best_plan(inputs, analytic), inputs.layout)
        flags = PlanFlags(analytic=analytic, decoding=self.decoding)
        return decode_as_json(plan_batch(inputs, flags))


def giant(size: str, published: float) -> PublishedRun:
    """Makes a row of the Giant Models guide, Table 1."""
    files = (f"configs/models/giant_{size}.gin", "layouts/two_dimensional.gin")
    settings = ("Layout.mesh='x:32,y:64'",)
    return PublishedRun(f"giant_{size}", POD, files, settings, UTILISATION, published)


def giant_samples(topology: str, published_s: float) -> PublishedRun:
    """Makes a row of the Giant Models guide, section 3.2: 16 samples of 64 tokens of one prompt."""
    files = ("configs/models/giant_64b.gin", "layouts/model_parallel.gin")
    decoding = DecodePlanFlags(
        batch_sequences=1, prompt_tokens=1024, max_tokens=64, samples=16, top_k=40, suffix_tokens=16
    )
    cores = Topology.named(topology).devices
    return PublishedRun(
        f"giant_64b decodes, {cores} cores", topology, files, ("Precision.store='bfloat16'",),
        "output_latency_s", published_s, decoding,
    )  # fmt: skip


def gshard(size: str, topology: str, rows: int, remat: str, steps_per_s: float) -> PublishedRun:
    """Makes a row of GShard, Table 3.

    A model of 12 layers keeps all activations, one of 36 recomputes them (section 5.1).
    """
    files = (f"configs/models/gshard_{size}.gin", "configs/runs/gshard.gin",
             "layouts/expert_parallel.gin")  # fmt: skip
    settings = (*NO_DROPOUT, FLOAT32, f"Run.batch_sequences={rows}", f"Transformer.remat='{remat}'")
    return PublishedRun(f"gshard_{size}", topology, files, settings, "step_time_s", 1 / steps_per_s)


def mesh_tensorflow(
    name: str, topology: str, data: str, published: float, *settings: str
) -> PublishedRun:
    """Makes a row of Mesh-TensorFlow, section 9.1."""
    files = (f"configs/{data}.gin", f"configs/models/{name}.gin",
             "layouts/data_and_model_parallel.gin")  # fmt: skip
    return PublishedRun(
        name, topology, files, (*NO_DROPOUT, FLOAT32, *settings), "step_time_s", published
    )


def maxtext(size: str, published: float, layout: str = "fsdp", *settings: str) -> PublishedRun:
    """Makes a row of MaxText's table for one slice of TPU v5e."""
    files = (f"configs/models/maxtext_{size}.gin", f"layouts/{layout}.gin")
    return PublishedRun(f"maxtext_{size}", V5E, files, settings, UTILISATION, published)


def over_slices(row: PublishedRun, count: int, published: float) -> PublishedRun:
    """Makes the same row on several slices: each has whole weights and as many rows as one."""
    run, layout = (inputs := row.plan_inputs()).run, inputs.layout
    sizes = ",".join(f"{name}:{size}" for name, size in inputs.sizes.items())
    settings = (
        *row.settings,
        f"Layout.mesh='slice:{count},{sizes}'",
        f"Layout.rules='batch:slice;{layout.rules}'",
        "Layout.slices='slice:-1'",
        f"Run.batch_sequences={count * run.batch_sequences}",
    )
    return row._replace(
        name=f"{row.name}, {count} slices",
        topology=f"{count}x{row.topology}",
        settings=settings,
        published=published,
    )


LLAMA_TOKENS_PER_S, LLAMA_CHIP_TOKENS = 692, 4 * 4096  # of a chip
ONE_SLICE = (
    giant("64b", 0.522),
    giant("128b", 0.553),
    giant("1t", 0.500),
    giant("4t", 0.288),
    giant_samples("v3:4x2", 3.6),
    giant_samples("v3:4x8", 1.2),
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
    gshard("600b", POD, 4 * MILLION_TOKENS, "full", 0.72),
    gshard("200b", POD, 4 * MILLION_TOKENS, "none", 2.15),
    gshard("150b", "v3:16x16", MILLION_TOKENS, "full", 1.05),
    gshard("50b", "v3:16x16", MILLION_TOKENS, "none", 3.28),
    gshard("37b", "v3:8x8", MILLION_TOKENS, "full", 0.67),
    gshard("12.5b", "v3:8x8", MILLION_TOKENS, "none", 2.16),
    maxtext("16b", 0.6110),
    maxtext("32b", 0.6686),
    maxtext("64b", 0.5990),
    maxtext("128b", 0.5606, "two_dimensional", "Layout.mesh='x:16,y:16'"),
    PublishedRun(
        "llama2_70b",
        "v5p:4x8x8",  # a v5p-512: two cores are one device here
        ("configs/models/llama2_70b.gin", "layouts/fsdp.gin"),
        (),
        "step_time_s",
        LLAMA_CHIP_TOKENS / LLAMA_TOKENS_PER_S,
    ),
    PublishedRun(
        "llama3_70b",
        "tpu7x:4x4x4",
        ("configs/models/llama3_70b.gin", "layouts/fsdp.gin"),
        (),
        "step_time_s",
        12.20,
    ),
    PublishedRun(  # torchtitan's 6,667 tokens/s of each GPU with torch.compile
        "llama3_8b",
        "h100:1x8",
        ("configs/models/llama3_8b.gin", "layouts/fsdp.gin"),
        ("Transformer.length=8192", "Task.length=8192", "Run.batch_sequences=16"),
        "step_time_s",
        2 * 8192 / 6667,
    ),
    PublishedRun(
        "mixtral_8x7b",
        "v5p:4x4x8",
        ("configs/models/mixtral_8x7b.gin", "layouts/fsdp.gin"),
        (),
        UTILISATION,
        0.5256,
    ),
)
SLICES = (2, 4, 8, 16, 32)
OVER_SLICES = {
    "maxtext_16b": (0.5937, 0.5914, 0.5827, 0.5656, 0.5465),
    "maxtext_32b": (0.6481, 0.6410, 0.6367, 0.6226, 0.6040),
    "maxtext_64b": (0.5666, 0.5585, 0.5496, 0.5329, 0.5018),
    "maxtext_128b": (0.5582, 0.5493, 0.5293, 0.5086, 0.4625),
}
ONE_SLICE_HEAD = ("model", "slice", "figure", "published", "by trace", "difference", "compiled",
                  "difference", "bytes per device")  # fmt: skip
SLICES_HEAD = ("model", "of one slice's utilisation", *(f"{count} slices" for count in SLICES))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Plans the published runs and compares the predictions with the published figures."""

    only: str = ""
    """Only rows whose name contains this text."""
    folder: Path | None = None
    """Compiles the rows as well, and keeps their plans in this folder. Needs the compilers."""


def study(flags: Flags) -> None:
    """Plans the rows and prints the tables."""
    rows = [row for row in ONE_SLICE if flags.only in row.name]
    traced = {row: row.plan(analytic=True) for row in rows}
    compared = [one_slice_cells(r, traced[r], compiled_plan(r, flags.folder)) for r in rows]
    print(f"jax {installed('jax')}, libtpu {installed('libtpu')}")
    print_table(ONE_SLICE_HEAD, compared)
    print_table(SLICES_HEAD, [*slices_cells(traced)])


def compiled_plan(row: PublishedRun, folder: Path | None) -> Figures | None:
    """Reads a compiled plan, after making it if it is missing; None without one."""
    if folder is None:
        return None
    file = folder / f"{row.name}.json"
    if not file.exists():
        platform = Topology.named(row.topology).chip.platform
        if not has_compiler(platform):
            raise UserError(f"--folder={folder} has no {file.name}.  {no_compiler(platform)}")
        try:
            write_json(str(file), row.plan(analytic=False))
        except CompilerAborted as error:
            print_note(f"{row.name}: {error}")
            return None
    return json.loads(file.read_text())


def one_slice_cells(run: PublishedRun, by_trace: Figures, compiled: Figures | None) -> list[str]:
    """Compares a row with what was published: by the trace, and as compiled."""
    best = compiled or by_trace
    cells = [run.name, run.topology, run.figure.removesuffix("_s").replace("_", " ")]
    cells.append(value(run, run.published))
    for plan in (by_trace, compiled):
        if plan is None:
            cells += ["not compiled", ""]
        else:
            predicted = plan[run.figure]
            cells += [value(run, predicted), f"{predicted / run.published - 1:+.0%}"]
    misfit = ", does not fit" * (not best["fits"])
    return [*cells, f"{best['bytes_per_device'] / 1e9:.1f} GB{misfit}"]


def value(run: PublishedRun, number: float) -> str:
    return f"{number:.1%}" if run.figure == UTILISATION else f"{number:.3f} s"


def slices_cells(traced: Mapping[PublishedRun, Figures]) -> Iterable[list[str]]:
    """Compares what several slices keep of the utilisation of one, by their traces."""
    for run, one in ((run, one) for run, one in traced.items() if run.name in OVER_SLICES):
        several = zip(SLICES, OVER_SLICES[run.name], strict=True)
        rows = [over_slices(run, count, published) for count, published in several]
        planned = [row.plan(analytic=True)[UTILISATION] / one[UTILISATION] for row in rows]
        published = [row.published / run.published for row in rows]
        yield [run.name, "published", *(f"{share:.1%}" for share in published)]
        yield ["", "by trace", *(f"{share:.1%}" for share in planned)]


if __name__ == "__main__":
    run_command(Flags, study)
