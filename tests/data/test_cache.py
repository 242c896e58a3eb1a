"""The cache: built whole, reused at once, and built beside for other settings or texts."""

import dataclasses
import importlib.metadata
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from configs.errors import RunError, UserError
from data import manifest
from data.batch_sizes import BatchSizes
from data.cache import prepare
from data.manifest import read as read_manifest
from data.order import batches
from data.sources.clean import Clean
from data.sources.pair_kinds import Mixture, ParallelFiles, Tsv
from data.sources.text import TextFiles
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make
from data.vocabs import Vocabs
from tests.data.conftest import pairs_of
from trainer.prepare import prepare as trainer_prepare

TEXT = [f"the row number {i} of this text has words and a number {i * i % 97}" for i in range(400)]
FILES = [
    "manifest.json",
    "train.segments.npy",
    "train.targets.crc32.npy",
    "train.targets.npy",
    "validation.segments.npy",
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXT) + "\n")
    return path


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


def task_of(text, *, size=320, length=24, name="mine", **options):
    source = TextFiles(train=str(text), validation_fraction=0.1)
    return Task(name=name, source=source, vocab=SentencePiece(size=size), length=length, **options)


def decoded(prepared, split):
    rows, result = prepared.splits[split], []
    batch = rows.batch(np.arange(len(rows)))
    for targets, segments in zip(batch["targets_BL"], batch["segments_BL"], strict=True):
        for segment in range(1, segments.max() + 1):
            result.append(prepared.vocabs.target.decode(targets[segments == segment]))
    return result


def reasons_in(log_lines):
    """Returns the lines that say why a cache is built beside another."""
    return [line for line in log_lines if ", because " in line]


def test_the_rows_hold_the_text(text, data_dir):
    prepared = prepare(task_of(text, length=128), data_dir)
    splits = [decoded(prepared, split) for split in ("train", "validation")]
    assert sorted(splits[0] + splits[1]) == sorted(TEXT)
    stored = read_manifest(data_dir / "mine")
    assert stored == prepared.manifest
    assert sum(s["words"] for s in stored["splits"].values()) == sum(len(x.split()) for x in TEXT)
    assert stored["settings"]["SentencePiece.size"] == 320


def test_a_second_call_reads_no_text_and_writes_nothing(text, data_dir, log_lines):
    first = prepare(task_of(text), data_dir)
    stamps = {p.name: p.stat().st_mtime_ns for p in (data_dir / "mine").iterdir()}
    os.chmod(text, 0)
    log_lines.clear()
    second = prepare(task_of(text), data_dir)
    assert log_lines == []
    assert {p.name: p.stat().st_mtime_ns for p in (data_dir / "mine").iterdir()} == stamps
    assert second.vocabs.target.hash == first.vocabs.target.hash
    assert decoded(second, "train") == decoded(first, "train")


def test_building_twice_gives_the_same_bytes(text, data_dir):
    first = _contents(prepare(task_of(text), data_dir) and data_dir / "mine")
    prepare(task_of(text), data_dir, rebuild=True)
    assert _contents(data_dir / "mine") == first


def test_other_settings_are_built_beside_and_named(text, data_dir, log_lines):
    first = prepare(task_of(text), data_dir)
    before = _contents(first.folder)
    other = task_of(text, size=330, length=48, packs=False)
    second = prepare(other, data_dir)
    assert (first.folder.name, second.vocabs.target.size) == ("mine", 330)
    [said] = reasons_in(log_lines)
    assert f"mine: builds {second.folder} next to mine, because " in said
    assert "SentencePiece.size was 320 and is 330" in said
    assert "Task.length was 24 and is 48" in said
    assert "Task.packs was True and is False" in said
    assert said.count(" was ") == 3
    log_lines.clear()
    assert prepare(task_of(text), data_dir).folder == first.folder
    assert prepare(other, data_dir).folder == second.folder
    assert log_lines == [] and _contents(first.folder) == before


def test_a_setting_that_an_older_version_lacked_has_its_default(text, data_dir):
    folder = prepare(task_of(text), data_dir).folder
    stored = manifest.load(folder)
    del stored["settings"]["Task.packs"]
    manifest.write(folder, stored)
    assert prepare(task_of(text), data_dir).folder == folder
    assert prepare(task_of(text, packs=False), data_dir).folder != folder


def test_another_version_of_a_package_builds_beside(text, data_dir, log_lines, monkeypatch):
    first = prepare(task_of(text), data_dir)
    ordinary = importlib.metadata.version
    versions = {"sentencepiece": "99.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda n: versions.get(n) or ordinary(n))
    of_run = {"vocabs": first.vocabs, "content_hash": first.manifest["content_hash"]}
    assert prepare(task_of(text), data_dir, **of_run).folder == first.folder
    second = prepare(task_of(text), data_dir)
    assert second.folder != first.folder
    [said] = reasons_in(log_lines)
    assert f"because sentencepiece was {ordinary('sentencepiece')!r} and is '99.1'" in said


def test_another_format_builds_beside(text, data_dir, log_lines, monkeypatch):
    first = prepare(task_of(text), data_dir)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    assert prepare(task_of(text), data_dir).folder != first.folder
    assert "the format of caches was 1 and is 2" in reasons_in(log_lines)[0]


def test_two_processes_build_two_settings_or_one(text, data_dir, log_lines):
    """Both begin before there is any cache."""
    tasks = [task_of(text), task_of(text, length=48), task_of(text)]
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda task: prepare(task, data_dir).folder, tasks))
    assert folders[0] == folders[2] != folders[1]
    assert any("another process is writing it" in line for line in log_lines)
    assert sorted(_left(data_dir)) == sorted({folder.name for folder in folders})


def test_what_is_no_cache_is_not_replaced(text, data_dir):
    (data_dir / "mine").mkdir(parents=True)
    for name in ("letters", manifest.NAME):
        (data_dir / "mine" / name).write_text("dear")
    for rebuild in (False, True):
        with pytest.raises(UserError, match=r"mine: is not a cache, because it contains letters\."):
            prepare(task_of(text), data_dir, rebuild=rebuild)
    assert (data_dir / "mine" / "letters").exists()


def test_a_changed_word_list_builds_beside(text, data_dir, tmp_path, log_lines):
    words = tmp_path / "words"
    words.write_text("the\nrow\n")
    prepared = prepare(task_of(text, word_list=str(words)), data_dir)
    assert decoded(prepared, "train")[0].startswith("the row <UNK>")
    words.write_text("the\nrow\nnumber\n")
    prepared = prepare(task_of(text, word_list=str(words)), data_dir)
    assert decoded(prepared, "train")[0].startswith("the row number <UNK>")
    assert "the text of Task.word_list was '" in reasons_in(log_lines)[0]


def test_files_of_the_home_folder_are_read(text, data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "words").write_text("the\nrow\n")
    (tmp_path / "given.model").write_bytes(make(SentencePiece(size=300), iter(TEXT)).model)
    task = task_of("~/text.txt", word_list="~/words")
    prepared = prepare(
        dataclasses.replace(task, vocab=SentencePiece(model_file="~/given.model")), data_dir
    )
    assert prepared.vocabs.target.size == 300
    assert decoded(prepared, "train")[0].startswith("the row")


def test_other_text_builds_beside_but_a_new_date_does_not(text, data_dir, log_lines):
    prepare(task_of(text), data_dir)
    os.utime(text, (1, 1))
    log_lines.clear()
    prepare(task_of(text), data_dir)
    assert len(log_lines) == 1 and "comparing the text" in log_lines[0]
    prepare(task_of(text), data_dir)
    assert len(log_lines) == 1, "the new date is remembered"
    first = prepare(task_of(text), data_dir)
    text.write_text("\n".join(TEXT[1:]) + "\n")
    other = prepare(task_of(text), data_dir)
    assert other.folder != first.folder
    assert reasons_in(log_lines)[0].endswith("because the text changed.")
    of_run = {"vocabs": first.vocabs, "content_hash": first.manifest["content_hash"]}
    assert prepare(task_of(text), data_dir, **of_run).folder == first.folder
    text.write_text("\n".join(TEXT) + "\n")
    assert prepare(task_of(text), data_dir).folder == first.folder


def test_a_cache_that_cannot_be_written_serves_a_text_of_another_date(text, data_dir, monkeypatch):
    first = prepare(task_of(text), data_dir)
    os.utime(text, (1, 1))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only disk
    assert prepare(task_of(text), data_dir).folder == first.folder


def test_a_cache_serves_without_its_text(text, data_dir, log_lines):
    prepare(task_of(text), data_dir)
    text.unlink()
    log_lines.clear()
    assert len(prepare(task_of(text), data_dir).splits["train"])
    assert "its text is not on this machine" in log_lines[0]


def test_a_given_vocab_is_used_and_another_builds_beside(text, data_dir, log_lines):
    given, other = (make(SentencePiece(size=n), iter(TEXT)) for n in (300, 310))
    first = prepare(task_of(text), data_dir, vocabs=Vocabs(given, None))
    assert first.vocabs.target.hash == given.hash
    assert prepare(task_of(text), data_dir, vocabs=Vocabs(given, None)).folder == first.folder
    second = prepare(task_of(text), data_dir, vocabs=Vocabs(other, None))
    assert second.vocabs.target.hash == other.hash
    said = f"because vocab was '{given.hash[:16]}' and is '{other.hash[:16]}'"
    assert said in reasons_in(log_lines)[0]
    trained = prepare(task_of(text), data_dir)
    assert trained.vocabs.target.size == 320
    assert prepare(task_of(text), data_dir, vocabs=trained.vocabs).folder == trained.folder


def test_a_cache_of_another_runs_vocab_says_so_where_the_settings_train_one(
    text, data_dir, log_lines
):
    given = make(SentencePiece(size=300), iter(TEXT))
    prepare(task_of(text), data_dir, vocabs=Vocabs(given, None))
    prepare(task_of(text), data_dir)
    said = f"vocab was a run's ('{given.hash[:16]}') and is trained, without Run.start_from."
    assert reasons_in(log_lines)[0].endswith(f"because {said}")


@pytest.mark.parametrize("is_old", [False, True])
def test_a_given_vocab_that_the_settings_name_shares_their_cache(
    text, data_dir, tmp_path, log_lines, is_old
):
    """As a fine-tuning's, whose vocab is that of the model that it starts from."""
    given = make(SentencePiece(size=300), iter(TEXT))
    (tmp_path / "given.model").write_bytes(given.model)
    vocab = SentencePiece(model_file=str(tmp_path / "given.model"))
    task = dataclasses.replace(task_of(text), vocab=vocab)
    first = prepare(task, data_dir, vocabs=Vocabs(given, None))
    if is_old:  # older versions wrote down that a run gave it
        manifest.write(first.folder, {**manifest.load(first.folder), "given_vocabs": ["vocab"]})
    assert prepare(task, data_dir).folder == first.folder
    assert prepare(task, data_dir, vocabs=Vocabs(given, None)).folder == first.folder
    assert reasons_in(log_lines) == []


@pytest.mark.parametrize("name", [*FILES, "vocab.model"])
def test_a_truncated_file_is_named(text, data_dir, name):
    prepare(task_of(text), data_dir)
    path = data_dir / "mine" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        UserError, match=r"mine.*(damaged|not a complete cache).*meshloom prepare --rebuild"
    ):
        prepare(task_of(text), data_dir)
    prepare(task_of(text), data_dir, rebuild=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_hash", None), ("content_hash", 3), ("settings", []), ("splits", {"train": None}),
        ("splits", {"train": {"rows": -1}}), ("splits", {"train": {"rows": 1.5}}),
        ("splits", {"train": {"parts": [{"name": "a"}]}}), ("file_bytes", {}), ("versions", "x"),
        ("file_bytes", {"train.targets.npy": "x"}), ("fingerprint", 1), ("given_vocabs", {"a": 1}),
        ("text_hash", 1),
    ],
)  # fmt: skip
def test_a_manifest_of_wrong_types_is_refused_although_its_checksum_is_right(
    text, data_dir, name, value
):
    folder = prepare(task_of(text), data_dir).folder
    manifest.write(folder, {**manifest.load(folder), name: value})
    with pytest.raises(UserError, match=rf"manifest\.json: {name}: .*meshloom prepare --rebuild"):
        prepare(task_of(text), data_dir)


def test_a_changed_row_is_found_when_it_is_read(text, data_dir):
    rows = prepare(task_of(text), data_dir).splits["train"]
    path = data_dir / "mine" / "train.targets.npy"
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 1
    path.write_bytes(contents)
    rows = prepare(task_of(text), data_dir).splits["train"]
    with pytest.raises(UserError, match=r"train.targets.npy: rows .*--rebuild"):
        rows.batch(np.array([len(rows) - 1]))


def test_a_changed_digit_of_the_manifest_is_noticed(text, data_dir):
    prepare(task_of(text), data_dir)
    file = data_dir / "mine" / "manifest.json"
    contents = file.read_text()
    digits = [i for i, character in enumerate(contents) if character.isdigit()]
    for at in [*digits[::7], contents.index("crc32") + len("crc")]:
        changed = "8" if contents[at] == "9" else str(int(contents[at]) + 1)  # no leading zero
        file.write_text(contents[:at] + changed + contents[at + 1 :])
        with pytest.raises(UserError, match=r"manifest.json: it is damaged.*--rebuild"):
            prepare(task_of(text), data_dir)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(text, data_dir, name):
    prepare(task_of(text), data_dir)
    (data_dir / "mine" / name).unlink()
    with pytest.raises(UserError, match=r"meshloom prepare --rebuild"):
        prepare(task_of(text), data_dir)


def test_bad_text_leaves_nothing(text, data_dir):
    text.write_bytes(text.read_bytes() + b"bad \xff line\n")
    with pytest.raises(UserError, match=r"text\.txt, line 401: byte 5 is 0xff, not UTF-8"):
        prepare(task_of(text), data_dir)
    assert _left(data_dir) == []


def test_few_examples_of_which_none_is_held_out_are_trained_on(text, data_dir):
    text.write_text("one line of text alone is here\n")
    for _ in range(2):
        prepared = prepare(task_of(text, size=280), data_dir)
        assert list(prepared.splits) == ["train"]
    assert not list(prepared.folder.glob("validation*"))


def test_a_split_without_pairs_is_named_with_the_settings_that_mend_it(pairs, data_dir, caplog):
    pairs.write_text("eins\tone\nzwei\ttwo\n")  # neither is among the 2 % held out
    task = translation_of(Tsv(train=str(pairs)), vocab=SentencePiece(size=280))
    for _ in range(2):  # built, and read
        caplog.clear()
        assert list(trainer_prepare(task, data_dir).splits) == ["train"]
        assert caplog.messages[-1] == (
            "Warning: pair: too few different examples to hold some out, so there is no "
            "validation.  For a validation split give it files of its own (Tsv.validation), a "
            "Tsv.validation_fraction above 0.02, or more text."
        )


@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_the_old_cache_or_nothing(text, data_dir, monkeypatch, old):
    if old:
        prepare(task_of(text), data_dir)
    before = _contents(data_dir / "mine") if old else None
    # Every byte written to the device is refused with ENOSPC, by the kernel.
    ordinary = Path.open

    def full(path, mode="r", *rest, **options):
        path = Path("/dev/full") if "x" in mode else path
        return ordinary(path, mode.replace("x", "w"), *rest, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunError, match=r"data/mine: the disk is full.*--data_dir"):
        prepare(task_of(text), data_dir, rebuild=True)
    assert _left(data_dir) == (["mine"] if old else [])
    if old:
        assert _contents(data_dir / "mine") == before


SOURCES = [f"die Zeile {i} dieses Textes hat {'viele ' * (i % 5)}Worte" for i in range(400)]
PAIRS = list(zip(SOURCES, TEXT, strict=True))


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.tsv", PAIRS)


@pytest.fixture
def others(tmp_path):
    """Fewer pairs, none of which is among the others."""
    return write_pairs(tmp_path / "others.tsv", [(t, s) for s, t in PAIRS[:60]])


def write_pairs(path, pairs):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return path


def translation_of(*sources, source_size=None, name="pair", **changes):
    settings = {
        "source": sources[0] if len(sources) == 1 else Mixture(parts=sources),
        "vocab": SentencePiece(size=340),
        "source_vocab": None if source_size is None else SentencePiece(size=source_size),
        "length": 96, "source_length": 80,
    }  # fmt: skip
    return Translation(name=name, **(settings | changes))


def decoded_pairs(prepared, split, ids=None):
    rows, result = prepared.splits[split], []
    batch = rows.batch(np.arange(len(rows)) if ids is None else np.array(ids))
    for row in range(len(batch["segments_BL"])):
        for segment in range(1, batch["segments_BL"][row].max() + 1):
            source = batch["inputs_BM"][row][batch["segments_BM"][row] == segment]
            target = batch["targets_BL"][row][batch["segments_BL"][row] == segment]
            result.append(
                (prepared.vocabs.source.decode(source), prepared.vocabs.target.decode(target))
            )
    return result


@pytest.mark.parametrize("source_size", [None, 310])
def test_the_rows_hold_the_pairs(pairs, data_dir, source_size):
    task = translation_of(Tsv(train=str(pairs), validation_fraction=0.1), source_size=source_size)
    for prepared in (prepare(task, data_dir), prepare(task, data_dir)):
        splits = [decoded_pairs(prepared, split) for split in ("train", "validation")]
        assert sorted(splits[0] + splits[1]) == sorted(PAIRS)
        assert (prepared.vocabs.source is prepared.vocabs.target) == (source_size is None)
    assert task.fills(prepared.splits["train"].counts)["fill"] > 0.8
    assert (data_dir / "pair" / "source_vocab.model").exists() == (source_size is not None)


def test_a_language_model_has_no_source(text, data_dir):
    assert prepare(task_of(text), data_dir).vocabs.source is None


def test_other_settings_of_a_translation_are_named(pairs, data_dir, log_lines):
    source = Tsv(train=str(pairs))
    prepare(translation_of(source, source_size=310), data_dir)
    changed = translation_of(
        Tsv(train=str(pairs), source_column=1, tag="2en"), source_size=320, source_length=76,
        clean=Clean(max_ratio=3),
    )  # fmt: skip
    prepare(changed, data_dir)
    [message] = reasons_in(log_lines)
    for reason in (
        "source_vocab/SentencePiece.size was 310 and is 320",
        "Tsv.source_column was 0 and is 1",
        "Tsv.tag was None and is '2en'",
        "Translation.source_length was 80 and is 76",
        "Clean.max_ratio was None and is 3.0",
    ):
        assert reason in message
    assert message.count(" was ") == 5


def test_other_parts_of_a_mixture_are_named_but_other_rates_serve(
    pairs, others, data_dir, log_lines
):
    parts = [Tsv(train=str(pairs)), Tsv(train=str(others), validation=str(others))]
    first = prepare(translation_of(*parts), data_dir).splits["train"]
    for rates in ({"rates": (1, 3)}, {"temperature": 5}):
        changed = prepare(translation_of(Mixture(parts=parts, **rates)), data_dir).splits["train"]
        ids = np.arange(len(first))
        assert (changed.targets_BL[ids] == first.targets_BL[ids]).all()
        assert changed.mix.rates_after(0) != first.mix.rates_after(0)
    parts[1] = Tsv(train=str(others), validation=str(others), tag="2de")
    parts[0] = Tsv(train=str(pairs), tag="2en")
    prepare(translation_of(*parts), data_dir)
    parts = [Tsv(train=str(pairs)), Tsv(train=str(others)), Tsv(train=str(others))]
    prepare(translation_of(*parts), data_dir)
    tags, kinds = reasons_in(log_lines)
    assert "parts_2/Tsv.tag was None and is '2de'" in tags
    assert "Mixture.parts was ['@Tsv()', '@Tsv()'] and is ['@Tsv()', '@Tsv()', '@Tsv()']" in kinds


def test_the_parts_of_a_mixture_are_packed_apart_and_come_at_their_rates(pairs, others, data_dir):
    parts = {"2en": Tsv(train=str(pairs), tag="2en"), "2de": Tsv(train=str(others), tag="2de")}
    prepared = prepare(translation_of(Mixture(parts=[*parts.values()], rates=(1, 3))), data_dir)
    train = prepared.splits["train"]
    assert [part.name for part in train.parts] == list(parts)
    assert [*train.parts[0].rows, *train.parts[1].rows] == list(range(len(train)))
    for part in train.parts:
        pairs = decoded_pairs(prepared, "train", part.rows)
        assert sorted(pairs) == sorted(pairs_of(parts[part.name], "train"))
        assert part.counts.lines == part.read == len(pairs)
    ids = np.concatenate([train.order.rows_of_step(3, step, BatchSizes(64)) for step in range(64)])
    assert (ids < train.parts[0].rows.stop).mean() == 0.25
    assert prepared.splits["validation"].parts[0].counts.lines > 0
    batch = next(batches(train, 3, BatchSizes(64), 0))[1]
    assert (batch["targets_BL"] == train.targets_BL[ids[:64]]).all()
    assert prepared.splits["validation"].mix is None


def test_rates_by_size_and_by_temperature_are_of_rows(pairs, others, data_dir):
    parts = [Tsv(train=str(pairs)), Tsv(train=str(others))]
    for temperature in (1, 5):
        mixture = Mixture(parts=parts, temperature=temperature)
        train = prepare(translation_of(mixture), data_dir).splits["train"]
        expected = np.array([len(part.rows) for part in train.parts]) ** (1 / temperature)
        np.testing.assert_allclose(
            train.mix.rates_after(0), expected / expected.sum(), atol=1 / 4096
        )


def test_dropped_pairs_are_logged_and_kept_in_the_manifest(pairs, data_dir, log_lines):
    with pairs.open("a") as file:
        file.write(f"{SOURCES[0]}\t{TEXT[0]}\nleer\t\nlang {'x' * 90}\tlong\n")
    source = Tsv(train=str(pairs), validation=str(pairs))
    task = translation_of(source, clean=Clean(drops_duplicates=True, max_characters=200))
    prepared = prepare(task, data_dir)
    [train] = prepared.splits["train"].parts
    dropped = {"an empty side": 1, "above max_characters": 0, "a repeat": 1}
    assert train.dropped == {**dropped, "longer than a row": 1}
    assert (train.counts.lines, train.counts.left_out, train.read) == (400, 1, 403)
    [line] = [line for line in log_lines if line.startswith("train: ")]
    reasons = "1 (an empty side), 0 (above max_characters), 1 (a repeat), 1 (longer than a row)"
    assert line.endswith(f"; not taken: {reasons}")
    entry = prepared.manifest["splits"]["train"]
    assert entry["dropped"] == entry["parts"][0]["dropped"] == dropped
    assert (entry["left_out"], entry["parts"][0]["left_out"]) == (1, 1)
    assert entry["source_words"] == sum(len(source.split()) for source in SOURCES)
    assert entry["words"] == sum(len(target.split()) for target in TEXT)
    [validation] = prepared.splits["validation"].parts
    assert validation.dropped == {"longer than a row": 1}


def test_given_vocabs_are_used_and_others_build_beside(pairs, data_dir, log_lines):
    given, other, third = (
        make(SentencePiece(size=n), iter(TEXT + SOURCES)) for n in (300, 310, 305)
    )
    joint = translation_of(Tsv(train=str(pairs)))
    prepared = prepare(joint, data_dir, vocabs=Vocabs(given, given))
    assert prepared.vocabs.source.hash == given.hash
    assert prepare(joint, data_dir, vocabs=Vocabs(other, other)).vocabs.source.hash == other.hash
    separate = translation_of(Tsv(train=str(pairs)), source_size=320, name="two")
    prepared = prepare(separate, data_dir, vocabs=Vocabs(other, given))
    assert (prepared.vocabs.source.hash, prepared.vocabs.target.hash) == (given.hash, other.hash)
    log_lines.clear()
    again = prepare(separate, data_dir, vocabs=Vocabs(other, third))
    assert again.vocabs.source.hash == third.hash
    assert "because source_vocab was '" in reasons_in(log_lines)[0]


def test_separate_vocabs_may_be_equal(pairs, data_dir, tmp_path):
    """As one tokenizer that both settings name; the caches and runs of such a task have both."""
    given = make(SentencePiece(size=300), iter(TEXT + SOURCES))
    (tmp_path / "given.model").write_bytes(given.model)
    vocab = SentencePiece(model_file=str(tmp_path / "given.model"))
    task = translation_of(Tsv(train=str(pairs)), source_size=300)
    task = dataclasses.replace(task, vocab=vocab, source_vocab=vocab)
    prepared = prepare(task, data_dir)
    assert prepared.vocabs.source.hash == prepared.vocabs.target.hash == given.hash
    again = prepare(task, data_dir, vocabs=prepared.vocabs)
    assert again.folder == prepared.folder
    assert [*prepared.vocabs.files()] == ["vocab.model", "source_vocab.model"]
    joint = dataclasses.replace(task, source_vocab=None, name="joint")
    assert [*prepare(joint, data_dir).vocabs.files()] == ["vocab.model"]


@pytest.mark.parametrize(
    "name", ["train.sources.npy", "validation.source_segments.npy", "source_vocab.model"]
)
def test_a_damaged_file_of_the_source_side_is_named(pairs, data_dir, name):
    task = translation_of(Tsv(train=str(pairs)), source_size=310)
    prepare(task, data_dir)
    path = data_dir / "pair" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{name}.*damaged.*meshloom prepare --rebuild"):
        prepare(task, data_dir)


def test_another_vocab_of_the_same_size_on_disk_is_refused(pairs, data_dir):
    task = translation_of(Tsv(train=str(pairs)), source_size=310)
    prepare(task, data_dir)
    path = data_dir / "pair" / "source_vocab.model"
    raw = bytearray(path.read_bytes())
    at = raw.index(b"e", len(raw) // 2)
    raw[at : at + 1] = b"o"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"source_vocab.model: (the file is damaged|is not a S)"):
        prepare(task, data_dir)


def test_bad_pairs_leave_nothing(pairs, data_dir, tmp_path):
    short = tmp_path / "short"
    short.write_text("one\ntwo\n")
    files = ParallelFiles(train_source=str(pairs), train_target=str(short))
    with pytest.raises(UserError, match=r"pairs.tsv has 400 lines and .*short has 2\."):
        prepare(translation_of(files), data_dir)
    pairs.write_bytes(pairs.read_bytes() + b"bad \xff\tline\n")
    with pytest.raises(UserError, match=r"pairs\.tsv, line 401: byte 5 is 0xff, not UTF-8"):
        prepare(translation_of(Tsv(train=str(pairs))), data_dir)
    assert _left(data_dir) == []


def test_bytes_that_are_not_utf8_are_dropped_on_request_and_the_text_is_known_again(
    pairs, data_dir, log_lines
):
    pairs.write_bytes(pairs.read_bytes() + b"bad \xff\tline\n")
    task = translation_of(Tsv(train=str(pairs)), clean=Clean(drops_invalid_utf8=True))
    prepared = prepare(task, data_dir)
    assert sum(s["dropped"].get("not UTF-8", 0)
               for s in prepared.manifest["splits"].values()) == 1  # fmt: skip
    os.utime(pairs, (1, 1))
    log_lines.clear()
    prepare(task, data_dir)
    assert "comparing the text" in log_lines[0]
    pairs.write_bytes(pairs.read_bytes().replace(b"\xff", b"\xfe"))
    prepare(task, data_dir)
    assert "the text changed" in reasons_in(log_lines)[0]


def test_a_part_without_pairs_is_named_with_the_reason(pairs, others, data_dir):
    others.write_text("zu kurz\t" + "much too long " * 20 + "\n")
    parts = [Tsv(train=str(pairs)), Tsv(train=str(others), validation=str(pairs))]
    with pytest.raises(UserError) as error:
        prepare(translation_of(*parts), data_dir)
    assert str(error.value) == (
        "pair: the split 'train' of Tsv_2 has no lines; not taken: 1 (longer than a row).  "
        "Give it longer rows (Translation.length and Translation.source_length), a milder Clean, "
        "or more text."
    )
    assert _left(data_dir) == []


def _left(data_dir):
    return [p.name for p in data_dir.iterdir() if p.suffix != ".lock"]


def _contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}
