"""A task of images: from text to cached rows, labels as ids, and what users get wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from data.cache import prepare
from data.sources.pair_kinds import Tsv
from data.sources.pairs import Pair
from data.tokenizers.labels import Labels, LabelVocab
from data.vocabs import Vocabs, load_vocab
from tests.toys import example

glyphs, image_task = example("glyphs"), example("image_task")
ImageTask: Any = image_task.ImageTask
LINES = [
    "P2 3 2 255 0 1 2 3 4 255\tdog",
    "P2 3 2 255 9 9 9 9 9 9\tcat",
    "P2 3 2 255 1 0 0 0 0 0\tcat",
]


@pytest.fixture
def task(tmp_path: Path) -> Any:
    path = tmp_path / "images.tsv"
    path.write_text("".join(line + "\n" for line in LINES))
    source = Tsv(train=str(path), validation=str(path))
    return ImageTask(name="pets", source=source, height=2, width=3)


def test_cached_rows_are_the_images_and_labels_of_the_files(task: Any, tmp_path: Path) -> None:
    prepared = prepare(task, tmp_path / "data")
    rows = prepared.splits["train"]
    batch = rows.batch(np.array([0, 2, -1]))
    assert {name: array.shape[1:] for name, array in batch.items()} == task.array_shapes
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(batch["images_BYXZ"][0, :, :, 0], [[0, 1, 2], [3, 4, 255]])
    assert batch["targets_BL"][:2].ravel().tolist() == [1, 0] and not batch["images_BYXZ"][2].any()
    assert batch["segments_BL"].ravel().tolist() == [1, 1, 0]
    assert rows.counts.tokens == len(LINES) and "3 images of 2 x 3" in task.summary(rows.counts)
    in_memory, labels = task.pack_lines(LINES, prepared.vocabs, None)
    assert labels == ["dog", "cat", "cat"]
    for name, array in in_memory.batch(np.array([0, 2, -1])).items():
        np.testing.assert_array_equal(batch[name], array)
    vocab = load_vocab(prepared.folder / "vocab.model")
    assert isinstance(vocab, LabelVocab) and vocab.labels == ["cat", "dog"]
    assert vocab.decode([1]) == "dog" and vocab.pieces([0, 7]) == ["cat", "?"]


def test_colours_are_written_and_read_alike() -> None:
    pixels_YXZ = np.random.default_rng(0).integers(0, 256, (2, 5, 3)).astype(np.uint8)
    text = image_task.image_text(pixels_YXZ)
    assert text.startswith("P3 5 2 255 ")
    np.testing.assert_array_equal(image_task.image_of(text.replace(" ", "\n\t", 9)), pixels_YXZ)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("cat.png", "is not an image.  Legal: plain PGM or PPM"),
        ("P5 2 1 255 0 0", "is not an image"),
        ("P2 2 1 255 0", "is not an image"),
        ("P2 2 1 255 0 0 0", "is not an image"),
        ("P2 -1 -2 255 0 0", "is not an image"),
        ("P2 -1 1 255 0 128", "is not an image"),
        ("P2 2 1 255 0 x", "is not an image"),
        ("P2 2 1 255 0 256", "numbers from 0 to 255"),
        ("P2 2 1 15 0 1", "numbers from 0 to 255"),
        ("P2 3 1 255 0 0 0", "found height 1, width 3, channels 1.  Legal: height 2, width 3"),
    ],
)
def test_what_is_no_image_of_the_task_is_an_error(task: Any, text: str, part: str) -> None:
    vocab = Labels().train(iter(["cat", "dog"]), ())
    with pytest.raises(UserError) as error:
        task.chunk_packer(Vocabs(vocab, None))([Pair(text, "cat")], None, False)
    assert part in str(error.value)


def test_a_label_that_training_lacks_is_an_error() -> None:
    vocab = Labels().train(iter(["cat", "dog"]), ())
    with pytest.raises(UserError, match=r"label 'dot'.*Did you mean dog\?  Legal: cat, dog"):
        vocab.encode(["dot"])


def test_a_source_with_tags_is_refused() -> None:
    with pytest.raises(UserError, match=r"ImageTask.source: its tags \(de\)"):
        ImageTask(name="t", source=Tsv(train="x", tag="de"), height=2, width=3)


def test_whole_labels_are_not_held_out_of_training() -> None:
    with pytest.raises(UserError, match=r"@Tsv\(\) has no files of validation"):
        ImageTask(name="t", source=Tsv(train="x"), height=2, width=3)


def test_glyphs_are_the_same_each_time_and_whole() -> None:
    source = glyphs.Glyphs(side=24, count=1)
    first, again = (list(source.read("validation")) for _ in range(2))
    assert first == again and len(first) == len(glyphs.FONTS["validation"]) * 36
    images = [image_task.image_of(pair.source) for pair in first]
    assert {image.shape for image in images} == {(24, 24, 1)}
    assert min(image.max() for image in images) > 100  # there is ink in each
    assert len({pair.source for pair in first}) == len(first)


@pytest.mark.parametrize("side", [16, 48])
def test_glyphs_fill_an_image_of_any_size(side: int) -> None:
    drawn = [glyphs.image("DejaVuSans", "W", side, np.random.default_rng(i)) for i in range(9)]
    for pixels in drawn:
        rows, columns = np.nonzero(pixels)
        assert side / 4 < np.ptp(rows) < side and side / 4 < np.ptp(columns) < side


def test_no_face_is_in_two_splits() -> None:
    faces = [face for split in glyphs.FONTS.values() for face in split]
    assert len(faces) == len(set(faces)) == 21
