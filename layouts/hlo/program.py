"""Reads the text of a compiled program: its operations, collectives and loops."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from layouts.cost.collectives import KINDS, Collective
from layouts.cost.jaxpr_cost import OpCost
from layouts.hlo import parser

FUSED_REDUCE_SCATTER = "all-reduce-scatter"  # the TPU compiler's fusion of all-reduce and slice
# Names of fusions, on TPUs, that start, continue or end a collective and compute something else.
ASYNC_FUSION = re.compile(r"async[-_]collective")
# What Pallas calls become on TPUs, and on GPUs by Triton and by Mosaic.
KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)"')
# Instructions that neither compute nor move anything; what they call is counted separately.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
        "conditional", "after-all", "partition-id", "replica-id", "opt-barrier")  # fmt: skip
ASYNC_CALLS = ("async-start", "call-start")  # of computations, on tpu7x those for its SparseCores
SLICING = ("dynamic-slice", "slice", "gather")  # which read a part of their first operand


class ExecutedInstruction(NamedTuple):
    """Holds an instruction, how often a step runs it, and what surrounds it."""

    instruction: parser.Instruction
    times: int
    computation: parser.Computation
    fused_in: parser.Instruction | None = None


@dataclasses.dataclass(frozen=True)
class CompiledText:
    """Holds a program's computations by name, and the source lines of its instructions."""

    computations: Mapping[str, parser.Computation]
    entries: tuple[str, ...]
    sources: Mapping[int, str]
    open_loop: str | None = None
    """The named scope of a loop without a known trip count; one iteration of it is counted."""
    scope: str | None = None
    """The named scope to which the instructions of the entries are limited."""

    @classmethod
    def read(cls, text: str, open_loop: str | None = None) -> "CompiledText":
        """Parses what `jax.stages.Compiled.as_text()` returns."""
        computations: dict[str, parser.Computation] = {}
        entry, current = "", None
        for line in parser.joined_lines(text):
            if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (parsed := parser.parse_instruction(line)):
                current[parsed.name] = parsed
        return cls(computations, (entry,), parser.frames(text), open_loop)

    @property
    def iteration(self) -> "CompiledText":
        """Returns one iteration of the open loop: its condition and its body."""
        loop = next(e.instruction for e in self.executed if self.is_open(e.instruction))
        names = (loop.attribute("condition"), loop.attribute("body"))
        return dataclasses.replace(self, entries=tuple(name for name in names if name is not None))

    def is_open(self, instruction: parser.Instruction) -> bool:
        return instruction.opcode == "while" and f'{self.open_loop}/while"' in instruction.rest

    @functools.cached_property
    def executed(self) -> list[ExecutedInstruction]:
        """Lists all instructions that a step executes; multiplies trip counts of nested loops."""
        walks = (self._walk(self.computations[e], 1, None, self.scope) for e in self.entries)
        return list(itertools.chain.from_iterable(walks))

    def _walk(
        self,
        computation: parser.Computation,
        times: int,
        fused_in: parser.Instruction | None,
        scope: str | None = None,
    ) -> Iterator[ExecutedInstruction]:
        for instruction in computation.values():
            if scope is not None and scope not in instruction.op_name.split("/"):
                continue
            yield ExecutedInstruction(instruction, times, computation, fused_in)
            inner_times, fusion = times, fused_in
            if instruction.opcode == "while":
                inner_times *= self.trip_count(instruction, computation)
            elif instruction.opcode in ("fusion", *ASYNC_CALLS):
                fusion = instruction
            if instruction.opcode == "conditional":  # the costliest branch, as for a trace
                inner = [self.computations[name] for name in branches(instruction)]
                walks = [list(self._walk(branch, times, fused_in)) for branch in inner]
                yield from max(walks, key=total_flops)
            for name in called(instruction):
                yield from self._walk(self.computations[name], inner_times, fusion)

    def trip_count(self, loop: parser.Instruction, computation: parser.Computation) -> int:
        """Returns the trip count of a loop: its counter grows to a constant, by 1 in JAX's scans.

        The counter may grow by 2 in loops that XLA makes of a product and the exchange of an
        operand or of the result ("windowed einsum").
        """
        if self.is_open(loop):
            return 1
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = self.computations[loop.attribute("condition") or ""]
        limits = [number for name in condition if (number := constant(name, condition)) is not None]
        if not limits:
            return 1
        first, increment = self._counter(loop, computation)
        return -(-(max(limits) - first) // increment)

    def _counter(self, loop: parser.Instruction, caller: parser.Computation) -> tuple[int, int]:
        """Returns where the counter of a loop starts, and by how much it grows."""
        condition = self.computations[loop.attribute("condition") or ""]
        body = self.computations[loop.attribute("body") or ""]
        reads = [read for read in condition.values() if read.opcode == "get-tuple-element"]
        index = reads[0].number("index") if len(reads) == 1 else None
        if index is None:
            return 0, 1
        start = copied(loop.operands[0], caller)
        first = constant(start.operands[index], caller) if start.opcode == "tuple" else None
        result = next(instruction for instruction in body.values() if instruction.is_root)
        update = copied(result.operands[index], body) if result.opcode == "tuple" else result
        added = [constant(name, body) for name in update.operands] if update.opcode == "add" else []
        return first or 0, next((number for number in added if number), 1)

    @functools.cached_property
    def flops(self) -> int:
        """Counts the FLOPs of the matrix products of a step on one device."""
        return total_flops(self.executed)

    @functools.cached_property
    def kernels(self) -> list[tuple[str, OpCost]]:
        """Lists the kernels (Pallas calls) that a step runs, by name; their FLOPs are unknown."""
        kernels = []
        for instruction, times, computation, _ in self.executed:
            if KERNEL.search(instruction.rest):
                # The last scope, before the operation, is the name of the kernel in JAX.
                scope = instruction.op_name.rpartition("/")[0].rpartition("/")[2]
                size = instruction.bytes + sum(computation[o].bytes for o in instruction.operands)
                source, scopes = self.source(instruction), instruction.op_name
                op = OpCost(0, size, 0, times, source=source, scopes=scopes)
                kernels.append((scope or instruction.name, op))
        return kernels

    @functools.cached_property
    def ops(self) -> list[OpCost]:
        """Lists what a step runs outside of Pallas calls: fusions and single operations.

        On TPUs they have the compiler's cycle estimates, elsewhere only FLOPs and bytes.
        """
        ops = []
        for executed in self.executed:
            instruction = executed.instruction
            estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
            if executed.fused_in is None and (estimate or self._runs_on_gpu(instruction)):
                cycles = None if estimate is None else int(estimate[1])
                moved_bytes = self._moved_bytes(executed) if cycles is None else 0
                walks = (self._walk(self.computations[c], 1, None) for c in called(instruction))
                every = [executed._replace(times=1), *itertools.chain(*walks)]
                dtype = max(parser.eight_bit_type(e.instruction, e.computation) for e in every)
                source, scopes = self.source(instruction), instruction.op_name
                flops, times = total_flops(every), executed.times
                ops.append(OpCost(flops, moved_bytes, 0, times, dtype, source, scopes, cycles))
        return ops

    @functools.cached_property
    def _has_cycles(self) -> bool:
        """Returns whether the compiler estimates cycles; then what has no estimate takes none."""
        every = itertools.chain.from_iterable(c.values() for c in self.computations.values())
        return any('"estimated_cycles"' in instruction.rest for instruction in every)

    def _runs_on_gpu(self, instruction: parser.Instruction) -> bool:
        """Returns whether an instruction takes time on a GPU, and is not a kernel or collective."""
        return (
            not self._has_cycles
            and instruction.opcode not in FREE
            and collective_kind(instruction) is None
            and not instruction.opcode.endswith(("-start", "-done", "-update"))
            and not KERNEL.search(instruction.rest)
        )

    def _moved_bytes(self, executed: ExecutedInstruction) -> int:
        """Counts the bytes that an instruction reads and writes.

        A fusion that slices an operand reads the slice, and one that updates a part of an operand
        in place writes the part.
        """
        instruction, computation = executed.instruction, executed.computation
        operands = [computation[name].bytes for name in instruction.operands]
        if instruction.opcode in SLICING:
            return 2 * instruction.bytes
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1]
        if instruction.opcode != "fusion":
            return sum(operands) + instruction.bytes
        body = self.computations[called(instruction)[0]]
        operands_of = {user.name: viewed(user, body) for user in body.values()}
        written_bytes = instruction.bytes
        for parameter in body.values():
            if parameter.opcode != "parameter":
                continue
            uses = [user for user in body.values() if parameter.name in operands_of[user.name]]
            if not uses or any(operands_of[user.name][0] != parameter.name for user in uses):
                continue
            number = parameter.number_in_parentheses
            assert number is not None, parameter.rest
            updates = [user for user in uses if user.opcode == "dynamic-update-slice"]
            slices = [user for user in uses if user.opcode in SLICING]
            if len(updates) + len(slices) < len(uses):
                continue
            operands[number] = sum(user.bytes for user in slices)
            if updates:
                update_bytes = sum(body[user.operands[1]].bytes for user in updates)
                written_bytes += update_bytes - parameter.bytes
        return sum(operands) + max(written_bytes, 0)

    def collectives(self, mesh: Mapping[str, int]) -> list[Collective]:
        """Returns every collective of a step; `mesh` is the mesh of the program.

        A collective that several fusions share counts once.
        """
        collectives = []
        channels = set[int | None]()
        for instruction, times, computation, fusion in self.executed:
            kind = collective_kind(instruction)
            if kind is None:
                continue
            axes, group = parser.group_axes(instruction, mesh)
            if group == 1:
                continue
            sizes = [computation[name].bytes for name in instruction.operands]
            # The smaller of the first two operands of a ragged exchange holds its rows; the other
            # one is a buffer for as many rows from each device.
            is_ragged = instruction.opcode.startswith("ragged-")
            size = min(sizes[:2]) if is_ragged else sum(sizes)
            size *= group if kind == "all-gather" else 1
            overlaps = instruction.name in self.overlapped
            origin = instruction
            if fusion is not None:
                overlaps |= fusion.name in self.overlapped
                names = (fusion.name, fusion.attribute("calls") or "")
                if any(ASYNC_FUSION.match(name) for name in names):
                    channel = instruction.number("channel_id")
                    if channel in channels:
                        continue
                    channels.add(channel)
                    overlaps = True
                if FUSED_REDUCE_SCATTER in (fusion.attribute("calls") or ""):
                    kind, origin = "reduce-scatter", fusion
            source, scopes = self.source(origin), origin.op_name
            collectives.append(Collective(kind, axes, group, size, times, source, overlaps, scopes))
        return collectives

    @functools.cached_property
    def overlapped(self) -> set[str]:
        """Returns the names of the starts of transfers that overlap with something else."""
        names = set[str]()
        for computation in self.computations.values():
            running = set[str]()
            for instruction in computation.values():  # in the order of the schedule
                running -= {*instruction.operands}
                if instruction.opcode.endswith("-start"):
                    running.add(instruction.name)
                elif instruction.opcode not in FREE or called(instruction):
                    names |= running
        return names

    def source(self, instruction: parser.Instruction) -> str:
        """Returns the line of the model, and the equation, that an instruction was made for."""
        line = self.sources.get(instruction.number("stack_frame_id") or 0, "")
        name = equation(instruction.op_name) or instruction.name
        backward = " (backward)" * ("transpose(" in instruction.op_name)
        return f"{line} {name}".strip() + backward


def collective_kind(instruction: parser.Instruction) -> str | None:
    """Returns what kind of collective an instruction is or starts; None for anything else."""
    kind = instruction.opcode.removesuffix("-start").removeprefix("ragged-")
    return kind if kind in KINDS else None


def viewed(user: parser.Instruction, computation: parser.Computation) -> list[str]:
    """Returns the names of operands, looking through bitcasts; a bitcast itself has none."""
    names = []
    for name in user.operands if user.opcode != "bitcast" else ():
        while computation[name].opcode == "bitcast":
            name = computation[name].operands[0]
        names.append(name)
    return names


def copied(name: str, computation: parser.Computation) -> parser.Instruction:
    """Returns an instruction, or what it is a copy of."""
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation[instruction.operands[0]]
    return instruction


def constant(name: str, computation: parser.Computation) -> int | None:
    """Returns the value of an integer constant; None for anything else."""
    instruction = copied(name, computation)
    return instruction.number_in_parentheses if instruction.opcode == "constant" else None


def equation(op_name: str) -> str:
    r"""Returns what an instruction computes or reads, from the name that JAX gave it."""
    name = op_name.removesuffix("/dot_general").rpartition("/")[2]
    closing = max(0, name.count(")") - name.count("("))  # of transforms of several scopes
    name = name[: len(name) - closing]
    while wrapped := re.fullmatch(r"(?:jvp|transpose)\((.*)\)", name):
        name = wrapped[1]
    return re.sub(r"\[\\?'([^'\\]*)\\?'\]", r"/\1", name)


def total_flops(instructions: Iterable[ExecutedInstruction]) -> int:
    """Counts the FLOPs of the matrix products of a list of executed instructions."""
    return sum(e.times * parser.product_flops(e.instruction, e.computation) for e in instructions)


def branches(conditional: parser.Instruction) -> list[str]:
    """Returns the computations that are the branches of a conditional."""
    if listed := re.search(r"branch_computations=\{([^}]*)\}", conditional.rest):
        return re.findall(r"%?([\w.\-]+)", listed[1])
    names = (conditional.attribute("true_computation"), conditional.attribute("false_computation"))
    return [name for name in names if name is not None]


def called(instruction: parser.Instruction) -> list[str]:
    """Returns the computations that an instruction always executes, except those of reductions."""
    if instruction.opcode == "while":
        name = instruction.attribute("body")  # conditions only compare, except an open loop's
    elif instruction.opcode in ("call", "fusion", *ASYNC_CALLS):
        name = instruction.attribute("calls") or instruction.attribute("to_apply")
    else:
        name = None
    return [] if name is None else [name]
