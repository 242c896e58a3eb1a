"""Flags that the benchmarks share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from scripts.command_line import OutputFile

Function = TypeVar("Function", bound=Callable[..., object])
AT_LEAST_ONE = click.IntRange(min=1)


class Systems(click.ParamType):
    """Checks the names of systems, separated by commas."""

    name = "text"

    def __init__(self, legal: Sequence[str]) -> None:
        self._legal = legal

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the names, where each is that of a system and none is there twice."""
        names = value.split(",")
        if unknown := [name for name in names if name not in self._legal]:
            legal = ", ".join(self._legal)
            self.fail(f"no system {', '.join(map(repr, unknown))}.  Legal: {legal}.", param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value!r} names a system twice.", param, ctx)
        return value


class Sizes(click.ParamType):
    """Reads sizes, separated by commas."""

    name = "text"

    def convert(
        self, value: str | list[int], param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Returns the sizes, where each is an integer of at least 1."""
        if not isinstance(value, str):
            return value
        try:
            sizes = [int(size) for size in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of integers, such as 16,32.", param, ctx)
        return [AT_LEAST_ONE.convert(size, param, ctx) for size in sizes]


class CheckoutFolder(click.Path):
    """Checks the folder of a checkout of the project."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the folder, where it has benchmarks."""
        folder: Any = super().convert(value, param, ctx)
        if not (Path(folder) / "scripts" / "benchmarks").is_dir():
            self.fail(f"{value} is not a checkout: it has no scripts/benchmarks.", param, ctx)
        return folder


def json_option() -> Callable[[Function], Function]:
    """Returns the option for the file of the result, which is checked before anything runs."""
    help = "Also writes the result to FILE."
    return click.option("--json", "json_file", type=OutputFile(), metavar="FILE", help=help)


def count_option(flag: str, *name: str, default: int, help: str) -> Callable[[Function], Function]:
    """Returns the option for a number of at least 1."""
    return click.option(
        flag, *name, type=AT_LEAST_ONE, metavar="N", default=default, show_default=True, help=help
    )


def sizes_option(flag: str, default: str, help: str) -> Callable[[Function], Function]:
    """Returns the option for several sizes."""
    return click.option(flag, type=Sizes(), default=default, show_default=True, help=help)


def rounds_option(default: int, help: str = "Rounds to measure.") -> Callable[[Function], Function]:
    """Returns the option for the number of rounds."""
    return count_option("--rounds", "count", default=default, help=help)


def systems_option(
    systems: Sequence[str], others: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Returns the option that chooses systems; the others are measured only if they are named."""
    legal = (*systems, *others)
    help = "Systems to compare, separated by commas."
    if others:
        help += f"  Legal: {', '.join(legal)}."
    default = ",".join(systems)
    return click.option(
        "--systems", type=Systems(legal), default=default, show_default=True, help=help
    )


def options(
    systems: Sequence[str], count: int, others: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Returns what gives a benchmark's command the options that all benchmarks share."""
    shared = [
        click.option("--worker", hidden=True),
        rounds_option(count),
        systems_option(systems, others),
        click.option(
            "--baseline",
            type=CheckoutFolder(file_okay=False, resolve_path=True, path_type=Path),
            metavar="CHECKOUT",
            help="Measures Meshloom also from another checkout of the project, and prints how many "
            "times as fast this one is.",
        ),
        json_option(),
    ]

    def add(command: Function) -> Function:
        for option in reversed(shared):
            command = option(command)
        return command

    return add
