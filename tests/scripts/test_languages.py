"""Many languages into one, with experts: quality by language, which experts serve which, gains."""

import json
from pathlib import Path

import pytest

from tests.scripts.conftest import Meshloom, Place, call
from tests.toys import optax_promotion
from trainer.metrics.jsonl import read_lines

LANGUAGES = ("de", "fr", "es")
PARAMS = [
    "Run.model = @Transformer()", "Transformer.vocab = 448", "Transformer.source_vocab = 448",
    "Transformer.layers = 1", "Transformer.encoder_layers = 1", "Transformer.d_model = 20",
    "Transformer.d_ff = 28", "Transformer.heads = 2", "Transformer.d_kv = 6",
    "Transformer.positions = @Sinusoidal()", "Transformer.feed_forward = @Moe()",
    "Moe.experts = 4", "Moe.group_tokens = 64",
    "Run.task = @Translation()", "Translation.name = 'many'", "Translation.source = @Mixture()",
    "Mixture.parts = (@Phrases(),)", f"Mixture.languages = {LANGUAGES}",
    "Phrases.language = '{language}'", "Phrases.train = 300", "Phrases.held_out = 20",
    "Mixture.temperature = 5.0",
    "Translation.vocab = @SentencePiece()", "Translation.source_vocab = @source/SentencePiece()",
    "SentencePiece.size = 400", "source/SentencePiece.size = 430",
    "Translation.length = 32", "Translation.source_length = 32",
    "Run.steps = 4", "Run.batch_sequences = 8", "Run.checkpoint_every = 2",
    "Run.optimizer = @AdamW()", "AdamW.schedule = @Constant()", "Constant.peak = 0.01",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("languages")
    place = Place(folder, folder)
    flags = ["--gin_file=layouts/whole.gin", *(f"--gin_param={param}" for param in PARAMS)]
    with optax_promotion():
        assert call("train", place.model_dir, f"--data_dir={folder / 'data'}", *flags) == 0
    return place


def evaluated(place: Place, checkpoint: str = "latest") -> str:
    """The path of the JSON file of an evaluation of a checkpoint."""
    path = place.folder / f"{checkpoint}.json"
    code = call(
        "evaluate", place.model_dir, f"--data_dir={place.folder / 'data'}", "--split=test",
        "--sentences=9", "--resamples=0", "--no_ter", f"--json={path}",
        f"--checkpoint={checkpoint}",
    )  # fmt: skip
    assert code == 0
    return str(path)


@pytest.fixture(scope="module")
def last(place: Place) -> str:
    """The evaluation of the last checkpoint."""
    with optax_promotion():
        return evaluated(place)


def test_each_language_has_its_loss_its_experts_and_its_bleu(place: Place, last: str) -> None:
    [line] = read_lines(place.folder / "run" / "evaluations.jsonl")
    assert tuple(line["parts"]) == LANGUAGES
    result = json.loads(Path(last).read_text())
    assert tuple(result["parts"]) == LANGUAGES
    for part in result["parts"].values():
        assert set(part["experts"]) == {"decoder 0", "encoder 0"}
        assert part["sentences"] == 3 and 0 < part["train_pairs"] <= 300
    tokens = sum(part["tokens"] for part in result["parts"].values())
    losses = sum(part["tokens"] * part["loss"] for part in result["parts"].values())
    assert (tokens, losses) == (result["tokens"], pytest.approx(result["loss"] * tokens))
    mean = sum(part["bleu"] for part in result["parts"].values()) / 3
    assert result["mean_bleu"] == pytest.approx(mean)


def test_groups_of_several_rows_are_evaluated_under_a_layout(
    run: Meshloom, place: Place, last: str, tmp_path: Path
) -> None:
    answer = run(
        "evaluate", place.model_dir, f"--data_dir={place.folder / 'data'}", "--split=test",
        "--sentences=0", f"--json={tmp_path / 'split.json'}",
        "--gin_file=layouts/data_parallel.gin", "--gin_param=Layout.mesh='data:2'",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    actual, expected = (json.loads(Path(p).read_text()) for p in (tmp_path / "split.json", last))
    assert actual["loss"] == pytest.approx(expected["loss"], rel=2e-6)


def test_a_report_shows_which_language_uses_which_experts(run: Meshloom, place: Place) -> None:
    assert run("report", place.model_dir).code == 0
    page = (place.folder / "run" / "report.html").read_text()
    assert "Which part of the data" in page and all(f"<td>{x}" in page for x in LANGUAGES)
    assert (place.folder / "run" / "experts_of_parts.png").read_bytes().startswith(b"\x89PNG")


def test_gains_are_drawn_over_a_baseline(
    run: Meshloom, place: Place, last: str, tmp_path: Path
) -> None:
    baseline, other = evaluated(place, "2"), last
    parts = {name: json.loads(Path(name).read_text())["parts"] for name in (baseline, other)}
    picture, json_file = tmp_path / "gains.png", tmp_path / "gains.json"
    flags = [f"--baseline={baseline}", f"--output={picture}", f"--json={json_file}"]
    answer = run("gains", *flags, f"--evaluation={other}")
    assert answer.code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    gained = json.loads(json_file.read_text())["models"][other]["gains"]
    for name in LANGUAGES:
        expected = parts[other][name]["bleu"] - parts[baseline][name]["bleu"]
        assert gained[name] == pytest.approx(expected) and name in answer.out

    parts[other]["de"]["references_hash"] = "of other sentences"
    (tmp_path / "other.json").write_text(json.dumps({"parts": parts[other]}))
    answer = run("gains", *flags, f"--evaluation={tmp_path / 'other.json'}")
    assert answer.code == 2 and "their references for de differ" in answer.error
    (tmp_path / "other.json").write_text("{}")
    answer = run("gains", *flags, f"--evaluation={tmp_path / 'other.json'}")
    assert answer.code == 2 and "contains no BLEU by part" in answer.error
