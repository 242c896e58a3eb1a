"""Parses a compiled program as XLA prints it: instructions, tables, products, device groups."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from layouts.cost.collectives import checkout_file
from layouts.cost.dataflow import valid_pairs


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Holds one line of a compiled program."""

    name: str
    shape: str  # as printed: "bf16[16,1024]{1,0}", or several in parentheses
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool = False
    """Whether this is the result of its computation."""

    @property
    def bytes(self) -> int:
        """Counts the bytes of the result, without padding."""
        return sum(count * bits // 8 for count, bits in shapes(self.shape))

    def attribute(self, name: str) -> str | None:
        """Returns the computation that an attribute such as `body` names."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        """Returns the scopes and the operation for which JAX made it; "" if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def number(self, name: str) -> int | None:
        """Returns the value of an attribute such as `index`."""
        match = re.search(rf"\b{name}=(\d+)", self.rest)
        return int(match[1]) if match else None

    @property
    def number_in_parentheses(self) -> int | None:
        """Returns the value of an integer constant, or the position of a parameter."""
        match = re.match(r"(\d+)\)", self.rest)
        return int(match[1]) if match else None


Computation = dict[str, Instruction]


def joined_lines(text: str) -> Iterator[str]:
    """Yields the lines of a program, joining instructions that a kernel's metadata splits."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(" ") and line.endswith("{"):
            for more in lines:
                line += more
                if line.count("{") <= line.count("}"):
                    break
        yield line


def parse_instruction(line: str) -> Instruction | None:
    """Parses a line; None if it is not an instruction."""
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[: closing("(" + rest) - 2]))
    return Instruction(head[2], shape, opcode, operands, rest, head[1] is not None)


def closing(text: str) -> int:
    """Returns the index after the parenthesis that closes the first one."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    return len(text)


def shapes(text: str) -> Iterator[tuple[int, int]]:
    """Yields the number of elements of each array in a printed shape, and the bits of one."""
    for kind, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        digits = re.search(r"\d+", kind.replace("pred", "pred8"))
        yield math.prod(dims(sizes)), int(digits[0]) if digits else 0


def dims(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def sizes_of(name: str, computation: Computation) -> list[int]:
    """Returns the sizes of the axes of an instruction's first array."""
    sizes = re.search(r"\[([\d,]*)\]", computation[name].shape)
    return dims(sizes[1]) if sizes else []


def frames(text: str) -> dict[int, str]:
    """Maps each stack frame of the program to the nearest line of this checkout's code."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", block, re.MULTILINE))
        for name, block in re.findall(r"^(FileNames|FileLocations|StackFrames)\n((?:\d.*\n?)*)",
                                      text, re.MULTILINE)
    }  # fmt: skip
    files = tables.get("FileNames", {})
    lines: dict[str, str] = {}
    for number, location in tables.get("FileLocations", {}).items():
        line = re.search(r"file_name_id=(\d+).*?\bline=(\d+)", location)
        if line and (file := checkout_file(files.get(line[1], "").strip('"'))):
            lines[number] = f"{file}:{line[2]}"
    nearest: dict[int, str] = {}
    for number, frame in tables.get("StackFrames", {}).items():  # a parent comes before its child
        location = re.search(r"file_location_id=(\d+)", frame)
        parent = re.search(r"parent_frame_id=(\d+)", frame)
        above = nearest.get(int(parent[1]) - 1, "") if parent else ""  # printed counting from 2
        nearest[int(number)] = lines.get(location[1], above) if location else above
    return nearest


def group_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes along which the devices of a group differ, and the group size."""
    group = first_group(instruction.rest, math.prod(mesh.values()))
    indices = np.unravel_index(group, tuple(mesh.values()))
    axes = tuple(name for name, i in zip(mesh, indices, strict=True) if len(np.unique(i)) > 1)
    return axes, len(group)


def first_group(text: str, devices: int) -> np.ndarray:
    """Returns the device numbers of the first group."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        moves = [dims(pair) for pair in re.findall(r"[\d,]+\d", pairs[1])]
        moved = np.array([move for move in moves if move[0] != move[1]] or [[0, 0]])
        return np.unique(moved[0])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", text):
        mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        group_names = re.findall(r"'(\w+)'", named[2])
        inner = [i for i, name in enumerate(mesh) if name in group_names]
        outer = [i for i, name in enumerate(mesh) if name not in group_names]
        count = math.prod(numbers.shape[i] for i in inner)
        return numbers.transpose(outer + inner).reshape(-1, count)[0]
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = np.arange(devices).reshape(dims(tiled[2]))
        numbers = numbers.transpose(dims(tiled[3])) if tiled[3] else numbers
        return numbers.reshape(dims(tiled[1]))[0]
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return np.array(dims(listed[1])) if listed else np.arange(devices)


def product_flops(instruction: Instruction, computation: Computation) -> int:
    """Counts the FLOPs of a matrix product, which TPUs write as a convolution; else 0."""
    if instruction.opcode == "dot":
        left = sizes_of(instruction.operands[0], computation)
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        inner = math.prod(left[i] for i in dims(summed[1])) if summed else 1
        return 2 * inner * math.prod(sizes_of(instruction.name, computation))
    if instruction.opcode == "convolution":
        return convolution_flops(instruction, computation)
    return 0


def eight_bit_type(instruction: Instruction, computation: Computation) -> str:
    """Returns JAX's name for the type of a product's operands, if it has eight bits; else ""."""
    if instruction.opcode not in ("dot", "convolution"):
        return ""
    kind = computation[instruction.operands[0]].shape.partition("[")[0]
    return {"s8": "int8", "f8e4m3fn": "float8_e4m3fn"}.get(kind, "")


def convolution_flops(instruction: Instruction, computation: Computation) -> int:
    """Counts two FLOPs for each multiplication that is not with padding or holes."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    assert labels is not None, instruction.rest
    names = (*instruction.operands, instruction.name)
    left, kernel, out = (
        dict(zip(axes, sizes_of(name, computation), strict=True))
        for axes, name in zip(labels.groups(), names, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = [axis for axis in labels[3] if axis.isdigit()]
    pairs = 1
    for i, axis in enumerate(sorted(spatial)):
        pairs *= valid_pairs(
            left[axis], kernel[axis], out[axis],
            stride=nth(settings, "stride", i), dilate=nth(settings, "lhs_dilate", i),
            spread=nth(settings, "rhs_dilate", i), low=nth(settings, "pad", i, 0),
        )  # fmt: skip
    batch = left["b"] // (instruction.number("batch_group_count") or 1)
    return 2 * batch * out["f"] * kernel["i"] * pairs


def nth(settings: Mapping[str, str], name: str, i: int, default: int = 1) -> int:
    """Returns a setting of the window along one axis; for a pad, its lower side."""
    if name not in settings:
        return default
    return int(settings[name].split("x")[i].split("_")[0])
