"""Defines the flags of `meshloom papers`."""

from typing import Annotated

from scripts.commands.shared_flags import JsonFile
from scripts.flag import Flag, FlagGroup


class PapersFlags(FlagGroup):
    """Lists results of the papers, and what Meshloom counts, plans, measures or implements of them.

    docs/papers.md contains the same list.  --table recomputes the rows of one table, figure or
    section.
    """

    EXAMPLES = ("meshloom papers --table=gshard_table_1",)
    table: Annotated[str | None, Flag(metavar="NAME")] = None
    """Computes one item of the list, by name, such as gshard_table_3."""
    json_file: JsonFile = None
