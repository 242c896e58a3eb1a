"""What a compiled program does, read off its text: products, collectives, cycles, loops."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from layouts.cost.collectives import KINDS, Collective
from layouts.hlo.flops import product_flops
from layouts.hlo.parser import Computation, Instruction, frames, instruction
from layouts.hlo.replica_groups import over

SCATTERS = "all-reduce-scatter"  # what the TPU compiler names a fused all-reduce and slice


class Run(NamedTuple):
    """An instruction, how often a step runs it, and what surrounds it."""

    instruction: Instruction
    times: int
    inside: Computation
    fused_in: Instruction | None = None


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program's computations by name, and where its lines come from."""

    computations: Mapping[str, Computation]
    entries: tuple[str, ...]
    sources: Mapping[int, str]
    open_loop: str | None = None
    """The scope of a loop that ends by what it finds; one turn of it is counted."""

    @classmethod
    def read(cls, text: str, open_loop: str | None = None) -> "CompiledProgram":
        """Reads what `compiled.as_text()` prints."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := instruction(line)):
                current[found.name] = found
        return cls(computations, (entry,), frames(text), open_loop)

    @property
    def iteration(self) -> "CompiledProgram":
        """Returns one iteration of the open loop alone: its condition and its body."""
        loop = next(run.instruction for run in self.runs if self.is_open(run.instruction))
        parts = (loop.attribute("condition"), loop.attribute("body"))
        return dataclasses.replace(self, entries=tuple(part for part in parts if part is not None))

    def is_open(self, own: Instruction) -> bool:
        return own.opcode == "while" and f'{self.open_loop}/while"' in own.rest

    @functools.cached_property
    def runs(self) -> list[Run]:
        """All that a step runs, loops multiplied out."""
        starts = (self.computations[name] for name in self.entries)
        return [run for own in starts for run in self._walk(own, 1, None)]

    def _walk(self, inside: Computation, times: int, fused_in: Instruction | None) -> Iterator[Run]:
        for own in inside.values():
            yield Run(own, times, inside, fused_in)
            turns, fusion = times, fused_in
            if own.opcode == "while":
                turns *= self.turns(own)
            elif own.opcode in ("fusion", "async-start"):
                fusion = own
            for name in called(own):
                yield from self._walk(self.computations[name], turns, fusion)

    def turns(self, loop: Instruction) -> int:
        """How often a loop runs: a counter from 0 to a constant, as JAX's scans make them."""
        if self.is_open(loop):
            return 1
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = self.computations[loop.attribute("condition") or ""]
        limits = [
            int(found[1])
            for own in condition.values()
            if own.opcode == "constant" and (found := re.match(r"(\d+)\)", own.rest))
        ]
        return max(limits, default=1)

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of the matrix products of a step on one device."""
        return sum(run.times * product_flops(run.instruction, run.inside) for run in self.runs)

    @functools.cached_property
    def cycles(self) -> dict[str, int]:
        """The compiler's estimates of a step: cycles of matrix products and of all else."""
        found = {"products": 0, "other": 0}
        for run in self.runs:
            estimate = re.search(r'"estimated_cycles":"(\d+)"', run.instruction.rest)
            if estimate is None or run.fused_in is not None:
                continue
            kind = "products" if self._multiplies(run.instruction) else "other"
            found[kind] += run.times * int(estimate[1])
        return found

    def _multiplies(self, own: Instruction) -> bool:
        if own.opcode in ("dot", "convolution"):
            return True
        inside = [self.computations[name] for name in called(own) if own.opcode == "fusion"]
        return any(self._multiplies(inner) for part in inside for inner in part.values())

    def collectives(self, mesh: Mapping[str, int]) -> list[Collective]:
        """Every exchange of a step; the mesh is what the program was compiled for."""
        found = []
        for run in self.runs:
            own, fusion = run.instruction, run.fused_in
            kind = own.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            axes, group = over(own, mesh)
            if group == 1:
                continue
            size = sum(run.inside[name].bytes for name in own.operands)
            size *= group if kind == "all-gather" else 1
            overlaps = own.opcode.endswith("-start")
            origin = own
            if fusion is not None:
                overlaps |= fusion.opcode == "async-start"
                if SCATTERS in (fusion.attribute("calls") or ""):
                    kind, origin = "reduce-scatter", fusion
            source = self.source(origin)
            found.append(Collective(kind, axes, group, size, run.times, source, overlaps))
        return found

    def source(self, own: Instruction) -> str:
        """The line of the model, and the equation, that an instruction was made for."""
        frame = re.search(r"stack_frame_id=(\d+)", own.rest)
        place = self.sources.get(int(frame[1]), "") if frame else ""
        named = re.search(r'op_name="([^"]*)"', own.rest)
        name = equation(named[1]) if named else own.name
        backward = " (backward)" if named and "transpose(" in named[1] else ""
        return f"{place} {name}".strip() + backward


def equation(op_name: str) -> str:
    r"""What an instruction computes or reads, out of the name that JAX gave it.

    >>> equation("jit(train_step)/transpose(jvp(bd,dj->bj))/dot_general")
    'bd,dj->bj'
    >>> equation(r"state[\'params\'][\'norm\'][\'scale_D\']")
    'state/params/norm/scale_D'
    """
    name = op_name.removesuffix("/dot_general").rpartition("/")[2]
    while wrapped := re.fullmatch(r"(?:jvp|transpose)\((.*)\)", name):
        name = wrapped[1]
    return re.sub(r"\[\\?'([^'\\]*)\\?'\]", r"/\1", name)


def called(own: Instruction) -> list[str]:
    """The computations that run when an instruction does; not those that only combine numbers."""
    if own.opcode == "while":
        names = [own.attribute("body")]  # conditions only compare, but that of an open loop
    elif own.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", own.rest)
        parts = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        names = parts[:1] or [own.attribute("true_computation")]
    elif own.opcode in ("call", "fusion", "async-start"):
        names = [own.attribute("calls") or own.attribute("to_apply")]
    else:
        names = []
    return [name for name in names if name is not None]
