"""Tests the comparison of translation files, from the files to the table and the JSON."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.dataset import DATASETS

from configs.errors import UserError
from scripts.commands.evaluation.compare import compare
from scripts.commands.evaluation.flags import ComparedMetricFlags, CompareFlags
from trainer.translation.metrics import compute_metrics, paired

REFERENCE = [f"Die {n}. Katze sitzt auf dem Sofa, nicht im Garten {n % 3}." for n in range(40)]
GOOD = [text.replace("Sofa", "Stuhl") if n % 4 else text for n, text in enumerate(REFERENCE)]
UNKNOWN = ComparedMetricFlags(tokenize="13b")
BAD = [text.replace("dem Sofa", "die Bank") for text in REFERENCE]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes a reference and two systems, each in another kind of file."""

    def whole(lines: list[str]) -> bytes:
        return "".join(line + "\n" for line in lines).encode()

    (tmp_path / "ref.txt").write_bytes(whole(REFERENCE))
    (tmp_path / "good.gz").write_bytes(gzip.compress(whole(GOOD)))
    (tmp_path / "bad.xz").write_bytes(lzma.compress(whole(BAD)))
    (tmp_path / "short.txt").write_bytes(whole(BAD[:-3]))
    return tmp_path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_one_system_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(
        CompareFlags(
            system=(str(folder / "good.gz"),),
            references=(str(folder / "ref.txt"),),
            metrics=ComparedMetricFlags(tokenize="intl"),
            json_file=str(folder / "j"),
        )
    )
    metrics = compute_metrics(GOOD, [REFERENCE], tokenize="intl")
    figures = read_json(folder / "j")
    assert figures["paired"] is None
    (system,) = figures["systems"]
    assert system.pop("system") == str(folder / "good.gz")
    assert system == json.loads(json.dumps(metrics.as_dict()))
    output, log = capsys.readouterr()
    for measure in metrics.measures:
        assert f"{measure.score:.2f}" in output and measure.signature in output
    assert "40 sentences" in log and metrics.references_hash in log


def test_several_systems_are_compared_with_the_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = str(folder / "good.gz"), str(folder / "bad.xz")
    references = (str(folder / "ref.txt"), str(folder / "ref.txt"))
    metrics = ComparedMetricFlags(resamples=100, ter=False)
    compare(
        CompareFlags(
            system=(good, bad), references=references, metrics=metrics, json_file=f"{folder}/j"
        )
    )
    figures = read_json(folder / "j")
    assert [system["system"] for system in figures["systems"]] == [good, bad]
    assert [system["ter"] for system in figures["systems"]] == [None, None]
    comparison = paired([REFERENCE, REFERENCE], {good: GOOD, bad: BAD}, resamples=100)
    assert figures["paired"] == json.loads(json.dumps(comparison.as_dict()))
    assert "nrefs:2" in figures["paired"]["bleu_signature"]
    output = capsys.readouterr().out
    assert "baseline" in output and comparison.rows()[1][2] in output


def test_a_test_set_stands_in_for_references(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DATASETS["wmt14/full"], "_outdir", str(folder / "set"))
    (folder / "set").mkdir()
    for field in ("src", "ref"):
        text = "\n".join(REFERENCE) + "\n"
        (folder / "set" / f"wmt14_full.en-de.{field}").write_text(text)
    flags = CompareFlags(
        system=(str(folder / "ref.txt"),),
        test_set="wmt14/full",
        languages="en-de",
        metrics=ComparedMetricFlags(resamples=0),
    )
    (system,) = compare(flags)["systems"]
    assert system["bleu"] == pytest.approx(100)
    assert "test:wmt14/full|lang:en-de" in system["bleu_signature"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, ["--references=FILE", "--test_set=NAME"]),
        ({"references": ["ref.txt"], "test_set": "wmt14"}, ["--references=FILE", "--test_set"]),
        ({"test_set": "wmt14/full"}, ["--languages=en-de"]),
        ({"references": ["ref.txt"], "languages": "en-de"}, ["--test_set", "go together"]),
        ({"references": ["ref.txt"], "system": ["good.gz", "good.gz"]}, ["--system", "twice"]),
        ({"references": ["reff.txt"]}, ["reff.txt", "Did you mean ref.txt"]),
        ({"references": ["ref.txt"], "system": ["good.gz", "short.txt"]}, ["short.txt: 37", "40"]),
        ({"references": ["ref.txt"], "metrics": UNKNOWN}, ["13b", "Did you mean 13a"]),
        ({"references": ["ref.txt"], "json_file": "no/such/j"}, ["no/such/j", "cannot be written"]),
    ],
    ids=str,
)  # fmt: skip
def test_bad_flags_are_refused_and_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as error:
        compare(CompareFlags(**{"system": ["good.gz"], "json_file": "j", **flags}))
    for word in words:
        assert word in str(error.value), str(error.value)
    assert sorted(folder.rglob("*")) == before
