"""Runs `meshloom inspect config` and `settings`."""

import dataclasses
import importlib
import re
from typing import Any, NamedTuple

from configs.errors import UserError, did_you_mean
from configs.imports import CHECKOUT
from configs.spec import SPECS, is_spec, legal
from configs.write import is_default, shown
from layouts.layout import Layout
from scripts.commands import common
from scripts.commands.inspect.flags import InspectConfigFlags, InspectSettingsFlags
from scripts.flag import field_docstrings
from scripts.terminal import print_table
from trainer.run import Run

TITLES = {
    "trainer": "Runs and optimizers",
    "models": "Models",
    "layouts": "Layouts",
    "data": "Tasks and their data",
}


class Setting(NamedTuple):
    """Describes one parameter of a spec."""

    name: str
    legal: str
    default: str
    meaning: str


def config(flags: InspectConfigFlags) -> None:
    """Prints every setting of a run: its value and the file that set it."""
    settings = common.settings_of(flags.settings)
    rows = settings.table(Run, Layout)
    print_table(["name", "value", "set in"], [(r.name, repr(r.value), r.origin) for r in rows])
    common.with_known_steps(settings.make(Run), flags.settings.model_dir, flags.data_dir)
    table = [{"name": r.name, "value": r.value, "set_in": r.origin} for r in rows]
    common.write_json(flags.json_file, table)


def inspect_settings(flags: InspectSettingsFlags) -> None:
    """Prints all settings, those of one spec, or one of them."""
    name = flags.name
    settings = [setting for spec in specs() for setting in settings_of(spec)]
    chosen = [s for s in settings if name in (None, s.name, s.name.partition(".")[0])]
    if not chosen:
        names = {part for s in settings for part in (s.name, s.name.partition(".")[0])}
        raise UserError(
            f"{name}: no such setting.{did_you_mean(str(name), sorted(names))}  "
            "Legal: the names of docs/settings.md, such as Run or Run.steps."
        )
    print_table(Setting._fields, chosen)
    common.write_json(flags.json_file, [setting._asdict() for setting in chosen])


def specs() -> list[type[Any]]:
    """Returns every spec of the project, sorted by name."""
    for folder in TITLES:
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            if re.search(r"^@spec\b", path.read_text(), re.MULTILINE):
                importlib.import_module(".".join(path.relative_to(CHECKOUT).with_suffix("").parts))
    return [SPECS[n] for n in sorted(SPECS) if SPECS[n].__module__.partition(".")[0] in TITLES]


def settings_of(spec: Any) -> list[Setting]:
    """Returns the parameters of a spec, in the order of their declaration."""
    meanings = field_docstrings(spec)
    return [
        Setting(
            f"{spec.__name__}.{field.name}",
            legal(info.annotation, tuple(info.metadata)),
            "required" if info.is_required() else _written(info.default),
            meanings.get(field.name, ""),
        )
        for field in dataclasses.fields(spec)
        for info in [spec.__pydantic_fields__[field.name]]
    ]


def _written(value: object) -> str:
    """Writes a default as in a gin file; a spec with settings of its own is written as Python."""
    return repr(value) if is_spec(value) and not is_default(value) else shown(value)
