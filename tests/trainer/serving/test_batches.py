"""Which shapes of batches a server of translations compiles."""

from trainer.decoding.requests import DecodeOptions
from trainer.serving.batches import batch_shapes


def test_longer_sources_have_shapes_of_their_own() -> None:
    shapes = batch_shapes(8, 40, 0, DecodeOptions(), 1000)
    assert [shape[1:] for shape in shapes] == [(16, 0, 64), (32, 0, 64), (64, 0, 128)]
    assert all(shape[0] == 8 for shape in shapes)


def test_no_translation_is_longer_than_the_room() -> None:
    shapes = batch_shapes(8, 40, 5, DecodeOptions(), 30)
    assert [shape[1:] for shape in shapes] == [(16, 16, 32), (32, 16, 32), (64, 16, 32)]
