"""Makes commands from frozen dataclasses, whose fields are the flags."""

import dataclasses
import inspect
import math
import os
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from configs import imports
from configs.errors import UserError, did_you_mean
from configs.paths import local_path, path_of
from data.storage.files import check_output
from scripts import devices
from scripts.flag import Flag, flag_fields
from trainer.processes.keyboard import interrupted_after_import

LARGEST = 2**31 - 1
"""The largest integer that JAX accepts as an int32."""
METAVARS = {int: "N", float: "NUMBER"}


def check_number(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuses NaN, infinity, and integers that JAX does not accept as an int32."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise click.BadParameter(f"{number} is not a finite number.")
        if isinstance(number, int) and abs(number) > LARGEST:
            limit = f"above {LARGEST}" if number > 0 else f"below {-LARGEST}"
            raise click.BadParameter(f"{number} is {limit}.")
    return value


class OutputFile(click.ParamType):
    """Checks the name of a file to write; - is the standard output."""

    name = "file"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            if value != "-":
                check_output(value)
        except UserError as error:
            self.fail(str(error), param, ctx)
        return value


class AnyPath(click.Path):
    """Checks a local or remote path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":  # such as from an unset variable of the shell
            self.fail("the name is empty.", param, ctx)
        try:
            return path_of(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


class CommaSeparated(click.ParamType):
    """Parses values of one type, separated by commas."""

    name = "text"

    def __init__(self, item: click.ParamType, what: str) -> None:
        self.item, self.what = item, what

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Returns the values; refuses a name that is given twice."""
        try:
            items = tuple(self.item.convert(item, param, ctx) for item in value.split(","))
        except click.BadParameter as error:
            text = f"{value!r} is not a list of {self.what}, separated by commas: {error.message}"
            self.fail(text, param, ctx)
        if isinstance(self.item, click.Choice) and len(set(items)) < len(items):
            self.fail(f"{value!r} contains a name twice.", param, ctx)
        return items


class FlagOption(click.Option):
    """Adds the heading under which the help shows a flag."""

    heading: str | None = None


def parameters_of(flags: type, heading: str | None = None) -> Iterator[click.Parameter]:
    """Yields the flags of a dataclass and of the groups nested in it, in order."""
    heading = getattr(flags, "HEADING", heading)
    for field in flag_fields(flags):
        if field.is_group:
            yield from parameters_of(field.kind, heading)
        elif field.flag.is_argument:
            nargs = -1 if field.kind == tuple[str, ...] else 1
            metavar = field.flag.metavar
            yield click.Argument([field.name], nargs=nargs, required=False, metavar=metavar)
        else:
            option = option_of(*field)
            option.heading = heading
            yield option


def option_of(name: str, kind: Any, flag: Flag, default: Any) -> FlagOption:
    settings: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar}
    if flag.has_variable:
        settings |= {"envvar": f"MESHLOOM_{name.upper()}", "show_envvar": True}
    declaration = f"--{flag.name or name}"
    if default is dataclasses.MISSING:
        settings["required"] = True
    else:
        settings["default"] = default
        settings["show_default"] = not any(default is value for value in (None, False, ()))
    if kind is bool:
        settings["is_flag"] = True
        declaration += f"/--{flag.off}" if flag.off else ""
    else:
        if types.NoneType in (parts := typing.get_args(kind)):  # X | None
            [kind] = [part for part in parts if part is not types.NoneType]
        settings |= {"type": type_of(kind, flag), "multiple": kind == tuple[str, ...]}
        if isinstance(settings["type"], CommaSeparated):
            settings |= {"multiple": False, "default": default and ",".join(map(str, default))}
            settings["callback"] = check_number
        if kind in METAVARS:
            settings |= {"metavar": flag.metavar or METAVARS[kind], "callback": check_number}
    return FlagOption([declaration, name], hidden=flag.is_hidden, **settings)


def type_of(kind: Any, flag: Flag) -> click.ParamType | type:
    if flag.names_output:
        return OutputFile()
    if kind is Path:
        return AnyPath()
    if kind == tuple[int, ...]:
        integer = click.IntRange(min=1 if flag.min is None else int(flag.min))
        integer.name = "integer"  # for errors; click says "integer range"
        return CommaSeparated(integer, "integers")
    if kind == tuple[float, ...]:
        return CommaSeparated(click.FLOAT, "numbers")
    if flag.choices and kind == tuple[str, ...]:
        return CommaSeparated(click.Choice(flag.choices), "names")
    if flag.choices or typing.get_origin(kind) is Literal:
        return click.Choice(flag.choices or typing.get_args(kind))
    if kind in METAVARS and (flag.min, flag.above, flag.max) != (None, None, None):
        ranges: dict[Any, Any] = {int: click.IntRange, float: click.FloatRange}
        low = flag.min if flag.above is None else flag.above
        limits: click.ParamType = ranges[kind](low, flag.max, min_open=flag.above is not None)
        limits.name = "integer" if kind is int else "number"
        return limits
    return typing.cast(type, kind if kind in METAVARS else str)


def value_of(flags: type, values: Mapping[str, Any]) -> Any:
    """Makes the dataclass of flags, and its nested groups, from command line values."""
    return flags(
        **{
            field.name: value_of(field.kind, values) if field.is_group else values[field.name]
            for field in flag_fields(flags)
        }
    )


class Command(click.Command):
    """Shows examples and headings for groups of flags in its help."""

    examples: Sequence[str] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses two flags that name the same output file, as one would overwrite the other."""
        rest = super().parse_args(ctx, args)
        writers: dict[str, str] = {}
        for parameter in self.params:
            value = ctx.params.get(parameter.name or "")
            if not isinstance(parameter.type, OutputFile) or value in (None, "-"):
                continue
            flag, file = parameter.opts[0], os.path.normpath(value)
            if file in writers:
                raise click.UsageError(f"{writers[file]} and {flag} name the same file, {value}.")
            writers[file] = flag
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; passes on a broken pipe, which click would turn into exit code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            error.errno = None  # click recognizes it by its errno
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:  # None for arguments
                heading = getattr(parameter, "heading", None) or "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class LazyGroup(click.Group):
    """Imports a command's flags only to show its help or run it, and its work only to run it.

    For each command, `work` gives the dataclass of its flags and the function that runs it, as
    "module:name" below the folder scripts/.
    """

    def __init__(self, *arguments: Any, work: Mapping[str, tuple[str, str]], **settings: Any):
        super().__init__(*arguments, **settings)
        self.work = work

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.work, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.work:
            return super().get_command(ctx, cmd_name)
        flags, function = self.work[cmd_name]
        return command_of(cmd_name, imported(flags), lambda given: imported(function)(given))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] not in names:
            near = did_you_mean(args[0], names)
            raise UserError(f"{args[0]}: no such command.{near}  Legal: {', '.join(names)}.")
        return super().resolve_command(ctx, args)


def command_of(name: str, flags: type, function: Callable[[Any], object]) -> Command:
    """Makes a command that calls a function with its flags."""

    def call(**values: Any) -> None:
        given = value_of(flags, values)
        for folder in values.get("gin_import_path", ()):
            imports.allow_folder(local_path(folder, "--gin_import_path"))
        if hasattr(given, "devices"):
            devices.start_devices(given.devices)
        function(given)

    text = inspect.cleandoc(flags.__doc__ or "")
    summary = " ".join(text.partition("\n\n")[0].split())
    params = list(parameters_of(flags))
    command = Command(name, callback=call, params=params, help=text, short_help=summary)
    command.examples = getattr(flags, "EXAMPLES", ())
    return command


def imported(path: str) -> Any:
    """Imports the object at a path "module:name" below the folder scripts/."""
    with interrupted_after_import():
        return pkgutil.resolve_name(f"scripts.{path}")
