"""docs/papers.md says what the papers publish and what we have, as it is computed now."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.errors import UserError
from docs.site.papers import digest, list_row, markdown, picture, section
from scripts.commands.papers.items import COLUMNS, FOLDER, ITEMS_BY_KEY, PAPERS, RUNS, Item
from scripts.commands.papers.papers import (
    LIST_HEAD,
    PAGE,
    inputs_of,
    neighbours,
    operator,
    read_record,
    rows_under,
    table_of,
)
from tests.scripts.conftest import Meshloom

ROWS = [row for item in ITEMS_BY_KEY.values() for row in item.rows]
NAMES = {words[0] for row in ROWS for words in (row.of, row.over) if words}
PLANNED = sorted(name for name in NAMES & RUNS.keys() if RUNS[name].topology)
ITEMS = [(paper, key) for paper in PAPERS for key in ITEMS_BY_KEY if key.startswith(paper)]
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^### ", PAGE.read_text(), flags=re.M)
}


MEMORY = {"bytes_per_device", "activations and temporaries"}


def section_on_page(paper: str, item: Item) -> str:
    whole = SECTIONS[f"{PAPERS[paper].title}, {item.name}"]
    return "### " + re.split(r"^## ", whole, flags=re.M)[0].rstrip() + "\n"


def skip_other_jax(item: Item) -> None:
    """The arrays that live at the same time depend on the version of JAX."""
    [version] = re.findall(r"here with jax (\d+\.\d+)", PAGE.read_text())
    figures = {COLUMNS[name].figure for name in item.columns}
    if not jax.__version__.startswith(f"{version}.") and figures & MEMORY:
        pytest.skip(f"docs/papers.md is of jax {version}")


@pytest.mark.few(4)
@pytest.mark.parametrize(("paper", "key"), ITEMS, ids=lambda name: name)
def test_the_page_has_what_is_computed(paper: str, key: str) -> None:
    item = ITEMS_BY_KEY[key]
    skip_other_jax(item)
    on_page = {
        re.sub(r"\[(.*?)\]\(#.*?\)", r"\1", row["item"]): list(row.values())
        for row in rows_under(PAGE.read_text(), PAPERS[paper].title)
    }[item.name]
    hint = "docs/papers.md is not fresh: make papers"
    if item.slow:
        first = item.model_copy(update={"rows": item.rows[:1]})
        assert list_row(first)[1:4] == on_page[1:4], hint
        lines = section_on_page(paper, item).splitlines()
        table = [line for line in lines if line.startswith("|")]
        assert f"<!-- {digest(item, chr(10).join(table))} -->" in lines, hint
        assert [cell for cell in table_of(first)[1][0] if cell] == [
            cell for cell in table[2].strip("| ").split(" | ") if cell.strip()
        ], hint
        return
    assert list_row(item)[1:] == on_page[1:], hint
    if item.rows:
        assert section(key, PAPERS[paper].title, item) == section_on_page(paper, item), hint


def test_the_page_has_nothing_else() -> None:
    sections = [f"{PAPERS[paper].title}, {ITEMS_BY_KEY[key].name}" for paper, key in ITEMS
                if ITEMS_BY_KEY[key].rows]  # fmt: skip
    assert list(SECTIONS)[1:] == sections
    introduction = (FOLDER / "introduction.md").read_text().partition("VERSION")[0]
    assert PAGE.read_text().startswith(introduction)


@pytest.mark.parametrize(
    ("paper", "parts"),
    [
        ("mesh_tensorflow", {"Algorithm": 1, "Table": 3, "Figure": 7}),
        ("gshard", {"Algorithm": 2, "Table": 4, "Figure": 13}),
        ("giant_models", {"Table": 3, "Figure": 7}),
    ],
)
def test_each_table_figure_and_algorithm_of_a_paper_is_an_item(
    paper: str, parts: dict[str, int]
) -> None:
    numbers: dict[str, set[int]] = {}
    for item in PAPERS[paper].items:
        if match := re.match(r"(Algorithm|Table|Figure)s? (\d+)(?: (?:to|and) (\d+))?", item.name):
            ends = range(int(match[2]), int(match[3] or match[2]) + 1)
            numbers.setdefault(match[1], set()).update(ends)
    assert numbers == {kind: {*range(1, count + 1)} for kind, count in parts.items()}


@pytest.mark.parametrize("name", PLANNED)
def test_a_run_names_settings_that_exist_and_a_mesh_of_its_slice(name: str) -> None:
    inputs = inputs_of(name)
    unused = {binding.name for binding in inputs.config.unused(type(inputs.run))}
    assert {setting for setting in unused if not setting.startswith("Layout.")} == set()


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith(", 4 slices")])
def test_each_of_several_slices_has_the_rows_and_the_weights_of_one(name: str) -> None:
    one, many = inputs_of(RUNS[name].base), inputs_of(name)
    assert many.sizes == {"slice": 4} | one.sizes
    assert many.run.batch_sequences == 4 * one.run.batch_sequences
    assert many.layout.param_rules == one.layout.param_rules
    assert many.layout.rules == f"batch:slice;{one.layout.rules}"


def test_records_are_read_from_the_tables_of_pages() -> None:
    text = (
        "## A\n\n| x | y |\n| --- | --- |\n| a | **1** |\n| b\\|c | 2 |\n\nText.\n\n## B\n| x |\n"
    )
    assert list(rows_under(text, "A")) == [{"x": "a", "y": "1"}, {"x": "b\\|c", "y": "2"}]
    with pytest.raises(UserError, match=r"docs/planning.md.*no table there has a row 'mine'"):
        read_record(("docs/planning.md", "The paper's two layers", "mine", "FLOPs"))
    assert markdown(["x"], [["1"]]) == "| x |\n| --- |\n| 1 |"


def test_an_operator_sends_what_its_shardings_ask_for() -> None:
    """GShard's figure 4: a split contraction, and from groups to experts."""
    for equation, split, kind in (
        ("AB,BX->AX", "B,B,", "all-reduce"),
        ("GSEC,GSM->EGCM", "G,G,E", "all-to-all"),
    ):
        assert operator(equation, split, "B", "v3:4x4")["kinds"] == kind


@pytest.mark.parametrize(
    "key", ["gshard_figure_9", "gshard_figure_10_appendix_a_3", "giant_models_table_1"]
)
def test_a_picture_of_each_kind_is_drawn(key: str) -> None:
    assert picture(ITEMS_BY_KEY[key]).startswith(b"\x89PNG")


def test_every_picture_of_the_page_is_there() -> None:
    names = re.findall(r"!\[.*\]\((\S+)\)", PAGE.read_text())
    drawn = {path.name for path in (PAGE.parent / "papers").iterdir()}
    assert {name.partition("papers/")[2] for name in names} - {""} == drawn
    assert all((PAGE.parent / name).exists() for name in names)


def test_the_command_lists_computes_and_refuses(run: Meshloom, tmp_path: Path) -> None:
    file = tmp_path / "papers.json"
    answer = run("papers", f"--json={file}")
    assert answer.code == 0 and "gshard_table_3" in answer.out
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == [key for _, key in ITEMS]
    assert set(rows[0]) == {"name", *LIST_HEAD}
    key = "gshard_figure_10_appendix_a_3"
    answer = run("papers", f"--table={key}", f"--json={file}")
    assert answer.code == 0 and "rows:x;cols:y" in answer.out
    assert json.loads(file.read_text())["rows"][0][0] == "rows:x;cols:y"
    answer = run("papers", "--table=gshard_table_33")
    assert answer.code == 2 and "Did you mean gshard_table_3" in answer.error


def test_devices_are_drawn_in_the_order_of_a_walk() -> None:
    places = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])
    assert neighbours(places).tolist() == [0, 2, 4, 5, 3, 1]
