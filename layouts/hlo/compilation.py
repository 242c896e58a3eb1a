"""Compiles traced programs with a run's compiler options for its platform."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from configs.errors import RunError, UserError, brief, one_line

PLATFORMS = ("cpu", "gpu", "tpu")
WORDS = {"true": True, "false": False}
# XLA's errors for an unknown option, or an invalid value of one.
REFUSAL = re.compile(r"No such compile option: .*|While setting option .*")

DUMPED = ".after_codegen.txt"
"""The suffix of the file in which libtpu dumps a program as `as_text` would return it."""


def parse_option(text: str) -> tuple[str, str, str]:
    """Parses "platform:name=value", an option of XLA for one platform."""
    match = re.fullmatch(r"(\w+):(xla_\w+)=(\S+)", text)
    if match is None or match[1] not in PLATFORMS:
        raise UserError(
            f"Run.compiler_options = {text!r}: legal is platform:name=value, where the "
            f"platform is {', '.join(PLATFORMS)} and the name one of XLA's, as in "
            "'tpu:xla_enable_async_all_gather=true'."
        )
    return match[1], match[2], match[3]


def compile_program(
    traced: Any,
    mesh: Mesh | AbstractMesh,
    compiler_options: Iterable[str],
    dump: Path | None = None,
) -> Any:
    """Compiles a traced program with the options for the platform of the mesh.

    If `dump` is given, the compiler writes the text of the program into this folder.
    """
    platform = platform_of(mesh)
    options = {
        name: WORDS.get(value, value)
        for of_platform, name, value in map(parse_option, compiler_options)
        if of_platform.upper() == platform
    }
    if dump is not None:
        options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    try:
        return traced.lower().compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        refusal = REFUSAL.search(str(error))
        if not options or refusal is None:
            raise
        raise UserError(
            f"Run.compiler_options: the compiler for {platform} rejects one.  {refusal[0]}  "
            "Correct it, or remove it."
        ) from error


def text_of(executable: Any, dump: Path | None = None) -> str:
    """Returns a compiled program's text.

    If the compiler is newer than jaxlib, jaxlib may not understand the program.  Then this is the
    text that the compiler itself wrote into `dump`.
    """
    try:
        return executable.as_text()
    except jax.errors.JaxRuntimeError as error:
        if dump is not None and (dumped := sorted(dump.glob(f"*{DUMPED}"))):
            return dumped[-1].read_text()
        reason = brief(one_line(error), 200)
        raise RunError(
            f"this jaxlib cannot read the program that the compiler made: {reason}  "
            "Add --analytic, or try another version of libtpu."
        ) from error


def platform_of(mesh: Mesh | AbstractMesh) -> str | None:
    """Returns "CPU", "TPU" or "GPU"; None for a mesh without devices."""
    return mesh.devices.flat[0].platform.upper() if isinstance(mesh, Mesh) else None
