"""The pages show any name as text: a hostile one adds no element and no attribute."""

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest

from configs.errors import UserError
from scripts.commands.planning.page import write_page
from scripts.commands.training.flags import ReportFlags
from scripts.commands.training.report import heading, report, table_by_run
from tests.scripts.conftest import Meshloom, Place
from trainer.metrics.jsonl import read_lines
from trainer.metrics.plots import RunPlots
from trainer.metrics.profile import PARTS_FILE, PROFILE_FOLDER
from trainer.planning.report import SCHEMA_VERSION

HOSTILE = "<b onclick=x>\"'&lt;</td>$\\frac$"
ELEMENTS = {"html", "meta", "title", "style", "h1", "h2", "table", "tr", "th", "td", "img", "p",
            "div", "ul", "li", "i", "details", "summary", "pre"}  # fmt: skip
ATTRIBUTES = {"lang", "charset", "name", "content", "alt", "src", "style", "class", "title"}


class Page(html.parser.HTMLParser):
    """Collects the elements, attributes and text of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.text += "".join(value or "" for name, value in attrs if name in ("title", "alt"))

    def handle_data(self, data: str) -> None:
        self.text += data


def check(file: Path, hostile_texts: int) -> None:
    page = Page(file)
    assert page.elements <= ELEMENTS and page.attributes <= ATTRIBUTES
    assert page.text.count(HOSTILE) == hostile_texts


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    layer = {"load": [0.25, 0.75], "dropped": [0.1, 0.2], HOSTILE: 0.5}
    experts = {HOSTILE: layer}
    line = {"step": 1, "loss": 2.5, HOSTILE: 3.0, "experts": experts}
    part = {"loss": 2.5, HOSTILE: 1, "experts": experts}
    check = {"step": 1, "loss": 2.5, HOSTILE: 3.0, "parts": {HOSTILE: part, "other": part}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "evaluations.jsonl").write_text(json.dumps(check) + "\n")
    return folder


def test_a_report_of_hostile_names(model_dir: Path) -> None:
    report(ReportFlags(model_dir=model_dir))
    # A number of the last step, heads of three tables, the names of a layer and of a part.
    check(model_dir / "report.html", 6)
    text = Page(model_dir / "report.html").text
    assert model_dir.name in text and "Experts by part of the data" in text


def test_the_numbers_of_the_split_are_said_once(model_dir: Path) -> None:
    """A table of few columns is not cut at the side of the page."""
    checks = [{"step": step, "loss": 2.5, "tokens": 1200, "lines": 7} for step in (1, 2)]
    text = "".join(json.dumps(check) + "\n" for check in checks)
    (model_dir / "evaluations.jsonl").write_text(text)
    report(ReportFlags(model_dir=model_dir))
    page = (model_dir / "report.html").read_text()
    assert "Of 1,200 tokens, 7 lines." in page and "<th>lines" not in page
    assert "<tr><th>number<th>value\n" in page and "<td>loss (nats per token)<td>2.5" in page


def test_a_report_has_units_settings_and_the_prediction(model_dir: Path) -> None:
    (model_dir / "config.gin").write_text(f"Run.steps = 7  # {HOSTILE}\n")
    (model_dir / "layout.gin").write_text("Layout.rules = 'batch:data'\n")
    (model_dir / "plan.json").write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "fits": True, "bytes_per_device": 30})
    )
    report(ReportFlags(model_dir=model_dir))
    page = Page(model_dir / "report.html")
    assert page.elements <= ELEMENTS and page.attributes <= ATTRIBUTES
    assert "loss (nats per token)" in page.text and "Prediction for a step" in page.text
    assert f"Run.steps = 7  # {HOSTILE}" in page.text
    assert "Layout.rules = 'batch:data'" in page.text
    (model_dir / "plan.json").write_text(json.dumps({"of": "another version"}))
    report(ReportFlags(model_dir=model_dir))
    assert "Prediction" not in Page(model_dir / "report.html").text


def test_a_picture_that_cannot_be_written_is_named(model_dir: Path) -> None:
    (model_dir / "loss.png").mkdir()
    with pytest.raises(UserError, match=r"loss\.png: cannot be written") as error:
        report(ReportFlags(model_dir=model_dir))
    assert "metrics.jsonl" not in str(error.value)


def test_a_report_has_profiled_steps_next_to_their_plan(model_dir: Path) -> None:
    """A part of which the plan says nothing, as on a CPU, has no planned time."""
    times = {"products_s": 0.03, "other_s": 0.01, "traffic_s": 0.0}
    rows = [{"part": HOSTILE, **times}, {"part": "norms", **times}]
    (model_dir / PROFILE_FOLDER).mkdir()
    for file, listed in ((f"{PROFILE_FOLDER}/{PARTS_FILE}", rows), ("plan.json", rows[:1])):
        figures = {"schema_version": SCHEMA_VERSION, "step_time_by_part": listed}
        (model_dir / file).write_text(json.dumps(figures))
    report(ReportFlags(model_dir=model_dir))
    check(model_dir / "report.html", 6 + 1)
    text = (model_dir / "report.html").read_text()
    for cells in ("<td>50.0%<td>30 ms<td>10 ms<td><td>40 ms", "<td><td>unknown"):
        assert cells in text
    (model_dir / "plan.json").unlink()
    report(ReportFlags(model_dir=model_dir))
    assert "planned" not in Page(model_dir / "report.html").text


def test_a_plan_of_hostile_names(tmp_path: Path) -> None:
    figures = {
        HOSTILE: 1,
        "fits": True,
        "bytes_per_device": 30,
        "bytes_by_cause": {HOSTILE: 10, "weights": 20},
        "memory_bytes": 100,
        "step_time_s": 1.5,
        "step_time_parts_s": {HOSTILE: 1.0, f"overlapped {HOSTILE}": 0.5},
        "collectives": [
            {"mesh_axes": [HOSTILE], "overlaps": None, "kind": HOSTILE, "source": HOSTILE,
             "count": 1, "received_bytes": 8, "model_part": HOSTILE, "weight": HOSTILE},
        ],
        "step_time_by_part": [
            {"part": HOSTILE, "products_s": 1.0, "other_s": 0.5, "traffic_s": 0.0,
             "overlapped_s": 0.0, "least_s": 0.5},
        ],
        "longest_other": [{"part": HOSTILE, "source": HOSTILE, "seconds": 0.5}],
        "compiled_for": HOSTILE,
        "excess_flops": HOSTILE,
        "unexpected_collectives": [HOSTILE],
        "weights": [{"path": HOSTILE, "axes": HOSTILE, "bytes": 8, "bytes_per_device": 2}],
    }  # fmt: skip
    write_page(str(tmp_path / "plan.html"), HOSTILE, figures)
    # Title and heading; in bars and legends a cause and a part twice, an overlapped part once; the
    # platform; a part of the model in its bar, legend and table, and with a line of other compute;
    # part and kind of collectives, and their cells; two sentences, two cells of the weights.
    check(tmp_path / "plan.html", 2 + 5 + 1 + (3 + 2) + (2 + 4) + 2 + 2)


def test_several_runs_are_compared_on_one_page(
    run: Meshloom, trained: Place, tmp_path: Path, model_dir: Path
) -> None:
    """Names of folders are text; a run without settings has its curves and numbers."""
    other, file = tmp_path / "other", tmp_path / "page.html"
    shutil.copytree(trained.folder / "run", other, ignore=shutil.ignore_patterns("events"))
    changed = "--gin_param=Run.steps=6", "--gin_param=Run.keep_last=2"
    assert run("train", f"--model_dir={other}", *changed).code == 0
    folders = [str(trained.folder / "run"), str(other), str(model_dir)]
    answer = run("report", *folders, f"--output={file}")
    assert answer.code == 0 and f"Wrote {file}." in answer.error
    page = Page(file)
    assert page.elements <= ELEMENTS and page.attributes <= ATTRIBUTES
    assert page.text.count(str(model_dir)) == 2 and "src=" not in page.text
    text = file.read_text()
    numbers, differ = text.split("<h2>Settings that differ")
    assert "<td>Run.steps<td>4<td>6<td>" in differ and "<td>Run.keep_last<td>3<td>2<td>" in differ
    assert "<td>step<td>4<td>6<td>1" in numbers
    # The first run has one device, the second all eight; the third knows no hours.
    [hours] = re.findall(r"<td>hours<td>([^<]+)<td>([^<]+)<td>", numbers)
    [years] = re.findall(r"<td>device-years<td>([^<]+)<td>([^<]+)<td>", numbers)
    for devices, hour, year in zip((1, 8), hours, years, strict=True):
        assert float(year) == pytest.approx(devices * float(hour) / (24 * 365.25), rel=1e-2)
    last = [read_lines(Path(folder) / "metrics.jsonl")[-1]["loss"] for folder in folders[:2]]
    assert f"<td>loss (nats per token)<td>{last[0]:.4g}<td>{last[1]:.4g}<td>2.5" in numbers
    titles = ["Training loss", "Validation loss", "Validation accuracy", "Validation bits per byte"]
    assert all(f"<h2>{title}" in text for title in titles) and text.count("<img") == 5
    for flags, message in (
        ([], "give one run as --model_dir=DIR, or several"),
        (folders[:1] * 2, "or several, each once"),
        ([*folders[:1], f"--output={file}"], "--losses and --samples are for the page of several"),
        ([*folders[:1], "--losses=2"], "--losses and --samples are for the page of several"),
        ([*folders[:1], "--samples=x"], "--losses and --samples are for the page of several"),
        ([*folders, "--samples=x"], f"{folders[0]}/x"),
        ([*folders, str(tmp_path / "none")], "none: no such folder"),
    ):
        answer = run("report", *flags)
        assert answer.code == 2 and message in answer.error


def test_curves_over_tokens_and_time_count_the_steps_between_lines(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": 1.0, "tokens": tokens, "step_s": 0.5}
        for step, tokens in ((2, 10.0), (4, 20.0), (6, 30.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plots = RunPlots(tmp_path)
    assert plots.total("tokens", [0, 1, 2, 4, 5, 6]).tolist() == [0, 10, 20, 60, 90, 120]
    assert plots.total("step_s", [4]).tolist() == [2]
    assert plots.total("model_flops", [4]).tolist() == [0], "the lines have no rate"
    more = [{**line, "model_flops_per_s": 3.0} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    assert RunPlots(tmp_path).total("model_flops", [1, 4]).tolist() == [1.5, 6]


def test_samples_of_several_runs_are_side_by_side(run: Meshloom, tmp_path: Path) -> None:
    """Texts are escaped; a shorter file leaves cells empty; an end of line of Unicode's is none."""
    for name, text in (("a", "<b>one\ntwo\u2028three\n"), ("b", "four\n")):
        (tmp_path / name).mkdir()
        line = {"step": 1, "loss": 2.0, "tokens": 9.0, "step_s": 0.5, "model_flops_per_s": 2e9}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / name / "out.txt").write_text(text)
    file = tmp_path / "page.html"
    folders = [str(tmp_path / name) for name in "ab"]
    answer = run("report", *folders, "--samples=out.txt", f"--output={file}")
    assert answer.code == 0, answer.error
    assert run("report", *folders, "--samples=out.txt", "--output=-").out == file.read_text()
    answer = run("report", *folders, "--samples=out.txt", f"--output={folders[0]}/out.txt")
    assert answer.code == 2 and "is also an input" in answer.error
    table = file.read_text().split("<h2>Samples")[1].split("<h2>")[0]
    assert "<td>1<td>&lt;b&gt;one<td>four" in table and "<td>2<td>two\u2028three<td>" in table


def test_a_run_may_have_the_name_of_a_column(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("line", "loss"):
        (tmp_path / name).mkdir()
        line = {"step": 1, "loss": 2.0, "tokens": 9.0, "step_s": 0.5}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / name / "out.txt").write_text(f"{name}s\n")
    page = run("report", "line", "loss", "--samples=out.txt", "--losses=2.5", "--output=-").out
    assert "<th>loss<th>./line<th>./loss\n<tr><td>2.5<td>9<td>9" in page
    assert "<th>line<th>./line<th>./loss\n<tr><td>1<td>lines<td>losss" in page


def test_a_loss_is_reached_by_the_mean_of_ten_lines(run: Meshloom, tmp_path: Path) -> None:
    """One line alone is low, by its batch; a run of fewer lines has the mean of all."""
    for name, losses in (("a", [9, 1, *[5] * 10, 4]), ("b", [4, 2])):
        (tmp_path / name).mkdir()
        lines = [
            {"step": 2 * number, "loss": loss, "tokens": 100.0, "step_s": 0.5, "time": number}
            for number, loss in enumerate(losses, start=1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    file = tmp_path / "page.html"
    folders = [str(tmp_path / name) for name in "ab"]
    answer = run("report", *folders, "--losses=5,3,1", f"--output={file}")
    assert answer.code == 0, answer.error
    rows = file.read_text().split("<h2>Tokens until a training loss")[1].split("<h2>")[0]
    assert "<td>5<td>2,000<td>400" in rows and "<td>3<td><td>400" in rows
    assert "<td>1<td><td>" in rows


def test_headings_of_curves_have_units() -> None:
    assert heading("loss") == "loss (nats per token)" and heading("step_s") == "step time (s)"
    assert heading("tokens_per_s") == "tokens per s"
    assert heading("evaluation_total_s") == "evaluation time since the last start (s)"


def test_figures_that_a_run_lacks_are_empty_in_its_column() -> None:
    assert table_by_run("number", {"a": {"loss": 1.5}, "b": {"step": 2}}) == [
        {"number": "loss", "a": 1.5, "b": None},
        {"number": "step", "a": None, "b": 2},
    ]
