"""Defines the flags of `meshloom papers`."""

from typing import Annotated

from scripts.commands.shared_flags import JsonFile
from scripts.flag import Flag, FlagGroup


class PapersFlags(FlagGroup):
    """Lists what the papers publish, and what Meshloom counts, plans, measures or implements of it.

    The list is that of docs/papers.md.  With --table, it computes the rows of one table, figure or
    section again.
    """

    EXAMPLES = ("meshloom papers --table=gshard_table_1",)
    table: Annotated[str | None, Flag(metavar="NAME")] = None
    """Computes one item: a name of the list, such as gshard_table_3."""
    json_file: JsonFile = None
