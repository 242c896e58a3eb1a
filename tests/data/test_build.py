"""Building: the same bytes by any number of processes and after any kill."""

import dataclasses
import gzip
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data import build
from data.build import BUILD_LOG, BuildLog
from data.cache import prepare
from data.packing.rows import Counts
from data.sources.mixing import TextMixture
from data.sources.pair_kinds import Mixture, Tsv
from data.sources.tables import TableText
from data.sources.text import TextFiles
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece

LINES = 900
CHUNK = 70


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(0)
    path.write_text(
        "".join(f"row {i} has {'words ' * words.randrange(9)}here\n" for i in range(LINES))
    )
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_CHUNK_EXAMPLES", CHUNK)


def task_of(text: Path | str) -> Task:
    source = TextFiles(train=str(text), validation_fraction=0.1)
    return Task(name="mine", source=source, vocab=SentencePiece(size=290), length=24)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_CHUNK_EXAMPLES", CHUNK)
        return contents(prepare(task_of(text), tmp_path_factory.mktemp("data")).folder)


def test_any_number_of_workers_gives_the_same_bytes(
    text: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    assert contents(prepare(task_of(text), tmp_path, worker_count=3).folder) == expected


def test_the_parts_of_a_mixture_are_chunked_apart(tmp_path: Path) -> None:
    for name, lines in (("a", 200), ("b", 30)):
        pairs = (f"{name} source {i}\t{name} target {i}\n" for i in range(lines))
        (tmp_path / name).write_text("".join(pairs))
    parts = [Tsv(train=str(tmp_path / name), validation_fraction=0.1) for name in "ab"]
    task = Translation(
        name="pair", source=Mixture(parts=parts), vocab=SentencePiece(size=300), length=48,
        source_length=40,
    )  # fmt: skip
    one, two = (prepare(task, tmp_path / str(n), worker_count=n) for n in (1, 2))
    assert contents(one.folder) == contents(two.folder)
    train = one.splits["train"]
    assert [part.name for part in train.parts] == ["Tsv_1", "Tsv_2"]
    assert sum(part.counts.lines for part in train.parts) == train.counts.lines > 180
    assert one.manifest["splits"]["train"]["chunks"] == 3


def test_a_text_of_several_chunks_has_another_hash(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions packed it as one chunk: their runs must not go on with these rows."""
    text = tmp_path / shutil.copy(text, tmp_path)
    several = prepare(task_of(text), tmp_path / "several").manifest
    monkeypatch.setattr(build, "_CHUNK_EXAMPLES", LINES)
    one = prepare(task_of(text), tmp_path / "one").manifest
    assert one["content_hash"] == one["text_hash"] == several["text_hash"]
    assert several["content_hash"] != several["text_hash"]
    os.utime(text, (1, 1))
    assert (
        prepare(task_of(text), tmp_path / "several").manifest["content_hash"]
        == (several["content_hash"])
    )


@pytest.mark.parametrize("ending", [".txt", ".txt.gz", ".txt.xz", ".txt.zst"])
@pytest.mark.parametrize("worker_count", [1, 2])
def test_progress_is_a_share_of_the_files(
    text: Path, tmp_path: Path, ending: str, worker_count: int
) -> None:
    for number in range(3):
        raw = f"file {number}\n".encode() + text.read_bytes()
        packed = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
        path = tmp_path / f"{number}{ending}"
        path.write_bytes(packed.get(path.suffix, bytes)(raw))
    shares: dict[str, list[float]] = {"train": [], "validation": []}

    def on_progress(split: str, _: Counts, share: float | None) -> None:
        assert share is not None
        shares[split].append(share)

    task = task_of(tmp_path / f"*{ending}")
    prepare(task, tmp_path / "data", worker_count=worker_count, on_progress=on_progress)
    for of_split in shares.values():
        assert of_split == sorted(of_split) and of_split[-1] == 1.0
    first, *_ = shares["train"]
    assert 0 < first < 0.34 and len(set(shares["train"])) >= 3  # three files of equal size


def test_progress_is_a_share_of_all_parts(text: Path, tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"other": ["x" * 99] * LINES, "text": text.read_text().splitlines()}),
        tmp_path / "text.parquet",
    )
    parts = (TextFiles(train=str(text)), TableText(train=str(tmp_path / "text.parquet")))
    source = TextMixture(parts=parts)
    shares: list[float | None] = []
    prepare(
        dataclasses.replace(task_of(text), source=source),
        tmp_path / "data",
        on_progress=lambda split, _, share: shares.append(share) if split == "train" else None,
    )
    known = [share for share in shares if share is not None]
    assert known == shares == sorted(known) and 0.99 < known[-1] <= 1.0


KILLED = """
import sys
from data import build
from data.cache import prepare
from tests.data.test_build import CHUNK, task_of
build._CHUNK_EXAMPLES = CHUNK
if __name__ == "__main__":
    import time
    pack = build.SplitBuilder._report
    def slow(*arguments):
        time.sleep(0.05)
        pack(*arguments)
    build.SplitBuilder._report = slow
    prepare(task_of(sys.argv[1]), sys.argv[2], worker_count=2)
"""


def test_a_killed_build_goes_on(
    text: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, script = Path(__file__).parents[2], tmp_path / "script.py"
    script.write_text(KILLED)
    log = tmp_path / f"data/.mine.building/{BUILD_LOG}"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(text), str(tmp_path / "data")], env=environment
    )
    until = time.monotonic() + 60
    while not log.exists() or log.read_text().count('"chunk"') < 5:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "data/mine").exists()
    done = log.read_text().count('"chunk"')
    with log.open("a") as file:
        file.write('{"chunk": {"spl')  # as a kill may leave it
    (tmp_path / "data/.mine.building-old-x").mkdir()

    packed = []
    start = build.packing

    def counting(*settings):  # type: ignore[no-untyped-def]
        pack = start(*settings)
        return lambda *job: packed.append(len(job[0])) or pack(*job)

    monkeypatch.setattr(build, "packing", counting)
    folder = prepare(task_of(text), tmp_path / "data").folder
    assert contents(folder) == expected
    assert {path.name for path in folder.parent.iterdir()} == {"mine", ".mine.lock"}
    assert 0 < len(packed) <= -(-LINES // CHUNK) + 2 - done


def test_rows_of_another_vocab_are_forgotten(tmp_path: Path) -> None:
    log = BuildLog(tmp_path, "key")
    for hashes in ({"vocab_hash": "a"}, {"vocab_hash": "b"}):
        log.add(vocabs=hashes)
        assert {*log.splits} == {*BuildLog(tmp_path, "key").splits} == set()
        log.add(split="train", entry={})
        log = BuildLog(tmp_path, "key")
        log.add(vocabs=hashes)
        assert {*log.splits} == {"train"}


@pytest.mark.parametrize("damage", ["rows", "missing", "text"])
def test_what_is_damaged_of_a_killed_build_is_built_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str,
    expected: dict[str, bytes],
) -> None:  # fmt: skip
    copy = tmp_path / "text.txt"
    copy.write_bytes(text.read_bytes())
    write = build.manifest.write
    monkeypatch.setattr(build.manifest, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(task_of(copy), tmp_path)
    monkeypatch.setattr(build.manifest, "write", write)
    folder = tmp_path / ".mine.building"
    log = (folder / BUILD_LOG).read_text().splitlines(keepends=True)
    (folder / BUILD_LOG).write_text("".join(line for line in log if '"entry"' not in line))
    if damage == "rows":
        rows = bytearray((folder / "train.targets.npy").read_bytes())
        rows[len(rows) // 2] ^= 1
        (folder / "train.targets.npy").write_bytes(rows)
    elif damage == "missing":
        (folder / "train.segments.npy").unlink()
    else:
        copy.write_text(copy.read_text().replace("here", "there"))
    rebuilt = contents(prepare(task_of(copy), tmp_path).folder)
    same = {name for name in expected if rebuilt[name] == expected[name]}
    if damage == "text":
        assert "train.targets.npy" not in same
    else:
        assert same == {*expected} - {"manifest.json"}  # which names the file


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
