"""Writes HTML pages that need no other file."""

import base64
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_suffix(".css").read_text()


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Writes a page from its parts, which are HTML; the title is text."""
    title = html.escape(title)
    head = (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width"><title>{title}</title>'
        f"<style>{STYLE}{style}</style><h1>{title}</h1>"
    )
    return "\n".join([head, *parts])


def image(png: bytes, text: str) -> str:
    """Writes a picture; the text, which is HTML, takes its place where it is not shown."""
    content = base64.b64encode(png).decode()
    return f'<img alt="{text}" src="data:image/png;base64,{content}">'


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes a table that scrolls where it is wider than the page; a row is a value by column."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell(row.get(n))}" for n in names) for row in rows)
    return f'<div class="scroll"><table><tr>{head}{body}</table></div>'


def cell(value: object) -> str:
    """Writes a number as people read it.

    >>> cell(0.123456), cell(1234567), cell("decoder 1"), cell(None)
    ('0.1235', '1,234,567', 'decoder 1', '')
    """
    if value is None:
        return ""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else html.escape(str(value))
