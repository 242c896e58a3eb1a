"""Lines and tables of compiled programs, as XLA prints them."""

import pytest

from layouts.hlo.parser import (
    closing,
    first_group,
    frames,
    joined_lines,
    parse_instruction,
    shapes,
    sizes_of,
)

LINE = (
    "  ROOT %fusion.2 = (bf16[4,6]{1,0}, pred[3]{0}) fusion(%a.1, %b), kind=kLoop, "
    'calls=%computation.7, metadata={op_name="jit(f)/dot" stack_frame_id=3}'
)
TABLES = """\
FileNames
1 "/elsewhere/models/layers/stack.py"
2 "/python/site-packages/jax/api.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=83 end_line=83}
2 {file_name_id=2 function_name_id=2 line=5 end_line=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
"""


def test_an_instruction_has_name_shape_operands_and_attributes() -> None:
    computed = parse_instruction(LINE)
    assert computed is not None
    assert (computed.name, computed.opcode, computed.operands) == (
        "fusion.2",
        "fusion",
        ("a.1", "b"),
    )
    assert computed.bytes == 2 * 4 * 6 + 3
    assert computed.attribute("calls") == "computation.7" and computed.attribute("body") is None
    assert sizes_of("fusion.2", {"fusion.2": computed}) == [4, 6]


@pytest.mark.parametrize("line", ["HloModule jit_f", "}", ""])
def test_other_lines_are_no_instructions(line: str) -> None:
    assert parse_instruction(line) is None


def test_parentheses_are_matched() -> None:
    assert closing("(a(b)c)d") == 7 and closing("(a") == 2


def test_types_of_odd_sizes_are_counted_in_bits() -> None:
    assert list(shapes("(s4[8]{0}, f32[], c64[2,3]{1,0})")) == [(8, 4), (1, 32), (6, 64)]


def test_a_frame_of_a_library_has_the_line_of_the_code_that_called_it() -> None:
    assert frames(TABLES) == {1: "models/layers/stack.py:83", 2: "models/layers/stack.py:83"}


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", [0, 2, 4, 6]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [0, 1, 2, 3]),
        ("source_target_pairs={{0,0},{1,4}}", [1, 4]),
    ],
)
def test_the_first_group_of_devices(text: str, group: list[int]) -> None:
    assert first_group(text, 8).tolist() == group


def test_a_kernel_with_metadata_of_several_lines_is_one_instruction() -> None:
    text = "%f () -> f32[] {\n  ROOT %k = f32[] g(), a={b={\nc\n}}\n}"
    assert [*joined_lines(text)] == ["%f () -> f32[] {", "  ROOT %k = f32[] g(), a={b={c}}", "}"]


def test_an_instruction_has_operands_bytes_and_attributes() -> None:
    dot = parse_instruction("  %dot.1 = (f32[2]{0}, f32[]) dot(%a, %b), to_apply=%add")
    assert dot is not None and (dot.opcode, dot.operands, dot.bytes) == ("dot", ("a", "b"), 12)
    assert dot.attribute("to_apply") == "add"
