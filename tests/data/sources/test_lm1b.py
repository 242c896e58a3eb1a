"""LM1B: its own archive, and the folder that it unpacks to."""

import io
import tarfile
import tempfile

import pytest

from configs.errors import RunError, UserError
from data.manifest import text_hash
from data.sources.lm1b import TOP, Lm1b
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece

TRAIN = [f"training-monolingual.tokenized.shuffled/news.en-{i:05d}-of-00100" for i in range(1, 100)]
HELD_OUT = [
    f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{i:05d}-of-00050" for i in range(50)
]
BYTES = SentencePiece(size=300)


def text_of(name):
    return f"{name} one\n\nnaïve two\n".encode()


def written(path, names, texts=text_of):
    with tarfile.open(path, f"w:{path.suffix[1:]}" if path.suffix != ".tar" else "w") as tar:
        tar.addfile(tarfile.TarInfo(f"{TOP}/README"))
        for name in names:
            member = tarfile.TarInfo(f"./{TOP}/{name}")
            member.size = len(texts(name))
            tar.addfile(member, io.BytesIO(texts(name)))
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm1b") / f"{TOP}.tar.gz"
    return written(path, [*HELD_OUT[::-1], *TRAIN])


@pytest.fixture(scope="module")
def folder(archive):
    with tarfile.open(archive) as tar:
        for member in tar:
            target = archive.parent / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(tar.extractfile(member).read())
    return archive.parent / TOP


def lines_of(names):
    return [line for name in names for line in (f"{name} one", "naïve two")]


@pytest.mark.parametrize("kind", ["archive", "folder"])
def test_the_splits_are_the_shards_of_published_numbers(request, kind):
    source = Lm1b(archive=str(request.getfixturevalue(kind)))
    assert list(source.lines("train")) == lines_of(TRAIN)
    assert list(source.lines("validation")) == lines_of([HELD_OUT[1]])
    assert list(source.lines("test")) == lines_of([HELD_OUT[0]])
    assert source.splits() == ("train", "validation", "test")
    assert not source.has_newlines
    assert source.fingerprint() == source.fingerprint() != Lm1b(archive="x").fingerprint()


def test_an_archive_in_any_order_gives_what_its_folder_gives(archive, folder, tmp_path):
    names = [*TRAIN[50:], *HELD_OUT, *TRAIN[:50][::-1]]
    shuffled = Lm1b(archive=str(written(tmp_path / "shuffled.tar.gz", names)))
    assert list(shuffled.lines("train")) == lines_of(TRAIN)
    tasks = [
        Task(name="lm1b", source=Lm1b(archive=str(path)), vocab=BYTES, length=64)
        for path in (archive, folder, tmp_path / "shuffled.tar.gz")
    ]
    assert len({text_hash(task) for task in tasks}) == 1


def test_an_archive_of_the_home_folder_has_a_fingerprint(archive, monkeypatch):
    monkeypatch.setenv("HOME", str(archive.parent))
    source, same = Lm1b(archive=f"~/{archive.name}"), Lm1b(archive=str(archive))
    assert source.fingerprint() == same.fingerprint() is not None
    assert next(source.lines("test")) == next(same.lines("test"))


def test_a_cache_in_the_order_of_an_archive_is_of_another_text(archive, folder):
    of_archive, of_folder = (Lm1b(archive=str(path)).fingerprint() for path in (archive, folder))
    assert of_archive["order of shards"] == "by number"
    assert [*of_folder] == ["archive"]  # whose order has always been this


def test_other_shards_can_be_chosen(folder):
    source = Lm1b(archive=str(folder), validation=(49, 3), test=())
    assert list(source.lines("validation")) == lines_of([HELD_OUT[3], HELD_OUT[49]])
    assert source.splits() == ("train", "validation")
    with pytest.raises(UserError, match=r"Lm1b\.test.* = .*50.*below 50"):
        Lm1b(test=(50,))


def test_missing_shards_are_counted_and_named(tmp_path):
    path = written(tmp_path / "a.tar", [*TRAIN[:40], *TRAIN[42:]])
    with pytest.raises(UserError, match=r"2 of 99 shards are missing, such as .*news.en-00041-of"):
        list(Lm1b(archive=str(path)).lines("train"))
    with pytest.raises(UserError, match=r"1 of 1 shards are missing, such as .*heldout-00000-of"):
        list(Lm1b(archive=str(tmp_path)).lines("test"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[: len(b) // 2], r"(cannot be read to its end|is not a whole tar archive)"),
        (lambda b: b"no archive", r"cannot be read to its end"),
        (lambda b: b"", r"is not a whole tar archive"),
    ],
)
def test_a_damaged_archive_is_named(archive, tmp_path, damage, message):
    path = tmp_path / archive.name
    path.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(UserError, match=rf"r13output\.tar\.gz.*{message}"):
        list(Lm1b(archive=str(path)).lines("train"))


def test_an_archive_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"r13output\.tar\.gz': there is no such file"):
        list(Lm1b(archive=f"{tmp_path}/{TOP}.tar.gz").lines("train"))


def test_a_full_temporary_disk_is_no_damaged_archive(tmp_path, monkeypatch):
    path = written(tmp_path / "a.tar", TRAIN[::-1])
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: io.FileIO("/dev/full", "r+"))
    with pytest.raises(RunError, match=r"the disk is full.*set TMPDIR to another folder"):
        list(Lm1b(archive=str(path)).lines("train"))


def test_text_that_is_not_utf8_is_placed(tmp_path):
    path = written(tmp_path / "a.tar", HELD_OUT[:1], lambda _: b"fine\n\xff\n")
    with pytest.raises(UserError, match=r"a\.tar, .*heldout-00000-of-00050, line 2: byte 1 is 0xf"):
        list(Lm1b(archive=str(path)).lines("test"))


def test_a_shard_that_is_there_twice_is_refused(tmp_path):
    for place in ("one", "two"):
        shard = tmp_path / place / TRAIN[0]
        shard.parent.mkdir(parents=True)
        shard.write_bytes(text_of(place))
    with pytest.raises(UserError, match=f"shard {TRAIN[0]} is in it twice"):
        list(Lm1b(archive=str(tmp_path)).lines("train"))
