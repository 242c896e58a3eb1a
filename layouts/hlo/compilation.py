"""Compiles traced programs, with the options of a run for the compiler of its devices."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from configs.errors import RunError, UserError, brief, one_line

PLATFORMS = ("cpu", "gpu", "tpu")
WORDS = {"true": True, "false": False}
# How XLA says that it knows no such option, or no such value of one.
REFUSAL = re.compile(r"No such compile option: .*|While setting option .*")


class CompilerOption(NamedTuple):
    """Sets an option of XLA on one platform."""

    platform: str
    name: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "CompilerOption":
        """Reads "platform:name=value".

        >>> CompilerOption.parse("tpu:xla_enable_async_all_gather=true")
        CompilerOption(platform='tpu', name='xla_enable_async_all_gather', value='true')
        """
        match = re.fullmatch(r"(\w+):(xla_\w+)=(\S+)", text)
        if match is None or match[1] not in PLATFORMS:
            raise UserError(
                f"Run.compiler_options = {text!r}: legal is platform:name=value, where the "
                f"platform is {', '.join(PLATFORMS)} and the name one of XLA's, as in "
                "'tpu:xla_enable_async_all_gather=true'."
            )
        return cls(*match.groups())


def compile_program(
    traced: Any, mesh: Mesh | AbstractMesh, compiler_options: Iterable[str] = ()
) -> Any:
    """Compiles a traced program with those options that are for the platform of the mesh."""
    parsed = map(CompilerOption.parse, compiler_options)
    platform = platform_of(mesh)
    options = {
        option.name: WORDS.get(option.value, option.value)
        for option in parsed
        if option.platform.upper() == platform
    }
    try:
        return traced.lower().compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        refusal = REFUSAL.search(str(error))
        if not options or refusal is None:
            raise
        raise UserError(
            f"Run.compiler_options: the compiler for {platform} refuses one.  {refusal[0]}  "
            "Correct it, or leave it out."
        ) from error


def text_of(executable: Any) -> str:
    """Returns a compiled program's text, which a compiler newer than jaxlib may not let it read."""
    try:
        text: str = executable.as_text()
        return text
    except jax.errors.JaxRuntimeError as error:
        reason = brief(one_line(error), 200)
        raise RunError(
            f"this jaxlib cannot read the program that the compiler made: {reason}  "
            "Add --analytic, or try another version of libtpu."
        ) from error


def platform_of(mesh: Mesh | AbstractMesh) -> str | None:
    """Returns CPU, TPU or GPU; None for a mesh without devices."""
    return mesh.devices.flat[0].platform.upper() if isinstance(mesh, Mesh) else None
