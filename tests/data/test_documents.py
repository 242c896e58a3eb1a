"""Documents: every row knows where its text was read, and every text where it went."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from configs.errors import UserError
from data import build, manifest
from data.cache import Prepared, prepare
from data.packing.rows import NO_ROW
from data.sources.json_lines import Jsonl, JsonlText
from data.sources.mixing import TextMixture
from data.sources.pair_kinds import Mixture, ParallelFiles, Tsv
from data.sources.tables import Table, TableText
from data.sources.text import Source, TextFiles
from data.task import Task
from data.tasks.prompts import PromptTask
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import Vocab, make
from data.vocabs import Vocabs

WORDS = ("kara", "tane", "lost", "words", "here")
Texts = dict[str, str]
"""The text of each document, by its name; of a pair, its halves with a tab between."""


@pytest.fixture(scope="module")
def vocab() -> Vocab:
    lines = [
        f"{word} {number} {other}" for number in range(30) for word in WORDS for other in WORDS
    ]
    return make(SentencePiece(size=320, model_type="bpe"), iter(lines), words=["\n"])


def given(task: Task, vocab: Vocab) -> Vocabs:
    return Vocabs(vocab, vocab if task.has_source else None)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_CHUNK_EXAMPLES", 7)


class Writer:
    """Writes files of random text, and remembers each document as a reader of the file names it."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random, self.texts = folder, random.Random(seed), Texts()

    def text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.choice((1, 3, 8, 20))))

    def pair(self) -> str:
        return f"{self.text()}\t{self.text()}"

    def lines(self, name: str, texts: list[str], *, blank: str = "") -> str:
        """Writes a file with blank lines between; returns its path."""
        path, lines = str(self.folder / name), list[str]()
        for text in texts:
            lines += [blank] * (self.random.random() < 0.3)
            lines.append(text)
            self.texts[f"{path}:{len(lines)}"] = text
        Path(path).write_text("\n".join(lines) + "\n")
        return path

    def many(self, draw: Any) -> list[str]:
        return [draw() for _ in range(self.random.randint(9, 30))]

    def part(self, name: str) -> Source:
        """A part of text, of a random kind, in two files."""
        kind = self.random.choice(("lines", "paragraph", "file", "jsonl", "parquet"))
        fraction = self.random.choice((0.05, 0.2))
        names: list[str] = []
        for number in range(2):
            texts, file = self.many(self.text), f"{name}{number}"
            match kind:
                case "lines":
                    names.append(self.lines(file, texts))
                case "paragraph":
                    names.append(self.paragraphs(file, texts))
                case "file":
                    names += [self.lines(f"{file}.{i}", [text]) for i, text in enumerate(texts)]
                    self.texts.update({f"{path}:1": self.texts.pop(next(
                        key for key in self.texts if key.startswith(f"{path}:")
                    )) for path in names[-len(texts):]})  # fmt: skip
                case "jsonl":
                    names.append(self.jsonl(file, [{"text": text} for text in texts]))
                case "parquet":
                    names.append(self.parquet(file, {"text": texts}))
        options: dict[str, Any] = {
            "train": tuple(names), "validation_fraction": fraction, "name": name,
        }  # fmt: skip
        kinds = {"jsonl": JsonlText, "parquet": TableText}
        if kind in kinds:
            return kinds[kind](**options)
        return TextFiles(example="line" if kind == "lines" else kind, **options)

    def paragraphs(self, name: str, texts: list[str]) -> str:
        path, lines = str(self.folder / name), list[str]()
        for text in texts:
            lines += [""] * self.random.randint(1, 2)
            more = [text, self.text()][: self.random.randint(1, 2)]
            self.texts[f"{path}:{len(lines) + 1}"] = "\n".join(more)
            lines += more
        Path(path).write_text("\n".join(lines))
        return path

    def jsonl(self, name: str, records: list[dict[str, str]]) -> str:
        path = self.lines(name, [json.dumps(record) for record in records])
        for key in [key for key in self.texts if key.startswith(f"{path}:")]:
            self.texts[key] = "\t".join(json.loads(self.texts[key]).values())
        return path

    def parquet(self, name: str, columns: dict[str, list[str]]) -> str:
        path = str(self.folder / name)
        parquet.write_table(pyarrow.table(columns), path)
        rows = zip(*columns.values(), strict=True)
        self.texts |= {f"{path}:{i}": "\t".join(row) for i, row in enumerate(rows, 1)}
        return path

    def pairs(self, name: str) -> Any:
        """A part of pairs, of a random kind."""
        kind, pairs = (
            self.random.choice(("tsv", "parallel", "jsonl", "parquet")),
            self.many(self.pair),
        )
        sources, targets = map(list, zip(*(pair.split("\t") for pair in pairs), strict=True))
        records = [{"a": a, "b": b} for a, b in zip(sources, targets, strict=True)]
        options: dict[str, Any] = {"validation_fraction": 0.45, "name": name}
        match kind:
            case "tsv":
                return Tsv(train=self.lines(name, pairs), **options)
            case "jsonl":
                path = self.jsonl(name, records)
                return Jsonl(train=path, source_field="a", target_field="b", **options)
            case "parquet":
                path = self.parquet(name, {"a": sources, "b": targets})
                return Table(train=path, source_column="a", target_column="b", **options)
        path, other = self.folder / name, self.folder / f"{name}.target"
        path.write_text("\n".join(sources) + "\n")
        other.write_text("\n".join(targets) + "\n")
        self.texts |= {f"{path}:{i}": pair for i, pair in enumerate(pairs, 1)}
        return ParallelFiles(train_source=str(path), train_target=str(other), **options)


def random_task(folder: Path, seed: int) -> tuple[Task, Texts]:
    """A task of random kind, mixed or not, and the text of each of its documents."""
    writer = Writer(folder, seed)
    draw, kind = writer.random, ("text", "translation", "prompts")[seed % 3]
    packs, length = draw.random() < 0.7, draw.choice((16, 24, 60))
    count = draw.choice((1, 1, 2, 3))
    options: dict[str, Any] = {
        "name": "mine", "vocab": SentencePiece(size=320), "packs": packs, "length": length,
    }  # fmt: skip
    if kind == "text":
        parts = [writer.part(f"part{i}") for i in range(count)]
        source: Any = parts[0] if count == 1 else TextMixture(parts=tuple(parts))
        return Task(source=source, **options), writer.texts
    parts = [writer.pairs(f"part{i}") for i in range(count)]
    source = parts[0] if count == 1 else Mixture(parts=tuple(parts))
    if kind == "prompts":
        return PromptTask(source=source, **options), writer.texts
    return Translation(source=source, source_length=40, **options), writer.texts


def squeezed(text: str) -> str:
    return "".join(text.split())


def text_of(prepared: Prepared, split: str, pieces: np.ndarray) -> str:
    """What the rows hold of a document: the tokens of its pieces, one after another.

    All but the last fill rows, one after another; the last may fill up an earlier row.
    """
    arrays = prepared.splits[split].arrays
    halves = [("targets", "segments", prepared.vocabs.target)]
    if prepared.vocabs.source is not None:
        halves = [("sources", "source_segments", prepared.vocabs.source), *halves]
    text = ""
    for tokens, segments, vocab in halves:
        ids = [arrays[tokens][r][arrays[segments][r] == s] for _, r, s in pieces.tolist()]
        length = arrays[tokens].shape[1]
        in_order = [*(x for x in ids if len(x) == length), *(x for x in ids if len(x) < length)]
        text += squeezed(vocab.decode(np.concatenate(in_order)))
    return text


@pytest.mark.parametrize("seed", range(12))
def test_every_piece_is_of_its_document(tmp_path: Path, vocab: Vocab, seed: int) -> None:
    task, texts = random_task(tmp_path, seed)
    prepared = prepare(task, tmp_path / "data", vocabs=given(task, vocab))
    seen = set[str]()
    for split, rows in prepared.splits.items():
        index = rows.documents
        assert index is not None
        examples = list(prepared.examples(task, split, lambda *_: None))
        names = index.names(np.arange(len(examples)))
        seen |= set(names)
        assert len(set(names)) == len(names) and seen <= texts.keys()
        pieces = index.pieces_of(np.arange(len(examples)))
        of_rows = {
            (row, segment): document
            for row in range(len(rows))
            for segment, document in enumerate(index.of_row(row).tolist(), 1)
        }
        assert {(row, segment): d for d, row, segment in pieces.tolist()} == of_rows
        assert len(of_rows) == rows.arrays["segments"][np.arange(len(rows))].max(axis=1).sum()
        without_row = 0
        for number, name in enumerate(names):
            pieces = index.pieces_of(np.array([number]))
            assert index.named(name).tolist() == [number]
            without_row += not len(pieces)
            if len(pieces):
                expected = squeezed(texts[name])
                assert text_of(prepared, split, pieces) == expected
        assert without_row == rows.counts.left_out
    assert seen == texts.keys()


@pytest.mark.parametrize("seed", range(20, 29))
def test_documents_that_are_excluded_are_padding_and_all_else_stays(
    tmp_path: Path, vocab: Vocab, seed: int
) -> None:
    task, _ = random_task(tmp_path, seed)
    whole = prepare(task, tmp_path / "data", vocabs=given(task, vocab)).splits["train"]
    names = whole.known_documents.names(np.arange(whole.known_documents.starts[-1, 0]))
    chosen = random.Random(seed).sample(names, len(names) // 3)
    rows, ids = whole.without(chosen), np.arange(len(whole))
    before, after = (x.batch(np.append(ids, NO_ROW)) for x in (whole, rows))
    for name, array in before.items():
        segments = before["segments_BM" if name.endswith("M") else "segments_BL"]
        expected = array.copy()
        for row in ids.tolist():
            for segment, document in enumerate(whole.known_documents.of_row(row).tolist(), 1):
                if names[document] in chosen:
                    expected[row][segments[row] == segment] = 0
        assert after[name].dtype == array.dtype and (after[name] == expected).all()
        assert (expected != array).any()
    assert whole.without(()) is whole and rows.targets_BL.shape == whole.targets_BL.shape


def test_ranges_of_lines_and_whole_files_are_named(tmp_path: Path, vocab: Vocab) -> None:
    lines = [*(f"kara {i}" for i in range(6)), "", *(f"tane {i}" for i in range(5))]
    for name in ("a", "b"):
        (tmp_path / name).write_text("\n".join(lines))
    files = tuple(str(tmp_path / name) for name in "ab")
    task = Task(
        name="mine", source=TextFiles(train=files, validation=files[0]), length=16,
        vocab=SentencePiece(size=320),
    )  # fmt: skip
    rows = prepare(task, tmp_path / "data", vocabs=given(task, vocab)).splits["train"]
    index = rows.documents
    assert index is not None
    assert index.named(files[1]).tolist() == list(range(11, 22))
    assert index.named(f"{files[1]}:5-8").tolist() == [15, 16, 17]
    assert index.names(np.array([17, 0])) == [f"{files[1]}:8", f"{files[0]}:1"]
    parts = tuple(TextFiles(train=files[1], validation=files[0], name=x) for x in "xy")
    twice = dataclasses.replace(task, source=TextMixture(parts=parts))
    mixed = (
        prepare(twice, tmp_path / "mixed", vocabs=given(twice, vocab))
        .splits["train"]
        .known_documents
    )
    assert mixed.named(f"{files[1]}:5-8").tolist() == [4, 5, 6, 15, 16, 17]
    for name, problem in {
        f"{files[1]}:7": "no example of this split begins there",
        f"{files[1]}:13": "no example",
        f"{files[1]}:9-8": "the first line before the last one",
        f"{files[1]}x:1": f"the rows contain no such file.  Did you mean {files[1]}?",
        "": "no such file",
    }.items():
        with pytest.raises(UserError, match=problem):
            index.named(name)


def test_rows_of_an_older_version_serve_and_are_built_again_the_same(
    tmp_path: Path, vocab: Vocab
) -> None:
    task, _ = random_task(tmp_path, 0)
    prepared = prepare(task, tmp_path / "data", vocabs=given(task, vocab))
    stored = manifest.load(prepared.folder)
    for entry in stored["splits"].values():
        del entry["chunk_sizes"], entry["files"]
    for path in [*prepared.folder.glob("*.numbers*"), *prepared.folder.glob("*.pieces*")]:
        path.unlink()
        stored["file_bytes"].pop(path.name)
    manifest.write(prepared.folder, stored)
    old = prepare(task, tmp_path / "data", vocabs=given(task, vocab))
    with pytest.raises(UserError, match="these rows are from an older version"):
        old.splits["train"].without(["a"])
    assert old.splits["train"].documents is None and old.rows_hash == prepared.rows_hash
    new = prepare(task, tmp_path / "data", vocabs=given(task, vocab), rebuild=True)
    assert new.splits["train"].documents is not None and new.rows_hash == prepared.rows_hash
    assert new.manifest == prepared.manifest


def test_another_text_than_that_of_the_rows_is_an_error(tmp_path: Path, vocab: Vocab) -> None:
    task, _ = random_task(tmp_path, 0)
    prepared = prepare(task, tmp_path / "data", vocabs=given(task, vocab))
    path = next(iter(dict(prepared.splits["train"].documents.files)))
    prepared.manifest["splits"]["train"]["content_hash"] = "0"
    with pytest.raises(UserError, match="its text has changed since"):
        list(prepared.examples(task, "train", lambda *_: None))
    assert Path(path).exists()
