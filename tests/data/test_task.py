"""Tasks: what a name and a length may be, and what a batch of each kind holds."""

import json
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from configs.load import load
from data.cache import prepare
from data.sources.pair_kinds import Phrases
from data.sources.text import Docstrings, TextFiles
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocab import make
from data.vocabs import Vocabs
from scripts.commands.common import task_of
from tests.data.tokenizers.test_tokenizer_json import byte_level

TASKS = Path(__file__).parents[2] / "configs" / "tasks"
NEEDED = {
    "text": ["TextFiles.train='my/*.txt'"],
    "span_corruption": ["TextFiles.train='my/*.txt'"],
    "pairs": ["ParallelFiles.train_source='my.en'", "ParallelFiles.train_target='my.de'"],
}


def translation(**changes):
    settings = {"name": "x", "source": Phrases(), "vocab": SentencePiece(), "length": 9}
    return Translation(**(settings | {"source_length": 7} | changes))


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a b"])
def test_a_name_is_a_folder_name(name):
    with pytest.raises(UserError, match=r"Task.name = .*it names a folder of data_dir"):
        Task(name=name, source=Docstrings(), vocab=SentencePiece(), length=8)
    with pytest.raises(UserError, match=r"Translation.name = .*it names a folder of data_dir"):
        translation(name=name)


def test_a_row_has_at_least_two_places():
    with pytest.raises(UserError, match=r"length = 1: legal: .* at least 2 and of at most 1048576"):
        Task(name="x", source=Docstrings(), vocab=SentencePiece(), length=1)
    with pytest.raises(UserError, match=r"Translation.source_length = 1: legal: .* at least 2"):
        translation(source_length=1)


def test_pairs_are_no_text_and_text_is_no_pairs():
    with pytest.raises(UserError, match=r"Task.source = @Phrases\(\): .*Use @Translation\(\)"):
        Task(name="x", source=Phrases(), vocab=SentencePiece(), length=8)
    with pytest.raises(UserError, match=r"Translation.source = .*legal: .*@Phrases\(\)"):
        translation(source=Docstrings())


def test_a_task_names_the_arrays_of_its_batches(tmp_path):
    source = Phrases(train=60, held_out=2)
    task = translation(source=source, vocab=SentencePiece(size=400), length=90, source_length=80)
    batch = prepare(task, tmp_path).splits["train"].batch(np.arange(3))
    assert {name: array.shape for name, array in batch.items()} == {
        name: (3, length) for name, length in task.array_lengths.items()
    }
    text = Task(name="x", source=Docstrings(), vocab=SentencePiece(), length=8)
    assert set(text.array_lengths) == {name for name in batch if name.endswith("_BL")}


@pytest.mark.parametrize("file", sorted(TASKS.glob("*.gin")), ids=lambda file: file.stem)
def test_every_task_file_makes_a_task_of_its_name(file):
    config = load([str(file)], NEEDED.get(file.stem, ()))
    assert task_of(config).name == file.stem
    assert config.unused(type(task_of(config))) == tuple(
        binding for binding in config.bound.values() if binding.name == "Run.task"
    )


@pytest.fixture
def documents(tmp_path):
    """Texts of two lines, and a tokenizer of bytes with ids of its own."""
    (tmp_path / "a.txt").write_text("".join(f"number {i}\nof many\n\n" for i in range(40)))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return TextFiles(train=f"{tmp_path}/a.txt", example="paragraph", validation_fraction=0.2)


def test_a_vocab_from_elsewhere_begins_and_ends_each_example(documents, tmp_path):
    vocab = TokenizerJson(path=str(tmp_path), begin="<s>", end="</s>")
    task = Task(name="x", source=documents, vocab=vocab, length=30)
    for _ in range(2):  # built, then opened
        prepared = prepare(task, tmp_path / "data")
        row = prepared.splits["train"].batch(np.array([0]))
        inputs, targets = (
            row[name][row["segments_BL"] == 1] for name in ("inputs_BL", "targets_BL")
        )
        assert (
            (inputs[0], targets[-1])
            == (prepared.vocabs.target.begin_id, prepared.vocabs.target.end_id)
            == (256, 257)
        )
        assert prepared.vocabs.target.decode(targets) == "number 0\nof many"


def test_another_tokenizer_file_is_another_cache(documents, tmp_path, log_lines):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    task = Task(name="x", source=documents, vocab=TokenizerJson(path=str(tmp_path)), length=30)
    prepare(task, tmp_path / "data")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    assert prepare(task, tmp_path / "data").vocabs.target.end_id == 258
    assert any("because vocab was " in line for line in log_lines)


def test_a_trained_vocab_keeps_newlines_and_one_that_does_not_is_named(documents, tmp_path, caplog):
    def vocab_of(source, name):
        task = Task(name=name, source=source, vocab=SentencePiece(size=300), length=30)
        return prepare(task, tmp_path / "data").vocabs.target

    vocab = vocab_of(documents, "paragraphs")
    [ids] = vocab.encode(["many\nnumber"])
    assert vocab.pieces(ids).count("\n") == 1
    assert "newlines" not in caplog.text
    lossy = make(SentencePiece(size=30, byte_fallback=False), iter(["number of many"] * 9))
    prepare(
        Task(name="lossy", source=documents, vocab=SentencePiece(), length=30),
        tmp_path / "data", vocabs=Vocabs(lossy, None),
    )  # fmt: skip
    assert "lossy: its examples have newlines, which its vocab does not keep" in caplog.text
