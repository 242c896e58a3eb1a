"""Stages the documentation for the site generator: `make docs` runs this, then builds the site.

The pages of docs/ read well where they are, with links to files of the repository.  In the site,
such a file is a page of its own, with its code.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/examples/README.md": "examples.md",
}
"""Pages with another name in the site; the others of docs/ keep theirs."""
NOT_STAGED = {"docs/README.md": "index.md"}  # the navigation of the site replaces it
LINK = re.compile(r"(\]\()([^)\s:#]+)?(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".gin": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml"}


def name_in_site(path: str) -> str:
    """Returns where a file of the repository is in the site.

    >>> name_in_site("docs/layouts.md"), name_in_site("layouts/axes.py")
    ('layouts.md', 'source/layouts/axes.py.md')
    """
    if path in PAGES | NOT_STAGED:
        return (PAGES | NOT_STAGED)[path]
    if path.startswith("docs/") and Path(path).suffix in (".md", ".png"):
        return path.removeprefix("docs/").removeprefix("site/")
    return f"source/{path}.md"


def fenced(code: str, language: str) -> str:
    return f"````` {language}\n{code}\n`````\n"


class Stage:
    """Writes pages, and the files that they link to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: set[str] = set()

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def page(self, path: str) -> None:
        """Writes a page, with links for the site."""
        parts = re.split(r"(^```.*?^```$)", (ROOT / path).read_text(), flags=re.M | re.S)
        parts[::2] = [self.prose(part, path) for part in parts[::2]]
        self.write(name_in_site(path), "".join(parts))

    def prose(self, text: str, path: str) -> str:
        """Returns what is not code, with links for the site.

        GitHub needs no blank line before a list, and wants \\| in the code of a table.
        """
        text = LINK.sub(lambda link: self.link(link, path), text)
        text = re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), text)
        return re.sub(r"^(?!- |\d+\. |  |\n|\|)(.+\n)(?=- |1\. )", r"\1\n", text, flags=re.M)

    def link(self, link: re.Match[str], path: str) -> str:
        start, target, anchor, end = link.groups(default="")
        if not target:
            return link[0]
        file = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if not (ROOT / file).exists():
            sys.exit(f"{path}: {target}: no such file")
        name = name_in_site(file)
        if name.startswith("source/"):
            self.sources.add(file)
            anchor = ""
        elif name.endswith(".png"):
            self.copy(file, name)
        return start + os.path.relpath(name, os.path.dirname(name_in_site(path))) + anchor + end

    def copy(self, file: str, name: str) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target)

    def source(self, path: str) -> None:
        """Writes a page of a file's code, of a notebook's cells, or of the names in a folder."""
        file = ROOT / path
        if file.is_dir():
            body = "".join(f"- `{entry.name}`\n" for entry in sorted(file.iterdir()))
        elif file.suffix == ".ipynb":
            cells = json.loads(file.read_text())["cells"]
            body = "\n\n".join(
                fenced(text, "python") if cell["cell_type"] == "code" else self.prose(text, path)
                for cell in cells
                if (text := "".join(cell["source"]))
            )
        else:
            body = fenced(file.read_text().rstrip("\n"), LANGUAGES.get(file.suffix, "text"))
        hidden = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
        self.write(name_in_site(path), f"{hidden}# `{path}`\n\n{body}")


def stage(folder: Path) -> None:
    """Replaces the folder by the configuration and the pages of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    stage = Stage(folder / "pages")
    pages = [*PAGES, *(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))]
    for path in dict.fromkeys(pages):
        if path not in NOT_STAGED:
            stage.page(path)
    for path in sorted(stage.sources):
        stage.source(path)
    shutil.copy(HERE / "zensical.toml", folder)
    stage.copy("docs/site/site.css", "site.css")


if __name__ == "__main__":
    stage(ROOT / ".cache" / "site")
