"""Writes HTML pages that need no other file, from templates next to the modules that use them."""

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from scripts.texts import cell, with_unit


def render(template: str, **values: Any) -> str:
    """Writes the page of a template, whose path begins in scripts/; escapes all text."""
    return ENVIRONMENT.get_template(template).render(values)


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lists the columns of a table, whose rows are values by column.

    >>> columns([{"step": 1}, {"step": 2, "loss": 3.5}])
    ['step', 'loss']
    """
    return list(dict.fromkeys(name for row in rows for name in row))


def png_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters.update(columns=columns, png_url=png_url, cell=cell, unit=with_unit)
