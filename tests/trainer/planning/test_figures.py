"""The keys of a plan's JSON are documented."""

from tests.toys import ROOT
from trainer.planning.figures import FIGURES, Figure


def row(key: str, figure: Figure) -> str:
    null = f"; `null`: {figure.null}" if figure.null else ""
    return f"| `{key}` | {figure.unit} | {figure.meaning}{null} |"


def test_the_documentation_lists_every_figure() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    table = text.partition("| key | unit | meaning |")[2].partition("\n\n")[0].splitlines()
    assert table[2:] == [row(key, figure) for key, figure in FIGURES.items()]
