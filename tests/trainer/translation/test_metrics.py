"""Translation metrics: numbers by hand and by sacrebleu's command, signatures, bad input."""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from configs.errors import UserError
from data.sources.text_files import read_lines
from trainer.translation.metrics import check_settings, compute_metrics, text_hash

SHARED = Path(os.environ.get("MESHLOOM_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
WORDS = ["The", "cat", "sat", "on", "a", "mat,", "“quietly”,", "and", "saw", "1,234.5", "dogs."]


def drawn(seed: int, count: int = 60) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 14))) for _ in range(count)]


def worse(texts: list[str], share: float, seed: int = 0) -> list[str]:
    """The texts with a share of their words changed."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choice(WORDS) if draw.random() < share else word for word in text.split())
        for text in texts
    ]


REFERENCE = drawn(1)
GOOD, BAD = worse(REFERENCE, 0.2), worse(REFERENCE, 0.5)


def by_sacrebleu(*flags: str, folder: Path, **texts: list[str]) -> str:
    """What sacrebleu's own command says of some files."""
    for name, lines in texts.items():
        (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", *flags, "--width=9"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_numbers_that_can_be_counted_by_hand() -> None:
    computed = compute_metrics(["a b c d"], [["a b c d e"]], resamples=0)
    assert computed.bleu.score == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert (computed.bleu.details["sys_len"], computed.bleu.details["ref_len"]) == (4, 5)
    assert computed.bleu.details["bp"] == pytest.approx(math.exp(-0.25))
    assert computed.bleu.details["precisions"] == pytest.approx((100, 100, 100, 100))
    assert computed.ter is not None and computed.ter.score == pytest.approx(20)
    # One and two letters count: precision 1, recall the mean of 2/3 and 1/2.
    chrf = compute_metrics(["ab"], [["abc"]], resamples=0).chrf
    assert chrf.score == pytest.approx(100 * 5 * (7 / 12) / (4 + 7 / 12))


def test_scores_intervals_and_signatures_are_those_of_sacrebleus_command(tmp_path: Path) -> None:
    flags = ["ref", "ref2", "-i", "hyp", "-m", "bleu", "chrf", "ter", "--tokenize=intl"]
    second = worse(REFERENCE, 0.1)
    answer = by_sacrebleu(
        *flags, "--format=json", "--confidence", "--confidence-n=99", folder=tmp_path,
        hyp=GOOD, ref=REFERENCE, ref2=second,
    )  # fmt: skip
    computed = compute_metrics(GOOD, [REFERENCE, second], tokenize="intl", resamples=99)
    for measure, expected in zip(computed.measures, json.loads(answer), strict=True):
        assert measure.name == expected["name"]
        assert measure.signature == expected["signature"]
        assert measure.score == pytest.approx(expected["score"])
        assert measure.low is not None and measure.high is not None
        assert (measure.low + measure.high) / 2 == pytest.approx(expected["confidence_mean"])
        assert (measure.high - measure.low) / 2 == pytest.approx(expected["confidence_var"])


def test_an_interval_holds_its_score_and_narrows_with_more_text() -> None:
    computed = compute_metrics(GOOD, [REFERENCE])
    more = compute_metrics(GOOD * 9, [REFERENCE * 9])
    for few, many in zip(computed.measures, more.measures, strict=True):
        assert few.low is not None and few.high is not None
        assert many.low is not None and many.high is not None
        assert few.low < few.score < few.high
        assert many.score == pytest.approx(few.score)
        assert many.high - many.low < (few.high - few.low) / 2


def test_a_signature_names_what_was_done() -> None:
    computed = compute_metrics(
        GOOD, [REFERENCE], tokenize="char", resamples=50,
        test_set="wmt14/full", languages="en-de", ter=False,
    )  # fmt: skip
    parts = set(computed.bleu.signature.split("|"))
    assert parts >= {
        "nrefs:1", "bs:50", "seed:12345", "case:mixed", "tok:char", "test:wmt14/full", "lang:en-de",
        f"version:{sacrebleu.__version__}",
    }  # fmt: skip
    assert {"case:mixed", "nc:6", "nw:0"} <= set(computed.chrf.signature.split("|"))
    assert computed.ter is None
    assert computed.bleu.signature in str(computed) and computed.chrf.signature in str(computed)


def test_the_target_language_chooses_the_tokenizer() -> None:
    texts = [["今天天气很好。"]]
    assert (
        "tok:zh|" in compute_metrics(texts[0], texts, languages="en-zh", resamples=0).bleu.signature
    )
    assert (
        "tok:13a|"
        in compute_metrics(texts[0], texts, languages="en-de", resamples=0).bleu.signature
    )


def test_case_counts() -> None:
    shouted = [text.upper() for text in REFERENCE]
    assert compute_metrics(shouted, [REFERENCE], resamples=0, ter=False).bleu.score < 50


def test_resamples_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = compute_metrics(GOOD, [REFERENCE]), compute_metrics(GOOD, [REFERENCE])
    assert first == again
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    other = compute_metrics(GOOD, [REFERENCE])
    assert other.bleu.low != first.bleu.low and "seed:7|" in other.bleu.signature


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    computed = compute_metrics(GOOD, [REFERENCE, BAD], resamples=0, ter=False)
    path = tmp_path / "hypotheses"
    path.write_text("\n".join(GOOD) + "\n", encoding="utf-8")
    assert computed.hypotheses_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    both = "\n".join(REFERENCE + BAD) + "\n"
    assert computed.references_hash == hashlib.sha256(both.encode()).hexdigest()
    moved = compute_metrics([*GOOD[1:], GOOD[0]], [REFERENCE, BAD], resamples=0, ter=False)
    assert moved.hypotheses_hash != computed.hypotheses_hash


def test_the_names_in_json_do_not_change() -> None:
    whole = compute_metrics(GOOD, [REFERENCE], resamples=10).as_dict()
    bare = compute_metrics(GOOD, [REFERENCE], resamples=0, ter=False).as_dict()
    measured = [f"{metric}{part}" for metric in ("bleu", "chrf", "ter")
                for part in ("", "_low", "_high", "_signature")]  # fmt: skip
    names = {
        *measured, "bleu_ref_len", "bleu_sys_len", "bleu_bp", "bleu_precisions",
        "sentences", "hypotheses_hash", "references_hash",
    }  # fmt: skip
    assert set(whole) == set(bare) == names
    assert None not in whole.values()
    assert {name for name, value in bare.items() if value is None} == {
        "bleu_low", "bleu_high", "chrf_low", "chrf_high",
        "ter", "ter_low", "ter_high", "ter_signature",
    }  # fmt: skip
    assert json.loads(json.dumps(whole))["bleu_precisions"] == list(whole["bleu_precisions"])


def test_texts_without_a_match_score_nothing() -> None:
    computed = compute_metrics([""] * 3, [["eins zwei", "drei", "vier"]], resamples=20)
    assert (computed.bleu.score, computed.bleu.low, computed.bleu.high) == (0, 0, 0)
    assert computed.ter is not None and computed.ter.score == pytest.approx(100)


def test_resamples_may_be_without_a_match() -> None:
    computed = compute_metrics(
        ["eins zwei drei vier", "xx", ""], [["eins zwei drei vier", "yy", ""]]
    )
    for measure in computed.measures:
        assert measure.low is not None and measure.high is not None
        assert measure.low < measure.score < measure.high


def test_large_texts_get_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.translation.metrics.MAX_RESAMPLE_BYTES", 80 * len(GOOD) * 30)
    assert "bs:30|" in compute_metrics(GOOD, [REFERENCE], ter=False).bleu.signature


def refused(call: Any, *words: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)


def test_unequal_counts_are_refused_with_both() -> None:
    refused(lambda: compute_metrics(GOOD[:-1], [REFERENCE]), "hypotheses", "59", "60", "reference")
    refused(
        lambda: compute_metrics(GOOD, [REFERENCE, REFERENCE[:7]], name="out.txt"),
        "out.txt: 60", "reference 2 of 2 has 7",
    )  # fmt: skip


def test_nothing_to_score_is_refused() -> None:
    for references in ([], [[]], [[" ", ""]]):
        refused(lambda given=references: compute_metrics([], given), "Nothing to score")


def test_an_unknown_tokenizer_is_refused_with_the_legal_ones() -> None:
    refused(
        lambda: compute_metrics(GOOD, [REFERENCE], tokenize="int"),
        "int:",
        "Did you mean intl?",
        "13a",
    )
    refused(lambda: check_settings("moses"), "moses", "Legal: none, zh, 13a")


def test_a_tokenizer_that_is_not_there_is_refused_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.translation.metrics.SACREBLEU_DIR", str(tmp_path / "cache"))
    for name in ("spm", "flores200", "spBLEU-1K"):
        refused(lambda given=name: check_settings(given), name, str(tmp_path), "sacrebleu <(")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ko_mecab.MeCab", None)
    refused(lambda: check_settings("ja-mecab"), "ja-mecab", "pip install sacrebleu[ja]")
    refused(lambda: check_settings("ko-mecab"), "ko-mecab", "pip install sacrebleu[ko]")
    refused(lambda: check_settings(None, "en-ja"), "en-ja", "pip install sacrebleu[ja]")


@pytest.mark.parametrize("seed", ["none", "0", "-3", "x"])
def test_a_seed_that_cannot_be_repeated_is_refused(
    seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    refused(
        lambda: compute_metrics(GOOD, [REFERENCE]),
        f"SACREBLEU_SEED={seed}",
        "an integer of at least 1",
    )


@pytest.mark.parametrize(("pair", "ref_len"), [("en-de", 62_688), ("en-fr", 77_306)])
def test_newstest2014_against_itself(pair: str, ref_len: int) -> None:
    path = SHARED / "newstest" / pair / f"newstest2014.{pair[-2:]}.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    lines = list(read_lines(str(path)))
    computed = compute_metrics(lines, [lines], resamples=0)
    assert computed.bleu.score == pytest.approx(100) and computed.chrf.score == pytest.approx(100)
    assert computed.ter is not None and computed.ter.score == 0
    assert (
        computed.bleu.details["ref_len"],
        computed.bleu.details["sys_len"],
        computed.sentences,
    ) == (ref_len, ref_len, 3003)
    assert computed.hypotheses_hash == computed.references_hash


def test_the_hash_of_texts_is_that_of_their_lines() -> None:
    assert text_hash([["one", "two"]]) == hashlib.sha256(b"one\ntwo\n").hexdigest()
