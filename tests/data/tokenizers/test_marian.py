"""Vocabs of Marian: the ids of Hugging Face's tokenizer, and texts back."""

import json
import pickle
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from configs.errors import UserError
from data.tokenizers.marian import Marian
from data.vocab import Vocab, make
from data.vocabs import load_vocab
from tests.trainer.checkpoints.huggingface.test_translators import pieces, vocabulary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary()))
    for name, model in zip(("source.spm", "target.spm"), pieces(), strict=True):
        (tmp_path / name).write_bytes(model)
    return tmp_path


def side(folder: Path, name: Literal["source", "target"]) -> Vocab:
    return make(Marian(path=str(folder), side=name), iter(()))


def test_each_side_has_its_own_pieces_and_the_same_ids(folder: Path) -> None:
    source, target = side(folder, "source"), side(folder, "target")
    texts = ["eins zwei drei", "", "neun"]
    for text, ids in zip(texts, source.encode(texts), strict=True):
        assert target.text(ids) == source.text(ids) == text
        assert source.pieces(ids) == [p for p in source.pieces(ids) if p != "<unk>"]
    assert source.hash != target.hash and source.ids_hash == target.ids_hash
    [other] = target.encode(["eins zwei"])
    assert list(other) != list(source.encode(["eins zwei"])[0])
    assert (target.begin_id, target.end_id) == (target.pad_id, 0)
    assert target.banned_ids == (target.pad_id,)


def test_a_tag_is_one_token(folder: Path) -> None:
    source = side(folder, "source")
    tagged, plain = source.encode([">>eng<< eins", "eins"])
    assert list(tagged) == [vocabulary()[">>eng<<"], *plain]
    assert len(source.encode([">>eng<<"])[0]) == 1


def test_unknown_characters_are_one_token(folder: Path) -> None:
    [ids] = side(folder, "source").encode(["@ eins"])
    assert vocabulary()["<unk>"] in ids and side(folder, "source").text(ids).endswith("eins")


def test_a_saved_vocab_is_the_same(folder: Path) -> None:
    vocab = side(folder, "target")
    (folder / "vocab.model").write_bytes(vocab.model)
    for again in (load_vocab(folder / "vocab.model"), pickle.loads(pickle.dumps(vocab))):
        assert again.hash == vocab.hash
        np.testing.assert_array_equal(again.encode(["one two"])[0], vocab.encode(["one two"])[0])


@pytest.mark.parametrize("damage", [(b'"ids"', b'"idz"'), (b'"pieces": "', b'"pieces": "A')])
def test_a_damaged_file_is_refused(folder: Path, damage: tuple[bytes, bytes]) -> None:
    model = side(folder, "target").model
    (folder / "vocab.model").write_bytes(model.replace(*damage))
    with pytest.raises(UserError, match=r"^vocab .*vocab\.model: "):
        load_vocab(folder / "vocab.model")


def test_a_file_has_one_side(folder: Path) -> None:
    (folder / "vocab.model").write_bytes(side(folder, "target").model)
    with pytest.raises(UserError, match=r"Marian\.side = 'source': .* has target texts"):
        make(Marian(path=str(folder / "vocab.model"), side="source"), iter(()))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vocab.json", '{"a": 1}', "vocab.json: <pad> is missing"),
        ("vocab.json", '{"<pad>": 0, "</s>": 0, "<unk>": 1}', "two tokens have the same id"),
        ("vocab.json", '{"<pad>": "x"}', "vocab.json"),
        ("target.spm", "x", "its .spm files are not models of SentencePiece"),
    ],
)
def test_other_files_are_refused(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=words):
        side(folder, "target")


@pytest.mark.filterwarnings("ignore:Recommended")
def test_hugging_face_has_the_same_ids(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ("source.spm", "target.spm", "vocab.json")
    theirs = transformers.MarianTokenizer(*(str(folder / name) for name in names))
    for text in ("eins zwei", ">>eng<< drei neun", "@ sieben x", "  acht   acht "):
        [ids] = side(folder, "source").encode([text])
        assert [*ids, 0] == theirs(text).input_ids
    for text in ("one two", "nine  seven"):
        [ids] = side(folder, "target").encode([text])
        assert [*ids, 0] == theirs(text_target=text).input_ids
        assert theirs.decode(ids, skip_special_tokens=True) == side(folder, "target").text(ids)
