"""Options for the compiler: checked, for one platform, used by training and by plans alike."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

from configs.errors import RunError, UserError
from configs.load import load
from layouts.absent_devices import has_compiler, topology_mesh
from layouts.hlo.compilation import DUMPED, compile_program, parse_option, text_of
from layouts.mesh import make_mesh, uncached
from tests.toys import ROOT, WHOLE, optax_promotion
from tests.trainer.planning.runs import TASK
from tests.trainer.test_loop import RUN, job
from trainer.loop import train
from trainer.planning.training import compile_step, trace_step
from trainer.run import Run

UNKNOWN = "cpu:xla_no_such_option=true"


def run_with(*options: str) -> Run:
    return dataclasses.replace(RUN, task=TASK, compiler_options=options)


@pytest.mark.parametrize(
    "option", ["xla_a=1", "tpus:xla_a=1", "tpu:xla_a", "tpu:a=1", "tpu:xla_a= "]
)
def test_an_option_without_platform_name_or_value_is_refused(option: str) -> None:
    with pytest.raises(UserError, match="legal is platform:name=value"):
        run_with(option)


def test_training_and_its_plan_use_the_same_options(tmp_path: Path) -> None:
    run = run_with(UNKNOWN)
    for use in (
        lambda: train(job(tmp_path, run)),
        lambda: compile_step(trace_step(run, WHOLE, make_mesh(WHOLE))),
    ):
        with optax_promotion(), pytest.raises(UserError, match="option: 'xla_no_such_option'"):
            use()


def test_an_option_for_another_platform_is_ignored() -> None:
    compiled([UNKNOWN.replace("cpu", "tpu")])


def test_the_options_for_gpus_are_known_to_this_compiler() -> None:
    """It knows the names for GPUs though it compiles for CPUs."""
    compiled([option.replace("gpu:", "cpu:") for option in options_of("gpu")])
    with pytest.raises(UserError, match="not a valid bool value"):
        compiled([options_of("gpu")[0].replace("gpu:", "cpu:").replace("true", "perhaps")])


@pytest.mark.parametrize(
    ("name", "platform"),
    [("gpu", "gpu"), ("v5e", "tpu"), ("v5e_tensor_parallel", "tpu"), ("v5p", "tpu")],
)
def test_a_set_of_options_is_for_one_platform(name: str, platform: str) -> None:
    assert {parse_option(option)[0] for option in options_of(name)} == {platform}


def test_one_set_for_v5e_extends_the_other() -> None:
    assert set(options_of("v5e")) < set(options_of("v5e_tensor_parallel"))


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
def test_the_options_for_v5e_are_known_to_their_compiler() -> None:
    mesh = topology_mesh("v5e:2x2", {"data": 4})
    with uncached():
        compiled(options_of("v5e_tensor_parallel"), mesh)
        with pytest.raises(UserError, match="No such compile option"):
            compiled([UNKNOWN.replace("cpu", "tpu")], mesh)


class Unreadable:
    """A program of a compiler that is newer than jaxlib."""

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: async-update should have\n1 operand, but has 3")


def test_a_program_that_jaxlib_cannot_read_is_an_error_in_a_line() -> None:
    with pytest.raises(RunError, match=r"async-update should.*Add --analytic") as error:
        text_of(Unreadable())
    assert "\n" not in str(error.value)


def test_a_program_that_jaxlib_cannot_read_is_read_as_its_compiler_dumped_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "module_0000.jit_step.after_optimizations.txt").write_text("too early")
    (tmp_path / "module_0000.jit_step.after_codegen.txt").write_text("HloModule jit_step")
    assert text_of(Unreadable(), tmp_path) == "HloModule jit_step"


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
def test_the_tpu_compiler_dumps_the_text_that_it_returns(tmp_path: Path) -> None:
    with uncached():
        executable = compiled([], topology_mesh("v5e:2x2", {"data": 4}), tmp_path)
    (dumped,) = tmp_path.glob(f"*{DUMPED}")
    operations = [re.findall(r" = \S+ ([\w-]+)\(", text)
                  for text in (executable.as_text(), dumped.read_text())]  # fmt: skip
    assert operations[0] and operations[0] == operations[1]


def compiled(options: Sequence[str], mesh: Mesh | None = None, dump: Path | None = None) -> Any:
    mesh = make_mesh(WHOLE) if mesh is None else mesh
    array = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        return compile_program(jax.jit(jnp.sin).trace(array), mesh, options, dump)


def options_of(name: str) -> tuple[str, ...]:
    path = str(ROOT / f"configs/compilers/{name}.gin")
    return load([path]).bound["Run.compiler_options"].value


def test_an_option_names_its_platform() -> None:
    option = parse_option("tpu:xla_enable_async_all_gather=true")
    assert option == ("tpu", "xla_enable_async_all_gather", "true")
