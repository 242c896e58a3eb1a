"""Runs `meshloom inspect config`: shows settings."""

from layouts.layout import Layout
from scripts.commands.common import settings_of, write_json
from scripts.commands.inspect.flags import InspectConfigFlags
from scripts.terminal import print_table
from trainer.run import Run


def config(flags: InspectConfigFlags) -> None:
    """Prints every setting: its value and the file that set it."""
    rows = settings_of(flags.settings).table(Run, Layout)
    print_table(["name", "value", "set in"], [(r.name, repr(r.value), r.origin) for r in rows])
    table = [{"name": r.name, "value": r.value, "set_in": r.origin} for r in rows]
    write_json(flags.json_file, table)
