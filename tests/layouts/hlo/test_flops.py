"""FLOPs of products, which TPUs write as convolutions."""

import pytest

from layouts.hlo.parser import parse_instruction, product_flops


def flops(*lines: str) -> int:
    instructions = [parse_instruction(f"  {line}") for line in lines]
    computation = {computed.name: computed for computed in instructions if computed is not None}
    return product_flops(computation["out"], computation)


def test_a_dot_multiplies_each_output_by_what_is_summed() -> None:
    assert flops(
        "%a = f32[5,7,3]{2,1,0} parameter(0)",
        "%b = f32[5,3,4]{2,1,0} parameter(1)",
        "%out = f32[5,7,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_contracting_dims={1}",
    ) == 2 * 5 * 7 * 3 * 4  # fmt: skip


def test_a_convolution_without_a_window_is_a_product() -> None:
    assert flops(
        "%a = f32[7,3]{1,0} parameter(0)",
        "%b = f32[3,4]{1,0} parameter(1)",
        "%out = f32[7,4]{1,0} convolution(%a, %b), dim_labels=bf_io->bf",
    ) == 2 * 7 * 3 * 4  # fmt: skip


@pytest.mark.parametrize("opcode", ["add", "copy"])
def test_other_instructions_have_no_products(opcode: str) -> None:
    assert flops("%a = f32[7]{0} parameter(0)", f"%out = f32[7]{{0}} {opcode}(%a)") == 0
