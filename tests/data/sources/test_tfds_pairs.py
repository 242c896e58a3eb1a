"""TFDS: its own WMT builders, without TensorFlow, on small archives in WMT's layout."""

import gzip
import hashlib
import io
import sys
import tarfile

import pytest
import tensorflow_datasets as tfds

from configs.errors import UserError
from data.cache import prepare
from data.sources.tfds import TfdsPairs
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from tests.data.conftest import pairs_of

STATMT = "http://www.statmt.org"
SGM = '<srcset setid="newstest2014" srclang="any">\n<seg id="1">{}</seg>\n<seg id="2">{}</seg>\n'


def text(start, language):
    return "".join(f"Satz {i} in {language} .\n" for i in range(start, start + 20))


def commoncrawl(x):
    return {f"commoncrawl.{x}-en.{y}": text(0, y) for y in (x, "en")}


def europarl(x):
    return {f"training/europarl-v7.{x}-en.{y}": text(20, y) for y in (x, "en")}


def dev(x):
    sides = (("src", x), ("ref", "en"))
    sgm = {f"dev/newstest2014-{x}en-{side}.{y}.sgm": SGM.format(f"{y} 1", f"{y} 2")
           for side, y in sides}  # fmt: skip
    return {**{f"dev/newstest2013.{y}": f"{y} three\n{y} four\n" for y in (x, "en")}, **sgm}


WMT13 = f"{STATMT}/wmt13/training-parallel"
SHARED = {
    f"{WMT13}-commoncrawl.tgz": commoncrawl,
    f"{WMT13}-europarl-v7.tgz": europarl,
    "http://data.statmt.org/wmt19/translation-task/dev.tgz": dev,
}
NEWS_9 = {f"{STATMT}/wmt14/training-parallel-nc-v9.tgz": lambda x: {
    f"training/news-commentary-v9.{x}-en.{y}": text(40, y) for y in (x, "en")
}}  # fmt: skip
NEWS_13 = {
    "http://data.statmt.org/wmt18/translation-task/training-parallel-nc-v13.tgz": lambda x: {
        f"training-parallel-nc-v13/news-commentary-v13.{x}-en.{y}": text(40, y) for y in (x, "en")
    }
}
FRENCH = {
    f"{WMT13}-un.tgz": lambda x: {f"un/undoc.2000.{x}-en.{y}": text(60, y) for y in (x, "en")},
    f"{STATMT}/wmt10/training-giga-fren.tar": lambda x: {
        f"giga-fren.release2.fixed.{y}.gz": gzip.compress(text(80, y).encode()) for y in (x, "en")
    },
}
DATA_SETS = {
    "wmt14_translate/de-en": SHARED | NEWS_9,
    "wmt14_translate/fr-en": SHARED | NEWS_9 | FRENCH,
    "wmt_t2t_translate/de-en": SHARED | NEWS_13,
}


@pytest.fixture(scope="module", params=DATA_SETS)
def wmt(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp("wmt"))


def build(name, folder, **makers):
    """The source, its data set made by the real builder; only the archives' checksums are ours.

    A maker in place of one of the functions above, by its name, writes other files.
    """
    from tensorflow_datasets.core.download.checksums import UrlInfo

    archives = folder / "archives"
    archives.mkdir()
    data_set, language = name.split("/")[0], name.split("/")[1][:2]
    infos = {}
    for url, made in DATA_SETS[name].items():
        path = archives / url.rpartition("/")[2]
        write_archive(path, makers.get(made.__name__, made)(language))
        raw = path.read_bytes()
        infos[url] = UrlInfo(len(raw), hashlib.sha256(raw).hexdigest(), path.name)
    source = TfdsPairs(
        name=name, source_field="en", target_field=language,
        folder=str(folder / "tfds"), archives=str(archives),
    )  # fmt: skip
    assert source.fingerprint() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfds.builder_cls(data_set), "url_infos", infos)
        list(source.read("train"))
    return source


def write_archive(path, files):
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
        for name, content in files.items():
            raw = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def test_the_real_builder_gives_every_pair_without_tensorflow(wmt):
    x = wmt.target_field
    count = 20 * (len(DATA_SETS[wmt.name]) - 1)
    expected = [(f"Satz {i} in en .", f"Satz {i} in {x} .") for i in range(count)]
    assert sorted(pairs_of(wmt, "train")) == sorted(expected)
    assert sorted(pairs_of(wmt, "validation")) == [
        ("en four", f"{x} four"),
        ("en three", f"{x} three"),
    ]
    assert sorted(pairs_of(wmt, "test")) == [("en 1", f"{x} 1"), ("en 2", f"{x} 2")]
    assert list(pairs_of(wmt, "train")) == list(pairs_of(wmt, "train"))
    assert "tensorflow" not in sys.modules


def test_it_becomes_a_cache(wmt, tmp_path, log_lines):
    task = Translation(
        name="wmt", source=wmt, vocab=SentencePiece(size=300), length=24, source_length=32
    )
    prepared = prepare(task, tmp_path)
    assert prepared.splits["test"].counts.lines == 2
    assert prepared.manifest["fingerprint"]["name"] == f"{wmt.name}/1.0.0"
    log_lines.clear()
    prepare(task, tmp_path)
    assert log_lines == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "wmt14_translat"}, r"TfdsPairs.name = 'wmt14_translat': TFDS has no such data"),
        ({"name": "wmt14_translate/de-fr"}, r"de-fr not found.*of wmt14_translate: cs-en, de-en, "),
        ({"name": "../x"}, r"TfdsPairs.name = '../x': TFDS has no such dataset"),
        ({"source_field": "fy"}, r"TfdsPairs.source_field = 'fy': .*Its features: .*en"),
        ({"train": "dev"}, r"TfdsPairs: split 'dev' of wmt.*Its splits: train, validation, test"),
    ],
)
def test_errors_list_the_legal_names(wmt, change, message):
    settings = {
        "name": wmt.name, "source_field": "en", "target_field": wmt.target_field,
        "folder": wmt.folder,
    }  # fmt: skip
    with pytest.raises(UserError, match=message):
        list(pairs_of(TfdsPairs(**(settings | change)), "train"))


def test_a_wrong_archive_is_refused_and_the_remedy_named(tmp_path):
    write_archive(tmp_path / "training-parallel-europarl-v7.tgz", europarl("de"))
    source = TfdsPairs(
        name="wmt14_translate/de-en", source_field="en", target_field="de",
        folder=str(tmp_path), archives=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"wrong checksum.*europarl-v7.*set TfdsPairs.archives to"):
        list(pairs_of(source, "train"))
