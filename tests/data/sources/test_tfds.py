"""TFDS: its own lm1b builder, without TensorFlow, on a small archive in LM1B's layout."""

import hashlib
import io
import sys
import tarfile

import numpy as np
import pytest
import tensorflow_datasets as tfds

from configs.errors import UserError
from data.cache import prepare
from data.sources.tfds import Tfds
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece

TOP = "1-billion-word-language-modeling-benchmark-r13output"
TRAIN = [f"The market moved by {i} points on Monday ." for i in range(90)]
HELD_OUT = [f"Nobody saw {i} of them coming , he said ." for i in range(40)]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A folder with the archive, as a user without network would have put it there."""
    folder = tmp_path_factory.mktemp("archives")
    with tarfile.open(folder / f"{TOP}.tar.gz", "w:gz") as tar:
        for i in range(3):
            name = f"training-monolingual.tokenized.shuffled/news.en-{i + 1:05d}-of-00100"
            _add(tar, name, TRAIN[i * 30 : (i + 1) * 30])
        for i in range(2):
            name = f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{i:05d}-of-00050"
            _add(tar, name, HELD_OUT[i * 20 : (i + 1) * 20])
    return folder


@pytest.fixture(scope="module")
def lm1b(archives, tmp_path_factory):
    """The source, its data set made by the real builder; only the archive's checksum is ours."""
    from tensorflow_datasets.core.download.checksums import UrlInfo

    archive = (archives / f"{TOP}.tar.gz").read_bytes()
    folder = tmp_path_factory.mktemp("tfds")
    builder = tfds.builder_cls("lm1b")
    [url] = builder(data_dir=folder).url_infos
    checksum = hashlib.sha256(archive).hexdigest()
    source = Tfds(
        name="lm1b", validation="test[:50%]", test="test[50%:]",
        folder=str(folder), archives=str(archives),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "url_infos", {url: UrlInfo(len(archive), checksum, f"{TOP}.tar.gz")})
        list(source.lines("train"))
    return source


def test_the_real_builder_gives_every_line_without_tensorflow(lm1b):
    assert sorted(lm1b.lines("train")) == sorted(TRAIN)
    held_out = list(lm1b.lines("validation")) + list(lm1b.lines("test"))
    assert sorted(held_out) == sorted(HELD_OUT)
    assert list(lm1b.lines("train")) == list(lm1b.lines("train"))
    assert "tensorflow" not in sys.modules


def test_it_becomes_a_cache(lm1b, tmp_path, log_lines):
    task = Task(name="lm1b", source=lm1b, vocab=SentencePiece(size=310), length=32)
    prepared = prepare(task, tmp_path)
    assert {name: rows.counts.lines for name, rows in prepared.splits.items()} == {
        "train": 90, "validation": 20, "test": 20,
    }  # fmt: skip
    assert prepared.manifest["fingerprint"]["name"] == "lm1b/1.1.0"
    log_lines.clear()
    prepare(task, tmp_path)
    assert log_lines == []


def test_an_unmade_data_set_has_no_fingerprint(tmp_path):
    assert Tfds(name="lm1b", folder=str(tmp_path)).fingerprint() is None


def test_a_wrong_archive_is_refused_and_the_remedy_named(archives, tmp_path):
    source = Tfds(name="lm1b", folder=str(tmp_path), archives=str(archives))
    with pytest.raises(UserError, match=rf"wrong checksum.*copy its archives \({TOP}\.tar\.gz\)"):
        list(source.lines("train"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "kaggle:lm1b"}, r"Tfds.name = 'kaggle:lm1b': a community dataset, whose code"),
        ({"name": "lm1bb"}, r"Tfds.name = 'lm1bb': TFDS has no such dataset"),
        ({"feature": "txt"}, r"Tfds.feature = 'txt': .*Its features: text\."),
        ({"train": "dev"}, r"Tfds: split 'dev' of lm1b: .*Its splits: train, test\."),
    ],
)
def test_errors_list_the_legal_names(lm1b, change, message):
    settings = {"name": "lm1b", "folder": lm1b.folder, **change}
    with pytest.raises(UserError, match=message):
        list(Tfds(**settings).lines("train"))


class MeshloomToy(tfds.core.GeneratorBasedBuilder):
    """Makes a record of a text that is not UTF-8, and of a label."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"text": tfds.features.Text(), "label": np.int64}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"text": b"na\xefve", "label": 3}


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ("label", r"found int, legal: text"),
        ("text", r"split 'train', record 1: byte 3 is 0xef, not UTF-8"),
    ],
)
def test_a_feature_that_is_no_text_is_named(tmp_path, feature, message):
    source = Tfds(name="meshloom_toy", folder=str(tmp_path), feature=feature)
    with pytest.raises(UserError, match=rf"Tfds.feature = '{feature}': meshloom_toy, .*{message}"):
        list(source.lines("train"))


def _add(tar, name, lines):
    text = "".join(f"{line}\n" for line in lines).encode()
    member = tarfile.TarInfo(f"{TOP}/{name}")
    member.size = len(text)
    tar.addfile(member, io.BytesIO(text))
