"""Parses the lines and tables of a compiled program, as XLA prints them."""

import dataclasses
import math
import re
from collections.abc import Iterator

from layouts.cost.collectives import checkout_file

ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}


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

    def is_in(self, scope: str) -> bool:
        """Returns whether it was traced in this named scope."""
        op_name = re.search(r'op_name="([^"]*)"', self.rest)
        return op_name is not None and scope in op_name[1].split("/")

    def number(self, name: str) -> int | None:
        """Returns the value of an attribute such as `index`."""
        match = re.search(rf"\b{name}=(\d+)", self.rest)
        return int(match[1]) if match else None


Computation = dict[str, Instruction]


def joined_lines(text: str) -> Iterator[str]:
    """Yields the lines of a program; an instruction with the metadata of a kernel has several.

    >>> list(joined_lines("%f () -> f32[] {\\n  ROOT %k = f32[] g(), a={b={\\nc\\n}}\\n}"))
    ['%f () -> f32[] {', '  ROOT %k = f32[] g(), a={b={c}}', '}']
    """
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(" ") and line.endswith("{"):
            for more in lines:
                line += more
                if line.count("{") <= line.count("}"):
                    break
        yield line


def parse_instruction(line: str) -> Instruction | None:
    """Parses a line; None if it is not an instruction.

    >>> dot = parse_instruction("  %dot.1 = (f32[2]{0}, f32[]) dot(%a, %b), to_apply=%add")
    >>> dot.opcode, dot.operands, dot.bytes, dot.attribute("to_apply")
    ('dot', ('a', 'b'), 12, 'add')
    """
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    inside = rest[: closing("(" + rest) - 2]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(head[2], shape, opcode, operands, rest, head[1] is not None)


def closing(text: str) -> int:
    """Returns the index behind the parenthesis that closes the first one."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    return len(text)


def shapes(text: str) -> Iterator[tuple[int, int]]:
    """Yields the elements of each array in a printed shape, and the bits of an element."""
    for kind, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        digits = re.search(r"\d+", kind)
        bits = ITEM_BITS.get(kind) or (int(digits[0]) if digits else 0)
        yield math.prod(dims(sizes)), bits


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
