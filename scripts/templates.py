"""Writes pages and terminal texts from templates next to the modules that use them.

A page needs no other file.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from scripts.terminal import table_text
from scripts.texts import cell, with_unit


def render(template: str, **values: Any) -> str:
    """Renders a template, given its path below scripts/; pages escape the values."""
    return ENVIRONMENT.get_template(template).render(values)


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the columns of a table, whose rows are values by column."""
    return list(dict.fromkeys(name for row in rows for name in row))


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Writes a table for the terminal; all rows have the same columns."""
    return table_text([*rows[0]], [[*row.values()] for row in rows]).rstrip("\n")


def png_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters.update(
    columns=columns, png_url=png_url, cell=cell, unit=with_unit, table=text_table
)
