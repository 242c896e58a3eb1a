"""Profiles steps of a run, and sums the time of their operations by part of the model."""

import contextlib
import itertools
import json
import logging
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from configs.errors import UserError, brief, one_line
from data.storage.files import WorkingFolder, atomic_write
from layouts.cost.collectives import KINDS
from layouts.hlo.compilation import text_of
from layouts.hlo.parser import Instruction
from layouts.hlo.program import FREE, KERNEL, CompiledText, called
from trainer.observers import CompiledStep, Observer, StepResult
from trainer.planning.breakdown import OTHER, TIMED, part_of, seconds_of
from trainer.planning.report import SCHEMA_VERSION

logger = logging.getLogger(__name__)
PROFILE_FOLDER = "profile"  # in the model directory
PARTS_FILE = "parts.json"  # in that folder
PRODUCTS = {"dot", "convolution"}
PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(gemm|matmul|conv|fmha)')  # of a library
ASYNC_LINE = "Async XLA Ops"  # of TPUs: transfers that overlap with operations


def parse_profile_steps(text: str, steps: int) -> range:
    """Parses an inclusive range of steps, which must be within the steps of the run."""
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise UserError(
            f"--profile_steps={brief(text)}: not a range of steps of this run.  Legal: the "
            "first and the last step with a colon between them, as in 10:13, from 1 to "
            f"{steps} (Run.steps)."
        )
    return range(first, last + 1)


class Profile(Observer):
    """Profiles a range of steps with `jax.profiler`, in the first process."""

    def __init__(self, model_dir: Path, steps: range):
        self._target, self._steps = model_dir / PROFILE_FOLDER, steps
        self._open = contextlib.ExitStack()
        self._compiled: Any = None  # a CompiledStep, before the first step
        self._is_complete = False

    def on_compiled(self, compiled: CompiledStep) -> None:
        self._compiled = compiled

    def starts_idle(self, step: int) -> bool:
        return step in (self._steps.start, self._steps.stop)

    def before_step(self, step: int) -> None:
        if step == self._steps.start and jax.process_index() == 0:
            folder = self._open.enter_context(WorkingFolder(self._target)).path
            self._open.callback(self._write_parts, folder, self._compiled)
            jax.profiler.start_trace(str(folder))
            self._open.callback(jax.profiler.stop_trace)

    def on_step(self, result: StepResult) -> None:
        if result.step == self._steps[-1]:
            self._is_complete = True
            self.close()

    def close(self) -> None:
        try:
            self._open.close()
        except Exception as error:  # a full disk, or a profile of another version
            logger.warning("Warning: the profile is incomplete: %s", brief(one_line(error), 200))

    def _write_parts(self, folder: Path, compiled: CompiledStep) -> None:
        """Writes the time by part; none if steps are missing, replayed or of several programs."""
        rows, first, last = list[dict[str, Any]](), self._steps[0], self._steps[-1]
        if self._is_complete and compiled is self._compiled and compiled.run.replay_every is None:
            newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
            runs = len(self._steps) * len(compiled.mesh.local_devices)
            with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):  # jaxlib's
                rows = time_by_part(newest, text_of(compiled.executable), runs)
            total_s = sum(map(seconds_of, rows))
            shares = ", ".join(f"{row['part']} {seconds_of(row) / total_s:.1%}" for row in rows)
            logger.info(
                "Steps %d to %d: operations take %.3g s a step and device: %s.",
                first, last, total_s, shares,
            )  # fmt: skip
        figures = {"schema_version": SCHEMA_VERSION, "first_step": first, "last_step": last,
                   "step_time_by_part": rows}  # fmt: skip
        atomic_write(folder / PARTS_FILE, json.dumps(figures, indent=2) + "\n")


def time_by_part(profile: Path, program: str, runs: int) -> list[dict[str, Any]]:
    """Sums the seconds of a compiled program's operations by part of the model, the longest first.

    Args:
        profile: the file that `jax.profiler` wrote.
        program: the text of the program.
        runs: how often all devices together ran it; the sums are per run.
    """
    compiled = CompiledText.read(program)
    instructions = {i.name: i for c in compiled.computations.values() for i in c.values()}
    module = program.split(maxsplit=2)[1].rstrip(",")
    lines = (p.lines for p in jax.profiler.ProfileData.from_file(str(profile)).planes)
    spent_ns = Counter[str]()
    for line in itertools.chain.from_iterable(lines):
        for event in line.events if line.name != ASYNC_LINE else ():
            stats = dict(event.stats)
            # On TPUs, the name of an event is the entire instruction.
            name = stats.get("hlo_op") or event.name.removeprefix("%").partition(" ")[0]
            if stats.get("hlo_module", module) == module:
                spent_ns[name] += event.duration_ns
    parts = defaultdict[str, dict[str, float]](lambda: dict.fromkeys(TIMED, 0.0))
    for name in spent_ns.keys() & instructions.keys():
        if (instruction := instructions[name]).opcode not in FREE:
            part = parts[part_of_operation(instruction, instructions, compiled)]
            part[kind_of_time(instruction, compiled)] += spent_ns[name] / runs / 1e9
    rows = [{"part": part, **times} for part, times in parts.items()]
    return sorted(rows, key=seconds_of, reverse=True)


def part_of_operation(
    instruction: Instruction, instructions: Mapping[str, Instruction], compiled: CompiledText
) -> str:
    """Returns the part of an operation; without a name, the part of what it computes or reads.

    XLA joins the names of collectives that it combines, and drops names of products it rewrites.
    """
    if instruction.op_name:
        parts = {part_of(name) for name in instruction.op_name.split(":")} - {OTHER} or {OTHER}
        return parts.pop() if len(parts) == 1 else "several parts"
    fused = (compiled.computations[name].values() for name in called(instruction))
    near = [*itertools.chain(*fused), *(instructions[name] for name in instruction.operands)]
    return next((part for i in near if (part := part_of(i.op_name)) != OTHER), OTHER)


def kind_of_time(instruction: Instruction, compiled: CompiledText) -> str:
    """Returns the kind of an operation, which is one of `TIMED`."""
    if re.sub("-(start|done)$", "", instruction.opcode).removeprefix("ragged-") in KINDS:
        return "traffic_s"
    fused = (compiled.computations[name].values() for name in called(instruction))
    opcodes = {instruction.opcode, *(i.opcode for i in itertools.chain(*fused))}
    is_product = opcodes & PRODUCTS or PRODUCT_CALL.search(instruction.rest)
    return "products_s" if is_product or KERNEL.search(instruction.rest) else "other_s"
