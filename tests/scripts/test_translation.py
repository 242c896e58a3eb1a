"""Translation through the command line: train, evaluate, decode, score, and what goes wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from scripts.commands.evaluation import evaluate
from tests.scripts.conftest import Meshloom, Place, call
from tests.toys import optax_promotion
from trainer.decoding import decoder
from trainer.metrics.jsonl import read_lines
from trainer.translation.metrics import compute_metrics

PAIRS = 60
WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne") for b in ("ra", "st", "tu", "vo")]


def sentences(rng: np.random.Generator, count: int) -> list[str]:
    return [" ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(count)]


def write_pairs(folder: Path) -> None:
    """Made-up sentences, whose translation says the words backwards and in capitals."""
    rng = np.random.default_rng(0)
    for split, count in (("train", PAIRS), ("validation", 9), ("test", 7)):
        source = sentences(rng, count)
        target = [" ".join(line.upper().split()[::-1]) for line in source]
        (folder / f"{split}.src").write_text("".join(f"{line}\n" for line in source))
        (folder / f"{split}.tgt").write_text("".join(f"{line}\n" for line in target))


def params(folder: Path) -> list[str]:
    return [
        "Run.model = @Transformer()", "Transformer.vocab = 320", "Transformer.layers = 1",
        "Transformer.encoder_layers = 1", "Transformer.d_model = 20", "Transformer.d_ff = 28",
        "Transformer.heads = 2", "Transformer.d_kv = 6", "Transformer.positions = @Sinusoidal()",
        "Run.task = @Translation()", "Translation.name = 'toy'",
        "Translation.source = @ParallelFiles()", "Translation.vocab = @SentencePiece()",
        "SentencePiece.size = 300", "Translation.length = 32", "Translation.source_length = 24",
        *(
            f"ParallelFiles.{split}_{side} = '{folder / split}.{side[:1]}{end}'"
            for split in ("train", "validation", "test")
            for side, end in (("source", "rc"), ("target", "gt"))
        ),
        "Run.steps = 160", "Run.batch_sequences = 8", "Run.checkpoint_every = 80",
        "Run.evaluate_every = 80", "Run.bleu_sentences = 3", "Run.best_by = 'bleu'",
        "Run.optimizer = @AdamW()", "AdamW.schedule = @Constant()", "Constant.peak = 0.01",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A translation model of some steps, with a best by BLEU; tests may read it."""
    folder = tmp_path_factory.mktemp("translation")
    write_pairs(folder)
    place = Place(folder, folder / "train.src")
    flags = ["--gin_file=layouts/whole.gin", *(f"--gin_param={x}" for x in params(folder))]
    with optax_promotion():
        assert call("train", place.model_dir, data_dir(place), *flags) == 0
    return place


def data_dir(place: Place) -> str:
    return f"--data_dir={place.folder / 'data'}"


def test_training_measures_bleu_on_a_subset(place: Place) -> None:
    lines = read_lines(place.folder / "run" / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [80, 160]
    assert all(line["bleu_sentences"] == 3 and 0 <= line["bleu"] <= 100 for line in lines)


def test_evaluate_reports_bleu_with_its_signature(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    json_file, texts = tmp_path / "found.json", tmp_path / "texts"
    answer = run(
        "evaluate", place.model_dir, data_dir(place), "--split=test", "--tokenize=intl",
        f"--json={json_file}", f"--hypotheses={texts}", "--resamples=20",
    )  # fmt: skip
    assert answer.code == 0 and "tok:intl" in answer.out
    result = json.loads(json_file.read_text())
    assert {"loss", "accuracy", "bleu", "chrf", "ter", "bleu_low", "hypotheses_hash"} <= set(result)
    assert result["sentences"] == 7 and not result["is_subset"] and "tok:intl" in result["ter_signature"] + result["bleu_signature"]  # fmt: skip  # noqa: E501
    # The same numbers from the file of translations.
    lines = [path.read_text().splitlines() for path in (texts, place.folder / "test.tgt")]
    compared = compute_metrics(lines[0], lines[1:], tokenize="intl").as_dict()
    for name in ("bleu", "chrf", "ter", "hypotheses_hash", "references_hash"):
        assert compared[name] == result[name]


def test_evaluate_takes_files_and_subsets(run: Meshloom, place: Place, tmp_path: Path) -> None:
    json_file = tmp_path / "found.json"
    source, target = place.folder / "test.src", place.folder / "test.tgt"
    flags = [place.model_dir, data_dir(place), "--resamples=0", "--no_ter", f"--json={json_file}"]
    assert run("evaluate", *flags, "--split=test").code == 0
    split = json.loads(json_file.read_text())
    assert run("evaluate", *flags, f"--input={source}", f"--references={target}").code == 0
    assert json.loads(json_file.read_text()) == split
    answer = run("evaluate", *flags, "--split=test", "--sentences=0")
    result = json.loads(json_file.read_text())
    assert result["loss"] == split["loss"] and "bleu" not in result
    answer = run("evaluate", *flags, f"--input={source}")
    assert answer.code == 2 and "--references" in answer.error


def test_a_test_set_is_measured_as_its_language_is(
    run: Meshloom, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sacrebleu's own command chooses the tokenizer by the language too."""
    texts = [["kara lost"], [["LOST KARA"]]]
    monkeypatch.setattr(evaluate, "read_test_set", lambda name, languages: texts)
    answer = run(
        "evaluate", place.model_dir, "--test_set=toy", "--languages=en-zh", "--resamples=0",
        f"--hypotheses={tmp_path / 'texts'}",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    assert "|tok:zh|" in answer.out and "test:toy" in answer.out
    assert answer.error.rstrip().endswith("--language-pair en-zh")


def test_the_files_of_a_subset_give_the_same_bleu(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    json_file, texts = tmp_path / "found.json", tmp_path / "the texts"
    answer = run(
        "evaluate", place.model_dir, data_dir(place), "--split=test", "--sentences=3",
        "--max_tokens=9", "--resamples=0", "--no_ter", f"--hypotheses={texts}",
        f"--json={json_file}",
    )  # fmt: skip
    result = json.loads(json_file.read_text())
    assert result["sentences"] == 3 and result["is_subset"] and "(a subset)" in answer.out
    hypotheses, sources, references, lines = (
        (tmp_path / f"the texts{end}").read_text().splitlines()
        for end in ("", ".source", ".reference", ".lines")
    )
    assert sacrebleu.corpus_bleu(hypotheses, [references]).score == result["bleu"]
    assert f"sacrebleu '{texts}.reference' --input '{texts}'" in answer.error
    numbers = [int(line.split("\t")[1]) for line in lines]
    split = (place.folder / "test.src").read_text().splitlines()
    assert sources == [split[number - 1] for number in numbers] and len(set(numbers)) == 3
    answer = run("evaluate", place.model_dir, f"--hypotheses={texts}", "--sentences=0")
    assert answer.code == 2 and "--hypotheses with --sentences=0, which tr" in answer.error
    for name in (f"{texts}", f"{texts}.source", f"{texts}.reference"):  # it writes all three
        for flag in ("--input", "--references"):
            answer = run("evaluate", place.model_dir, f"--hypotheses={texts}", f"{flag}={name}")
            assert answer.code == 2, answer.error
            assert f"--hypotheses={texts}: {name} is also an input.  Choose another" in answer.error
    # A file beside them is not written.
    answer = run("evaluate", place.model_dir, f"--hypotheses={texts}", f"--input={texts}.en")
    assert answer.code == 2 and "is also an input" not in answer.error
    answer = run("evaluate", place.model_dir, "--checkpoint=80,160", f"--hypotheses={texts}")
    assert answer.code == 2 and "Choose one --checkpoint." in answer.error


def test_pairs_that_do_not_fit_a_row_are_counted(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    json_file, source, target = (tmp_path / name for name in ("found.json", "src", "tgt"))
    source.write_text("kara lost\n" + "mitu nevo " * 40 + "\n")
    target.write_text("LOST KARA\nNEVO\n")
    answer = run(
        "evaluate", place.model_dir, data_dir(place), f"--input={source}",
        f"--references={target}", "--sentences=0", f"--json={json_file}",
    )  # fmt: skip
    assert "1 of 2 examples do not fit a row (length 32, source_length 24)" in answer.error
    assert json.loads(json_file.read_text())["left_out_pairs"] == 1


def decoded(run: Meshloom, place: Place, *flags: str, lines: list[str] | None = None) -> list[str]:
    file = place.folder / "in.src"
    file.write_text("".join(f"{line}\n" for line in lines or SOURCES))
    answer = run("decode", place.model_dir, f"--input={file}", *flags)
    assert answer.code == 0, answer.error
    return answer.out.splitlines()


SOURCES = ["kara lost", "", "mitu nevo kara lost mitu nevo", "kara"]


def test_decode_writes_a_line_for_each_line_in_order(run: Meshloom, place: Place) -> None:
    together = decoded(run, place)
    assert len(together) == 4 and together[1] == ""
    assert together == decoded(run, place, "--apart")
    for line, expected in zip(SOURCES, together, strict=True):
        assert decoded(run, place, lines=[line]) == [expected]
    greedy = decoded(run, place, "--beam=1")
    assert greedy == decoded(run, place, "--temperature=0")
    prefixed = decoded(run, place, "--prefix=KARA NEVO")
    assert all(line.startswith("KARA NEVO") for line in (prefixed[0], *prefixed[2:]))
    assert prefixed[1] == ""


def test_decode_writes_json_beside_its_output(run: Meshloom, place: Place, tmp_path: Path) -> None:
    output, json_file = tmp_path / "out", tmp_path / "found.json"
    flags = ["--nbest=2", f"--json={json_file}"]
    header, *table = [row.split("\t") for row in decoded(run, place, *flags)]
    assert header == ["line", "rank", "score", "log_probability", "text"]
    on_stdout = json.loads(json_file.read_text())
    assert [line["source"] for line in on_stdout["lines"]] == SOURCES
    texts = [one["text"] for line in on_stdout["lines"] for one in line["hypotheses"]]
    assert texts == [row[4] for row in table] and on_stdout["settings"]["steps"] == [160]
    decoded(run, place, *flags, f"--output={output}")
    assert json.loads(json_file.read_text()) == on_stdout
    again = run("decode", place.model_dir, f"--input={place.folder / 'in.src'}", *flags,
                f"--output={output}")  # fmt: skip
    assert again.code == 2 and "already exists" in again.error


def test_samples_follow_their_seed_and_consensus_takes_one_of_them(
    run: Meshloom, place: Place
) -> None:
    flags = ["--samples=3", "--temperature=1.5", "--seed=5"]
    listed = decoded(run, place, *flags, "--nbest=3", "--format=tsv")
    assert listed == decoded(run, place, *flags, "--nbest=3", "--format=tsv")
    texts = {(row.split("\t")[0], row.split("\t")[4]) for row in listed}
    chosen = decoded(run, place, *flags, "--consensus")
    assert {(str(i), text) for i, text in enumerate(chosen, 1)} <= texts
    answer = run("decode", place.model_dir, f"--input={place.folder / 'in.src'}", "--consensus")
    assert answer.code == 2 and "--samples=16" in answer.error


def test_n_best_lists_are_ranked(run: Meshloom, place: Place) -> None:
    rows = [row.split("\t") for row in decoded(run, place, "--nbest=4")][1:]
    assert [(row[0], row[1]) for row in rows[:5]] == [("1", str(i)) for i in (1, 2, 3, 4)] + [
        ("2", "1")
    ]
    scores = [float(row[2]) for row in rows[:4]]
    assert scores == sorted(scores, reverse=True)
    entries = [json.loads(line) for line in decoded(run, place, "--nbest=4", "--format=jsonl")]
    listed = [one["score"] for one in entries[0]["hypotheses"]]
    np.testing.assert_allclose(listed, scores, rtol=1e-4)


def test_scores_of_pairs_add_up_to_the_loss(run: Meshloom, place: Place, tmp_path: Path) -> None:
    source, target = (
        (place.folder / f"test.{side}").read_text().splitlines() for side in ("src", "tgt")
    )
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{s}\t{t}\n" for s, t in zip(source, target, strict=True)))
    answer = run("score", place.model_dir, f"--input={pairs}")
    rows = [[float(x) for x in row.split("\t")] for row in answer.out.splitlines()[1:]]
    json_file = tmp_path / "found.json"
    flags = ["--split=test", "--sentences=0", f"--json={json_file}"]
    assert run("evaluate", place.model_dir, data_dir(place), *flags).code == 0
    result = json.loads(json_file.read_text())
    total, words, tokens = map(sum, zip(*rows, strict=True))
    np.testing.assert_allclose(-total / tokens, result["loss"], rtol=1e-5)
    assert (words, tokens) == (result["words"], result["tokens"]) and "bleu" not in result
    pairs.write_text("no tab\n")
    answer = run("score", place.model_dir, f"--input={pairs}")
    assert answer.code == 2 and "line 1: 0 tabs" in answer.error


def test_the_best_checkpoint_by_bleu_has_the_highest(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    shutil.copytree(place.folder / "run", model_dir)
    for step, bleu in ((80, 23.6), (160, 10.9)):
        file = model_dir / "checkpoints" / str(step) / "state" / "manifest.json"
        manifest = json.loads(file.read_text()) | {"metric": bleu}
        assert manifest["higher_is_better"]
        del manifest["crc32"]  # of the metric that it had
        file.write_text(json.dumps(manifest))
    best = [f"--model_dir={model_dir}", "--checkpoint=best"]
    answer = run("inspect", "checkpoint", *best)
    assert answer.code == 0 and "step 80 of [80, 160]" in answer.out
    evaluation, texts = tmp_path / "evaluation.json", tmp_path / "texts"
    flags = ["--split=test", "--sentences=0", "--average=1", f"--json={evaluation}"]
    assert run("evaluate", *best, data_dir(place), *flags).code == 0
    assert json.loads(evaluation.read_text())["step"] == 80
    flags = [f"--input={place.folder / 'test.src'}", f"--output={texts}", "--beam=1"]
    assert run("decode", *best, *flags).code == 0
    assert json.loads((tmp_path / "texts.made").read_text())["settings"]["steps"] == [80]


def test_ensembles_and_averages_decode(run: Meshloom, place: Place) -> None:
    one = decoded(run, place, "--checkpoint=160", "--nbest=1", "--format=tsv")
    twice = decoded(run, place, "--checkpoint=160,160", "--nbest=1", "--format=tsv")
    both = decoded(run, place, "--checkpoint=80,160", "--nbest=1", "--format=tsv")
    assert [row.split("\t")[4] for row in one] == [row.split("\t")[4] for row in twice]
    assert one != both
    assert len(decoded(run, place, "--average=2")) == 4


class Crash(BaseException):
    """As if the power went."""


def test_a_broken_off_decoding_goes_on_where_it_stopped(
    run: Meshloom, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = place.folder / "train.src", tmp_path / "out.tgt"
    flags = [place.model_dir, f"--input={source}", f"--output={output}", "--batch_sequences=2"]
    assert run("decode", *flags[:2], "--batch_sequences=2").code == 0
    expected = run("decode", *flags[:2]).out
    batches = []
    real = decoder.Decoder._finish

    def counted(self, batch, output):
        if len(batches) == 2:
            raise Crash
        batches.append(len(batch))
        return real(self, batch, output)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.Decoder, "_finish", counted)
        answer = run("decode", *flags)
    assert answer.code == 1 and "Crash" in answer.error
    assert not output.exists()
    part = tmp_path / "out.tgt.part"
    part.write_text(part.read_text() + '{"line": 59, "hypo')  # a line that was cut
    answer = run("decode", *flags)
    assert answer.code == 0 and f"Resuming after {sum(batches)} of {PAIRS} lines." in answer.error
    assert output.read_text() == expected and not part.exists()
    assert "lines/s" in answer.error
    answer = run("decode", *flags)
    assert answer.code == 0 and "already exists" in answer.error
    for other, named in (
        ("--beam=2", "beam"),
        ("--gin_param=MultiHead.logit_cap=2.0", "logit_cap"),
    ):
        answer = run("decode", *flags, other)
        assert answer.code == 2 and "made with different settings" in answer.error
        assert named in answer.error
    assert output.read_text() == expected
    (tmp_path / "out.tgt.made").unlink()
    assert run("decode", *flags).code == 2


def test_long_lines_are_cut_and_counted(run: Meshloom, place: Place, tmp_path: Path) -> None:
    file = tmp_path / "long.src"
    file.write_text("kara lost\n" + "kara lost mitu nevo " * 30 + "\n")
    answer = run("decode", place.model_dir, f"--input={file}", "--beam=1")
    assert answer.code == 0 and len(answer.out.splitlines()) == 2
    assert "1 of 2 lines have more than 23 tokens" in answer.error


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--tag=2de"], "tag '2de'"),
        (["--beam=2", "--temperature=1"], "choose either search or sampling"),
        (["--nbest=9"], "--nbest=9: the search keeps 4"),
        (["--top_k=3"], "--temperature=1"),
        (["--checkpoint=3"], "--checkpoint=3: no such checkpoint"),
    ],
)
def test_bad_flags_say_what_is_legal(
    run: Meshloom, place: Place, flags: list[str], error: str
) -> None:
    answer = run("decode", place.model_dir, f"--input={place.folder / 'test.src'}", *flags)
    assert answer.code == 2 and error in answer.error


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (["Transformer.encoder_layers = 0"], "Set Transformer.encoder_layers"),
        (["Transformer.vocab = 200"], "Transformer.vocab = 200"),
        (["Translation.source_vocab = @SentencePiece()"], "Set Transformer.source_vocab"),
        (["Transformer.positions = @Learned()", "Transformer.length = 24"], "Translation.length"),
        (["Run.bleu_sentences = 0"], "Run.bleu_sentences"),
    ],
)
def test_a_model_that_does_not_fit_the_task_is_refused(
    run: Meshloom, place: Place, tmp_path: Path, change: list[str], error: str
) -> None:
    given = [f"--gin_param={setting}" for setting in (*params(place.folder), *change)]
    given.append("--gin_file=layouts/whole.gin")
    given.append("--gin_param=Translation.name = 'other'" if "source_vocab" in change[0] else "--gin_param=Run.seed = 0")  # fmt: skip  # noqa: E501
    answer = run("train", f"--model_dir={tmp_path / 'run'}", data_dir(place), *given)
    assert answer.code == 2 and error in answer.error, answer.error
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_vocabulary_is_refused(
    run: Meshloom, place: Place, tmp_path: Path
) -> None:
    model_dir = tmp_path / "run"
    given = [f"--gin_param={setting}" for setting in params(place.folder)]
    given.append("--gin_file=layouts/whole.gin")
    shutil.copytree(place.folder / "run", model_dir)
    answer = run(
        "train", f"--model_dir={model_dir}", data_dir(place), *given,
        "--gin_param=Transformer.vocab = 384",
    )  # fmt: skip
    assert answer.code == 2 and "Transformer.vocab: 320 there, 384 now" in answer.error
