"""Kinds of pairs: what each reads, holds out and refuses."""

import dataclasses
import gzip
import json
import lzma

import pytest

from configs.errors import UserError
from configs.load import load
from configs.write import dump
from data.corpora import phrases
from data.sources.json_lines import Jsonl
from data.sources.pair_kinds import Mixture, ParallelFiles, Phrases, Tsv
from data.sources.text import Source
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from tests.data.conftest import pairs_of

PAIRS = [("eins", "one"), ("zwei\u2028\u0085", "two"), ("", "three"), (" ", ""), ("fünf", "five")]


def write(path, lines):
    packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(packed("".join(f"{line}\n" for line in lines).encode()))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Line-aligned files, given as arguments of ParallelFiles, whole for each split."""
    result = {}
    for split, kind in (("train", ".gz"), ("validation", ".xz"), ("test", ".txt")):
        for i, side in enumerate(("source", "target")):
            path = tmp_path / f"{split}_{side}{kind}"
            result[f"{split}_{side}"] = write(path, [pair[i] for pair in PAIRS])
    return result


@pytest.fixture
def many(tmp_path):
    """One table: each target three times, with sources of its own."""
    return write(tmp_path / "all.tsv", [f"s {i}\tt {i % 900}\t{i}" for i in range(2700)])


def test_line_n_stands_beside_line_n_and_blank_lines_keep_their_places(files):
    source = ParallelFiles(**files)
    for split in ("train", "validation", "test"):
        assert list(pairs_of(source, split)) == PAIRS
    assert source.splits() == ("train", "validation", "test")
    assert isinstance(source, Source)


def test_several_files_stand_beside_several_in_the_order_of_their_names(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.de", [f"{name} de"])
        write(tmp_path / f"{name}.en", [f"{name} en"])
    source = ParallelFiles(
        train_source=f"{tmp_path}/*.de",
        train_target=(f"{tmp_path}/a.en", f"{tmp_path}/b.en"),
        validation_source=f"{tmp_path}/a.de",
        validation_target=f"{tmp_path}/a.en",
    )
    assert list(pairs_of(source, "train")) == [("a de", "a en"), ("b de", "b en")]
    write(tmp_path / "c.de", ["c de"])
    with pytest.raises(UserError, match=r"3 source files and 2 target files \(.*c\.de and .*b\.en"):
        list(pairs_of(source, "train"))


@pytest.mark.parametrize("shorter", ["source", "target"])
def test_unequal_line_counts_are_refused_with_both_counts(tmp_path, files, shorter):
    path = files[f"train_{shorter}"]
    write(type(tmp_path)(path), ["one"] * 3)
    counts = ("3", "5") if shorter == "source" else ("5", "3")
    message = rf"train_source.gz has {counts[0]} lines and .*train_target.gz has {counts[1]}\."
    with pytest.raises(UserError, match=message):
        list(pairs_of(ParallelFiles(**files), "train"))


def test_one_side_without_the_other_is_refused(files):
    del files["test_target"]
    with pytest.raises(UserError, match=r"ParallelFiles.test_source is set, and .*test_target is"):
        ParallelFiles(**files)


def test_columns_are_chosen_by_number(many):
    source = Tsv(train=many, validation=many, source_column=1, target_column=0)
    assert list(pairs_of(source, "train"))[:2] == [("t 0", "s 0"), ("t 1", "s 1")]
    assert len(list(pairs_of(source, "validation"))) == 2700


def test_a_line_with_too_few_columns_is_named(tmp_path):
    path = write(tmp_path / "x.tsv", ["a\tb", "", "c"])
    with pytest.raises(UserError, match=r"x\.tsv, line 3: 1 columns, and Tsv.train .* 0 and 1"):
        list(pairs_of(Tsv(train=path, validation=path), "train"))


def kinds(tmp_path, lines):
    """Each kind of files with the same lines on both sides, and what names its files."""
    plain = write(tmp_path / "a.txt", lines)
    table = write(tmp_path / "a.tsv", [f"{line}\t{line}" if line else "" for line in lines])
    fields = {"source_field": "x", "target_field": "x"}
    records = write(tmp_path / "a.jsonl", [json.dumps({"x": x}) if x else "" for x in lines])
    return [
        (ParallelFiles(train_source=plain, train_target=plain), "ParallelFiles.train_source"),
        (Tsv(train=table), "Tsv.train"),
        (Jsonl(train=records, **fields), "Jsonl.train"),
    ]


@pytest.mark.parametrize("lines", [[], [""]])
def test_an_empty_file_is_named(tmp_path, lines):
    for source, setting in kinds(tmp_path, lines)[1:] if lines else kinds(tmp_path, lines):
        with pytest.raises(UserError, match=rf"{setting}: .*a\.\w+ is empty"):
            list(pairs_of(source, "train"))


def test_a_file_may_stand_beside_two_others(tmp_path):
    one, two = (write(tmp_path / f"{x}.en", [x]) for x in ("one", "two"))
    eins, uno = (write(tmp_path / f"{x}.xx", [x]) for x in ("eins", "uno"))
    source = ParallelFiles(
        train_source=(one, one, two, two), train_target=(eins, uno, eins, f"{tmp_path}/./eins.xx"),
        validation_source=one, validation_target=eins,
    )  # fmt: skip
    assert list(pairs_of(source, "train")) == [("one", "eins"), ("one", "uno"), ("two", "eins")]


def test_an_empty_shard_is_passed_over(tmp_path, log_lines):
    for source, _ in kinds(tmp_path, ["x"]):
        settings = {
            name: f"{tmp_path}/*.{path.rpartition('.')[2]}"
            for name, path in source.files("train").items()
        }
        for path in tmp_path.glob("a.*"):
            path.with_name(f"b{path.suffix}").touch()
        shards = dataclasses.replace(source, validation_fraction=1e-9, **settings)
        log_lines.clear()
        assert list(pairs_of(shards, "train")) == [("x", "x")]
        assert "1 of 2 files are empty" in log_lines[0]


def test_a_missing_file_is_named_and_has_no_fingerprint(tmp_path):
    for source, setting in kinds(tmp_path, ["x"]):
        assert source.fingerprint() == source.fingerprint() is not None
        for path in tmp_path.glob("a.*"):
            path.rename(path.with_name(path.name + ".bak"))
        with pytest.raises(UserError, match=rf"{setting}: no file matches '.*'"):
            list(pairs_of(source, "train"))
        assert source.fingerprint() is None
        for path in tmp_path.glob("a.*"):
            path.rename(path.with_suffix(""))


def test_bad_utf8_names_file_and_line_or_stays_to_be_dropped(tmp_path):
    for source, _ in kinds(tmp_path, ["one", "naive", "two"]):
        [path] = {p for p in source.fingerprint()["train" if not isinstance(source, ParallelFiles)
                                                  else "train_source"]}  # fmt: skip
        good = type(tmp_path)(path).read_bytes()
        type(tmp_path)(path).write_bytes(good.replace(b"naive", b"na\xefve"))
        with pytest.raises(UserError, match=r"line 2: byte \d+ is 0xef, not UTF-8"):
            list(pairs_of(source, "train"))
        read = list(source.read("train", "surrogateescape"))
        held_out = list(source.read("validation", "surrogateescape"))
        assert ("na\udcefve", "na\udcefve") in read + held_out


def test_held_out_pairs_share_no_target_with_training(many):
    source = Tsv(train=many, validation_fraction=0.1)
    train, validation = list(pairs_of(source, "train")), list(pairs_of(source, "validation"))
    assert len(train) + len(validation) == 2700
    assert not {pair.target for pair in train} & {pair.target for pair in validation}
    assert 0.07 < len(validation) / 2700 < 0.13
    assert source.splits() == ("train", "validation")
    assert validation == list(pairs_of(source, "validation"))


def test_phrases_are_the_corpus(tmp_path):
    source = Phrases(language="fr", train=40, held_out=4, seed=3)
    corpus = phrases.corpus("fr", "en", 3, train=40, held_out=4)
    for split, pairs in corpus.items():
        assert list(pairs_of(source, split)) == pairs
    assert source.fingerprint() == phrases.versions()
    with pytest.raises(UserError, match=r"language 'xx': has no phrases.  Legal: cs, "):
        list(pairs_of(Phrases(language="xx"), "train"))


def three(many, **tags):
    """Two sources of files, of which one has a test, and one of phrases."""
    return [
        Tsv(train=many, tag=tags.get("a")),
        Tsv(train=many, validation=many, test=many, tag=tags.get("b")),
        Phrases(train=9, held_out=2, tag=tags.get("c")),
    ]


def test_a_mixture_has_its_parts_one_after_another(many):
    parts = three(many)
    mixture = Mixture(parts=parts)
    assert mixture.splits() == ("train", "validation", "test")
    for split, having in (("train", parts), ("validation", parts), ("test", parts[1:])):
        assert list(pairs_of(mixture, split)) == [
            p for part in having for p in pairs_of(part, split)
        ]
    assert list(mixture.parts_of("train")) == ["Tsv_1", "Tsv_2", "Phrases"]
    assert list(mixture.parts_of("test")) == ["Tsv_2", "Phrases"]


def test_a_part_for_each_language_is_named_for_it(tmp_path):
    for language in ("de", "fr"):
        write(tmp_path / f"{language}.tsv", [f"{language} {i}\t{i}" for i in range(1000)])
        write(tmp_path / f"{language}_Latn.txt", [f"{language} test"])
    write(tmp_path / "en.txt", ["tested"])
    flores = ParallelFiles(
        test_source=f"{tmp_path}/{{language}}_*.txt", test_target=f"{tmp_path}/en.txt"
    )
    mixture = Mixture(
        parts=(Tsv(train=f"{tmp_path}/{{language}}.tsv", tag="from_{language}"), 
               dataclasses.replace(flores, tag="from_{language}")),
        languages=("de", "fr"), rates=(3, 1),
    )  # fmt: skip
    assert mixture.splits() == ("train", "validation", "test")
    assert list(mixture.parts_of("train")) == list(mixture.parts_of("test")) == ["de", "fr"]
    assert mixture.tags == ("from_de", "from_fr")
    assert list(pairs_of(mixture, "test")) == [
        ("<from_de> de test", "tested"), ("<from_fr> fr test", "tested"),
    ]  # fmt: skip
    assert next(mixture.parts_of("train")["fr"].read("train")) == ("fr 0", "0")
    held_out = [[pair.target for pair in part.read("validation")]
                for part in mixture.parts_of("validation").values()]  # fmt: skip
    assert held_out[0] and held_out[0] == held_out[1]


def test_languages_that_no_setting_names_and_names_used_twice_are_refused(many):
    with pytest.raises(UserError, match=r"@Tsv\(\) reads the same for each of them.*Write "):
        Mixture(parts=(Tsv(train=many),), languages=("de", "fr"))
    with pytest.raises(UserError, match=r"several of 'train' have the name x\."):
        Mixture(parts=(Tsv(train=many, name="x"), Phrases(name="x")))
    with pytest.raises(UserError, match=r"several of 'train' have the name de\."):
        Mixture(parts=(Tsv(train=many, tag="<de>"), Tsv(train=many, tag="fr", name="de")))


def test_a_source_without_text_to_train_on_is_refused(files):
    tests_only = ParallelFiles(test_source=files["test_source"], test_target=files["test_target"])
    assert tests_only.splits() == ("test",)
    settings = {"name": "x", "length": 8, "source_length": 8, "vocab": SentencePiece(size=100)}
    with pytest.raises(UserError, match=r"no text to train on.  Found: test\."):
        Translation(source=tests_only, **settings)
    with pytest.raises(UserError, match=r"no files.  Give ParallelFiles.train_source and"):
        ParallelFiles()


def test_each_part_of_a_mixture_has_its_tag(many):
    mixture = Mixture(parts=three(many, a="2de", b="2fr", c="2en"))
    assert mixture.tags == ("2de", "2fr", "2en")
    assert list(mixture.parts_of("train")) == ["2de", "2fr", "2en"]
    first = {tag: next(pairs_of(p, "train")).source.split()[0]
             for tag, p in mixture.parts_of("train").items()}  # fmt: skip
    assert first == {"2de": "<2de>", "2fr": "<2fr>", "2en": "<2en>"}
    assert all(x.source.startswith(("<2fr> ", "<2en> ")) for x in pairs_of(mixture, "test"))


def test_the_fingerprint_of_a_mixture_follows_each_part(many, tmp_path):
    mixture = Mixture(parts=three(many))
    before = mixture.fingerprint()
    assert before == mixture.fingerprint()
    (tmp_path / "all.tsv").unlink()
    assert mixture.fingerprint() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ()}, r"Mixture.parts = \(\): "),
        ({"tag": "2de"}, r"Mixture.tag = '2de': legal: None.  Set it in each part"),
        ({"name": "all"}, r"Mixture.name = 'all': legal: None.  Set it in each part"),
        ({"languages": ("de", "fr", "de")}, r"Mixture.languages: de occurs twice.  List each"),
        ({"rates": (1, 2, 3, 4)}, r"Mixture.rates: 4 rates for 3 parts"),
        ({"rates": (1, 2)}, r"Mixture.rates\[2\]: is 0 or missing, and no stage reads this part"),
        ({"rates": (1, 2, 0)}, r"Mixture.rates\[2\]: is 0 or missing, and no stage reads"),
        ({"rates": (1, 2, -1)}, r"Mixture.rates\[2\] = -1: legal: .*of at least 0"),
        ({"rates": (1, 2, 3), "temperature": 5}, r"Mixture.temperature = 5.*Unset one of them"),
        ({"temperature": 0}, r"Mixture.temperature = 0: legal: a number above 0"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(many, changes, message):
    with pytest.raises(UserError, match=message):
        Mixture(**({"parts": three(many)} | changes))


def test_a_mixture_of_mixtures_and_a_tag_on_some_parts_are_refused_together(many):
    inner = Mixture(parts=three(many))
    with pytest.raises(UserError) as error:
        Mixture(parts=[inner, *three(many, b="2de")])
    assert "a part is itself a mixture" in str(error.value)
    assert "their tags are None, None, 2de, None.  Give each part a tag" in str(error.value)


def test_a_gin_file_names_the_parts_of_a_mixture_by_scopes():
    config = load([], [
        "Mixture.parts = (@de/Tsv(), @fr/Tsv())", "Mixture.rates = (3, 1)",
        "Tsv.target_column = 2", "de/Tsv.train = 'de.tsv'", "fr/Tsv.train = 'fr.tsv'",
        "fr/Tsv.source_column = 1",
    ])  # fmt: skip
    made = config.make(Mixture)
    assert made == Mixture(
        parts=(
            Tsv(train="de.tsv", target_column=2),
            Tsv(train="fr.tsv", source_column=1, target_column=2),
        ),
        rates=(3, 1),
    )
    again = load([], [line for line in dump([made], config.imports).splitlines() if line])
    assert again.make(Mixture) == made
