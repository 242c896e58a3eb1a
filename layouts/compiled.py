"""What a compiled program does, read off its text: products, collectives, cycles, loops."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from layouts.traffic import KINDS, Collective, model_file

ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
SCATTERS = "all-reduce-scatter"  # what the TPU compiler names a fused all-reduce and slice


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    name: str
    shape: str  # as printed: "bf16[16,1024]{1,0}", or several in parentheses
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def bytes(self) -> int:
        """Of the result, without padding."""
        return sum(count * bits // 8 for count, bits in shapes(self.shape))

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


Computation = dict[str, Instruction]


class Run(NamedTuple):
    """An instruction, how often a step runs it, and what surrounds it."""

    instruction: Instruction
    times: int
    inside: Computation
    fused_in: Instruction | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program's computations by name, and where its lines come from."""

    computations: Mapping[str, Computation]
    entry: str
    sources: Mapping[int, str]

    @classmethod
    def read(cls, text: str) -> "Compiled":
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
        return cls(computations, entry, frames(text))

    @functools.cached_property
    def runs(self) -> list[Run]:
        """All that a step runs, loops multiplied out."""
        return list(self._walk(self.computations[self.entry], 1, None))

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

    def flops_by_source(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for run in self.runs:
            flops = run.times * product_flops(run.instruction, run.inside)
            if flops:
                source = self.source(run.instruction)
                found[source] = found.get(source, 0) + flops
        return found

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
        name = named[1].removesuffix("/dot_general").rpartition("/")[2] if named else own.name
        name = re.sub(r"^(?:jvp|transpose)\((.*)\)$", r"\1", name)
        backward = " (backward)" if named and "transpose(" in named[1] else ""
        return f"{place} {name}".strip() + backward


def instruction(line: str) -> Instruction | None:
    """
    >>> found = instruction("  %dot.1 = (f32[2]{0}, f32[]) dot(%a, %b), to_apply=%add")
    >>> found.opcode, found.operands, found.bytes, found.attribute("to_apply")
    ('dot', ('a', 'b'), 12, 'add')
    """
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    inside = rest[: closing("(" + rest) - 2]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(head[1], shape, opcode, operands, rest)


def closing(text: str) -> int:
    """Just behind the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def shapes(text: str) -> Iterator[tuple[int, int]]:
    """Elements of each array in a printed shape, and bits of an element."""
    for kind, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        digits = re.search(r"\d+", kind)
        bits = ITEM_BITS.get(kind) or (int(digits[0]) if digits else 0)
        yield math.prod(dims(sizes)), bits


def dims(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def sizes_of(name: str, inside: Computation) -> list[int]:
    """Sizes of the axes of an instruction's first array."""
    found = re.search(r"\[([\d,]*)\]", inside[name].shape)
    return dims(found[1]) if found else []


def called(own: Instruction) -> list[str]:
    """The computations that run when an instruction does; not those that only combine numbers."""
    if own.opcode == "while":
        names = [own.attribute("body")]
    elif own.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", own.rest)
        parts = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        names = parts[:1] or [own.attribute("true_computation")]
    elif own.opcode in ("call", "fusion", "async-start"):
        names = [own.attribute("calls") or own.attribute("to_apply")]
    else:
        names = []
    return [name for name in names if name is not None]


def product_flops(own: Instruction, inside: Computation) -> int:
    """FLOPs of a matrix product, which TPUs write as a convolution; 0 of anything else."""
    if own.opcode == "dot":
        left = sizes_of(own.operands[0], inside)
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", own.rest)
        inner = math.prod(left[i] for i in dims(summed[1])) if summed else 1
        return 2 * inner * math.prod(sizes_of(own.name, inside))
    if own.opcode == "convolution":
        return convolution_flops(own, inside)
    return 0


def convolution_flops(own: Instruction, inside: Computation) -> int:
    """Twice the multiplications that are not with padding or holes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", own.rest)
    assert labels is not None, own.rest
    parts = (*own.operands, own.name)
    left, kernel, out = (
        dict(zip(axes, sizes_of(name, inside), strict=True))
        for axes, name in zip(labels.groups(), parts, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", own.rest)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", own.rest)
    spatial = [axis for axis in labels[3] if axis.isdigit()]
    pairs = 1
    for i, axis in enumerate(sorted(spatial)):
        pairs *= valid_pairs(
            left[axis], kernel[axis], out[axis],
            stride=nth(settings, "stride", i), dilate=nth(settings, "lhs_dilate", i),
            spread=nth(settings, "rhs_dilate", i), low=nth(settings, "pad", i, 0),
        )  # fmt: skip
    batch = left["b"] // (int(groups[1]) if groups else 1)
    return 2 * batch * out["f"] * kernel["i"] * pairs


def nth(settings: Mapping[str, str], name: str, i: int, default: int = 1) -> int:
    """A setting of the window along one axis; of a pad, the lower side."""
    if name not in settings:
        return default
    return int(settings[name].split("x")[i].split("_")[0])


@functools.cache
def valid_pairs(
    size: int, kernel: int, out: int, *, stride: int, dilate: int, spread: int, low: int
) -> int:
    """Pairs of an output and a kernel place along one axis that meet an input."""
    place = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - low
    inside = (place >= 0) & (place <= (size - 1) * dilate) & (place % dilate == 0)
    return int(np.sum(inside))


def over(own: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which the devices of a group differ, and the size of a group."""
    group = first_group(own.rest, math.prod(mesh.values()))
    places = np.array(np.unravel_index(group, tuple(mesh.values())))
    axes = tuple(name for name, own in zip(mesh, places, strict=True) if len(np.unique(own)) > 1)
    return axes, len(group)


def first_group(text: str, devices: int) -> np.ndarray:
    """Device numbers of one group, in any of the ways in which groups are printed.

    >>> first_group("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", 8)
    array([0, 2, 4, 6])
    >>> first_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 8)
    array([0, 1, 2, 3])
    >>> first_group("source_target_pairs={{0,0},{1,4}}", 8)
    array([1, 4])
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        moves = [dims(pair) for pair in re.findall(r"[\d,]+\d", pairs[1])]
        moved = np.array([move for move in moves if move[0] != move[1]] or [[0, 0]])
        return np.unique(moved[0])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", text):
        return first_of_mesh(named[1], named[2])
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = np.arange(devices).reshape(dims(tiled[2]))
        numbers = numbers.transpose(dims(tiled[3])) if tiled[3] else numbers
        return numbers.reshape(dims(tiled[1]))[0]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return np.array(dims(listed[1])) if listed else np.arange(devices)


def first_of_mesh(sizes: str, axes: str) -> np.ndarray:
    """The group along axes of a mesh that the compiler made up."""
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    wanted = re.findall(r"'(\w+)'", axes)
    order = [i for i, name in enumerate(mesh) if name in wanted]
    rest = [i for i, name in enumerate(mesh) if name not in wanted]
    count = math.prod(numbers.shape[i] for i in order)
    return numbers.transpose(rest + order).reshape(-1, count)[0]


def frames(text: str) -> dict[int, str]:
    """The nearest line of models/ or trainer/ for each stack frame of the program."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", block, re.MULTILINE))
        for name, block in re.findall(r"^(FileNames|FileLocations|StackFrames)\n((?:\d.*\n?)*)",
                                      text, re.MULTILINE)
    }  # fmt: skip
    files = tables.get("FileNames", {})
    places: dict[str, str] = {}
    for number, location in tables.get("FileLocations", {}).items():
        found = re.search(r"file_name_id=(\d+).*?\bline=(\d+)", location)
        if found and (file := model_file(files.get(found[1], "").strip('"'))):
            places[number] = f"{file}:{found[2]}"
    nearest: dict[int, str] = {}
    for number, frame in tables.get("StackFrames", {}).items():  # a parent comes before its child
        location = re.search(r"file_location_id=(\d+)", frame)
        parent = re.search(r"parent_frame_id=(\d+)", frame)
        above = nearest.get(int(parent[1]) - 1, "") if parent else ""  # printed counting from 2
        nearest[int(number)] = places.get(location[1], above) if location else above
    return nearest
