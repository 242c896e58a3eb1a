"""Writes docs/settings.md: `python -m docs.site.settings`."""

import inspect

from configs.imports import CHECKOUT
from scripts.commands.inspect.settings import TITLES, settings_of, specs
from scripts.templates import render

PAGE = CHECKOUT / "docs" / "settings.md"


def page() -> str:
    """Returns docs/settings.md."""
    known = specs()
    sections = {
        title: [
            (spec.__name__, inspect.cleandoc(spec.__doc__ or ""), settings_of(spec))
            for spec in known
            if spec.__module__.startswith(f"{folder}.")
        ]
        for folder, title in TITLES.items()
    }
    return render("commands/inspect/settings.md", sections=sections)


if __name__ == "__main__":
    PAGE.write_text(page())
