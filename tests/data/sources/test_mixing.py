"""Parts of mixtures: their names, rates and order."""

import dataclasses
import json

import numpy as np
import pytest

from configs.errors import UserError
from data.batch_sizes import BatchSizes
from data.cache import prepare
from data.sources.json_lines import Jsonl, JsonlText
from data.sources.mixing import MixedSource, TextMixture
from data.sources.pair_kinds import Mixture, Tsv
from data.sources.text import TextFiles
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece


def texts(count, **settings):
    return TextMixture(parts=(TextFiles(train="x.txt"),) * count, **settings)


def pairs(count, **settings):
    return Mixture(parts=tuple(Tsv(train=f"{i}.tsv") for i in range(count)), **settings)


MIXTURES = pytest.mark.parametrize("mixture", [texts, pairs])


def test_labels_that_are_alike_are_numbered():
    tsv, web = Tsv(train="x.tsv"), Tsv(train="web.tsv", name="web")
    jsonl = Jsonl(train="x.jsonl", source_field="de", target_field="en")
    for parts, names in (
        ((tsv, jsonl), ["Tsv", "Jsonl"]),
        ((tsv, web, tsv), ["Tsv_1", "web", "Tsv_3"]),
    ):
        assert [name for name, _ in Mixture(parts=parts).named_parts()] == names


@MIXTURES
def test_rates_are_by_size_unless_they_are_set(mixture):
    assert isinstance(mixture(2), MixedSource)
    assert mixture(2).mix([100, 300]).quotas == (1024, 3072)
    assert mixture(2, temperature=1e9).mix([100, 300]).quotas == (2048, 2048)
    assert mixture(2, rates=(3, 1)).mix([100, 300]).quotas == (3072, 1024)


def test_names_that_make_no_sense_are_described():
    parts = [Tsv(train=f"{name}.tsv", name=name) for name in "aba"]
    assert Mixture(parts=parts[:2])
    with pytest.raises(UserError) as error:
        Mixture(parts=parts)
    assert "Mixture.parts: several of 'train' have the name a.  Give each its own name" in str(
        error.value
    )


@MIXTURES
def test_rates_that_make_no_sense_are_described(mixture):
    assert mixture(2, rates=(1, 2)) and mixture(2, temperature=2)
    kind = type(mixture(2)).__name__
    with pytest.raises(UserError) as error:
        mixture(3, rates=(1, 2), temperature=3.0)
    assert f"{kind}.rates[2]: is 0 or missing, and no stage reads this part." in str(error.value)
    assert f"{kind}.temperature = 3.0: it applies only to rates by size" in str(error.value)


@MIXTURES
def test_stages_have_rates_of_their_own_which_may_be_0(mixture):
    made = mixture(2, rates=(1, 0), stages=[(5, [1, 1]), (9, [0, 2])])
    assert made.mix([100, 300]).stages == ((5, (2048, 2048)), (9, (0, 4096)))
    assert mixture(2, temperature=2, stages=((7, (0, 1)),)).mix([1, 1]).quotas == (2048, 2048)
    made = mixture(3, rates=(1, 1), stages=((5, (0, 1, 1)),))  # the third part comes later
    assert made.mix([100, 300, 9]).quotas == (2048, 2048)
    assert made.mix([100, 300, 9]).rates_after(4) == (0.5, 0.5, 0)


@MIXTURES
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ((5, (1, 1, 1)),)}, r"stages\[0\]: 3 rates for 2 parts\."),
        ({"stages": ((5, (1,)),)}, r"stages\[0\]: 1 rates for 2 parts\."),
        ({"rates": (1, 1), "stages": ((5, (1,)),)}, r"stages\[0\]: 1 rates for 2 parts\."),
        ({"stages": ((5, (1, 1)), (6, (0, 0)))}, r"stages\[1\]: all rates are 0\."),
        ({"rates": (0, 0)}, r"\.rates: all rates are 0\."),
        ({"stages": ((5, (1, 1)), (5, (1, 2)))}, r"stages: begin after steps \[5, 5\]\."),
        ({"stages": ((9, (1, 1)), (5, (1, 2)))}, r"stages: begin after steps \[9, 5\]"),
        ({"rates": (1, 0), "stages": ((5, (2, 0)),)}, r"rates\[1\]: is 0 or missing, and no stage"),
        ({"stages": ((0, (1, 1)),)}, r"stages\[0\]\[0\] = 0: legal: a tuple, each item"),
        ({"stages": ((5, (1, -1)),)}, r"stages\[0\]\[1\]\[1\] = -1: legal"),
        ({"stages": ((5, (1, float("nan"))),)}, r"stages\[0\]\[1\]\[1\] = nan: legal"),
        ({"stages": ((5.0, (1, 1)),)}, r"stages\[0\]\[0\] = 5.0: found float, legal"),
        ({"stages": (5, (1, 1))}, r"stages\[0\] = 5: found int, legal"),
        ({"stages": 7}, r"stages = 7: found int, legal"),
    ],
)
def test_stages_that_make_no_sense_are_described(mixture, changes, message):
    with pytest.raises(UserError, match=message):
        mixture(2, **changes)


@pytest.fixture
def parts(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line number {i}\n" for i in range(90)))
    (tmp_path / "b.txt").write_text("held out\n")
    texts = [json.dumps({"text": f"record {i}\nof two lines"}) for i in range(30)]
    (tmp_path / "c.jsonl").write_text("\n".join(texts))
    return (
        TextFiles(train=f"{tmp_path}/a.txt", validation=f"{tmp_path}/b.txt"),
        JsonlText(train=f"{tmp_path}/c.jsonl", validation_fraction=0.2, name="web"),
    )


def test_the_parts_come_at_their_rates_in_one_cache(parts, tmp_path):
    source = TextMixture(parts=parts, rates=(1, 3))
    task = Task(name="mixed", source=source, vocab=SentencePiece(size=310), length=16)
    prepared = prepare(task, tmp_path)
    rows = prepared.splits["train"]
    assert source.has_newlines
    assert [part.name for part in rows.parts] == ["TextFiles", "web"]
    assert [part.counts.lines for part in rows.parts] == [90, len(list(parts[1].lines("train")))]
    assert [part.dropped for part in rows.parts] == [{}, {}]
    drawn = np.concatenate([rows.order.rows_of_step(0, step, BatchSizes(64)) for step in range(32)])
    in_web = drawn >= rows.parts[1].rows.start
    assert 0.74 < in_web.mean() < 0.76
    for row in (0, rows.parts[1].rows.start):
        text = prepared.vocabs.target.decode(rows.targets_BL[row][rows.segments_BL[row] == 1])
        assert ("\n" in text) == (row > 0), text


def test_other_rates_are_another_order_of_the_same_cache(parts, tmp_path, log_lines):
    for rates in ((1, 3), (2, 1)):
        source = TextMixture(parts=parts, rates=rates)
        task = Task(name="mixed", source=source, vocab=SentencePiece(size=310), length=16)
        assert prepare(task, tmp_path).splits["train"].mix.rates_after(0)[0] == pytest.approx(
            rates[0] / sum(rates), abs=1e-3
        )
        log_lines.clear() if rates == (1, 3) else None
    assert log_lines == []


def test_a_line_that_moves_to_the_next_part_is_another_text(tmp_path, log_lines):
    lines = [f"line number {i}\n" for i in range(90)]
    files = {name: tmp_path / f"{name}.txt" for name in "ab"}
    texts = [TextFiles(train=str(f), validation=str(f), name=name) for name, f in files.items()]
    task = Task(
        name="mixed", source=TextMixture(parts=texts), vocab=SentencePiece(size=310), length=16
    )
    folders = []
    for border in (60, 59):
        files["a"].write_text("".join(lines[:border]))
        files["b"].write_text("".join(lines[border:]))
        folders.append(prepare(task, tmp_path / "data").folder)
    assert folders[0] != folders[1]
    assert any("because the text changed" in line for line in log_lines)


def test_its_text_is_that_of_its_parts(parts):
    source = TextMixture(parts=parts)
    for split in ("train", "validation"):
        assert list(source.lines(split)) == [x for part in parts for x in part.lines(split)]
    assert set(source.fingerprint()) == {"1", "2"}
    assert not TextMixture(parts=parts[:1]).has_newlines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda parts: {"parts": (*parts, Tsv(train="x"))},
            r"@Tsv\(\) yields pairs.  @Mixture\(\)",
        ),
        (lambda parts: {"parts": (parts[0], TextMixture(parts=parts))}, r"is itself a mixture"),
        (lambda parts: {"parts": parts, "rates": (1,)}, r"rates\[1\]: is 0 or missing"),
        (lambda parts: {"parts": (parts[1],) * 2}, r"several of 'train' have the name web"),
        (
            lambda parts: {"parts": (parts[0], dataclasses.replace(parts[1], name="TextFiles"))},
            r"several of 'train' have the name TextFiles",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(parts, change, message):
    with pytest.raises(UserError, match=message):
        TextMixture(**change(parts))
