"""The pages of docs/: links to headings; their site: navigation, links, pages of the API."""

import collections
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.site import stage
from tests.toys import ROOT

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s:#]*)#([^)\s]+)\)")


def slug(heading: str) -> str:
    """Names the anchor of a heading as GitHub does.

    >>> slug("`--sweep`, and [what](x.md) a *run* costs (v5e)")
    '--sweep-and-what-a-run-costs-v5e'
    """
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> Iterator[str]:
    """Yields the anchors of a page; one that repeats has a number."""
    seen: collections.Counter[str] = collections.Counter()
    for heading in re.findall(r"^#{1,6} (.+)$", CODE.sub("", text), re.MULTILINE):
        name = slug(heading)
        yield f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1


def broken(page: Path, text: str) -> list[str]:
    """Returns the links of a page to headings that are not there."""
    return [
        f"{target}#{anchor}"
        for target, anchor in LINK.findall(CODE.sub("", text))
        if (file := page.parent / target if target else page).suffix == ".md"
        and anchor not in anchors(text if file == page else file.read_text())
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_heading_that_is_not_there_is_named() -> None:
    text = "# One\n## Two, `three`\n```\n# no heading\n```\n## One\n"
    assert list(anchors(text)) == ["one", "two-three", "one-1"]
    links = "[a](#two-three) [b](#no-heading) [c](docs/hosts.md#restarts) [d](docs/hosts.md#four)"
    assert broken(ROOT / "page.md", text + links) == ["#no-heading", "docs/hosts.md#four"]
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 50


# The site

CONFIG = tomllib.loads((ROOT / "docs" / "site" / "zensical.toml").read_text())["project"]


def names_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from names_in(entry)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    stage.stage(folder)
    return folder / "pages"


def test_the_navigation_has_every_page(staged: Path) -> None:
    pages = {str(path.relative_to(staged)) for path in staged.rglob("*.md")}
    named = list(names_in(CONFIG["nav"]))
    assert len(set(named)) == len(named)
    assert set(named) == {page for page in pages if not page.startswith("source/")}


def test_links_of_the_site_lead_to_its_pages(staged: Path) -> None:
    local = re.compile(r"\]\((?!https?:)([^)\s#]+)[^)]*\)")
    links = [
        path.parent / target
        for path in staged.rglob("*.md")
        if path.relative_to(staged).parts[0] != "source"
        for target in local.findall(CODE.sub("", path.read_text()))
    ]
    assert [link for link in links if not link.exists()] == []
    assert any(link.name == "axes.py.md" for link in links)  # source files are pages


def test_what_only_github_reads_changes(staged: Path) -> None:
    page = stage.Stage(staged)
    assert page.prose("Two:\n- a\n- b\n  c\n", "README.md") == "Two:\n\n- a\n- b\n  c\n"
    assert page.prose("| `a \\| b` | c |\n", "README.md") == "| `a | b` | c |\n"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/site/api").glob("*.md")), ids=lambda p: p.stem
)
def test_pages_of_the_api_name_what_exists(page: Path) -> None:
    names = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    assert names
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            module, _, attribute = name.rpartition(".")
            assert getattr(importlib.import_module(module), attribute).__doc__, name
