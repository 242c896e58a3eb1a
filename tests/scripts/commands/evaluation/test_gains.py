"""`meshloom gains` draws its own evaluations, and refuses foreign JSON in one line."""

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from scripts.commands.evaluation.flags import GainsFlags
from scripts.commands.evaluation.gains import gains, moving_average, parts_of

PART = {"bleu": 20.5, "train_pairs": 1000, "references_hash": "abc"}


def flags(folder: Path, part: object, output: str = "gains.png") -> GainsFlags:
    for name, of_part in (("a.json", PART), ("$x_y_z$ b.json", part)):
        (folder / name).write_text(json.dumps({"parts": {"de-en": of_part}}))
    return GainsFlags(
        baseline=str(folder / "a.json"),
        evaluation=(str(folder / "$x_y_z$ b.json"),),
        output=str(folder / output),
    )


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_of_gains(tmp_path: Path, kind: str) -> None:
    result = gains(flags(tmp_path, {**PART, "bleu": 22.0}, f"gains.{kind}"))
    assert result["models"][str(tmp_path / "$x_y_z$ b.json")]["mean_gain"] == 1.5
    begin = (tmp_path / f"gains.{kind}").read_bytes()[:6]
    assert begin == (b"\x89PNG\r\n" if kind == "png" else b"<?xml ")


@pytest.mark.parametrize(
    "part",
    [None, [], 3, {}, {**PART, "bleu": None}, {**PART, "bleu": float("nan")},
     {**PART, "train_pairs": "many"}, {**PART, "train_pairs": 0}, {"bleu": 2, "train_pairs": 3},
     {**PART, "bleu": 10**400},
     {**PART, "train_pairs": 10**400}],
)  # fmt: skip
def test_foreign_json_is_refused(tmp_path: Path, part: object) -> None:
    with pytest.raises(UserError, match=r"b\.json: contains no BLEU by part"):
        gains(flags(tmp_path, part))
    assert not (tmp_path / "gains.png").exists()


def test_a_name_that_no_picture_can_show_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"parts": {"\ud800": PART}}))
    with pytest.raises(UserError, match=r"a\.json: contains no BLEU by part .*a valid string"):
        parts_of(str(file))


def test_a_baseline_may_be_a_model_for_each_language(tmp_path: Path) -> None:
    """Their evaluations have no parts; a folder names them.  The mixture knows the data's size."""
    (tmp_path / "bilingual").mkdir()
    for name, bleu in (("de", 20.0), ("fr", 31.0)):
        result = {"step": 4, "bleu": bleu, "references_hash": name}
        (tmp_path / "bilingual" / f"{name}.json").write_text(json.dumps(result))
    parts = {
        name: {"bleu": 25.0, "train_pairs": pairs, "references_hash": name}
        for name, pairs in (("de", 100), ("fr", 900))
    }
    (tmp_path / "many.json").write_text(json.dumps({"parts": parts}))
    given = GainsFlags(
        baseline=str(tmp_path / "bilingual"), evaluation=(str(tmp_path / "many.json"),),
        output=str(tmp_path / "gains.png"),
    )  # fmt: skip
    [model] = gains(given)["models"].values()
    assert model == {"mean_gain": -0.5, "gains": {"fr": -6.0, "de": 5.0}}
    (tmp_path / "bilingual" / "fr.json").write_text('{"loss": 3.2}')
    with pytest.raises(UserError, match=r"fr\.json: contains no BLEU .*Evaluate one checkpoint"):
        gains(given)
    (tmp_path / "bilingual" / "fr.json").unlink()
    with pytest.raises(UserError, match="only one of them has fr"):
        gains(given)
    (tmp_path / "bilingual" / "de.json").unlink()
    with pytest.raises(UserError, match=r"the folder has no evaluations, such as .*de\.json"):
        gains(given)


def test_the_curve_averages_ten_neighbours() -> None:
    averages = moving_average([float(i) for i in range(20)])
    assert averages[10] == sum(range(5, 15)) / 10 and averages[0] == sum(range(5)) / 5


def test_deep_json_is_refused(tmp_path: Path) -> None:
    given = flags(tmp_path, PART)
    (tmp_path / "$x_y_z$ b.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"b\.json: contains no BLEU by part \(it: is not JSON"):
        gains(given)


def test_an_unknown_kind_of_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gains\.xyz: not an image format.  Legal: .*png"):
        gains(flags(tmp_path, PART, "gains.xyz"))
