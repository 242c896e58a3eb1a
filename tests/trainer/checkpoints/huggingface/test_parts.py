"""The parts of a model, named in one way."""

import dataclasses

from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.norms.rms import RmsNorm
from models.parts import Block
from models.positions.none import NoPositions
from models.positions.rotary import Rotary
from tests.toys import TOY
from trainer.checkpoints.huggingface.parts import of_kind, with_parts_of_first_block

WINDOW, GATED = MultiHead(window=4), Mlp(gated=True)
ONE_KIND = (Block(),)  # the pattern of a model whose layers have the parts of the Transformer
FLAT = dataclasses.replace(TOY, attention=WINDOW, feed_forward=GATED)


def test_the_only_block_names_parts_of_the_model() -> None:
    block = Block(attention=WINDOW, feed_forward=GATED, norm=TOY.norm)
    assert with_parts_of_first_block(dataclasses.replace(TOY, pattern=(block,))) == FLAT
    assert with_parts_of_first_block(FLAT) == FLAT and FLAT.pattern == ONE_KIND


def test_a_norm_of_its_own_stays_in_the_block() -> None:
    """The Transformer's is also that at the end of a stack."""
    block = Block(norm=RmsNorm(offset=True))
    other = dataclasses.replace(TOY, pattern=(block,))
    assert with_parts_of_first_block(other) == other


def test_the_transformer_names_the_parts_of_the_first_block() -> None:
    mixed = dataclasses.replace(
        TOY, layers=4, pattern=(Block(attention=WINDOW, positions=Rotary()), Block()) * 2,
        positions=NoPositions(),
    )  # fmt: skip
    other = Block(attention=TOY.attention, positions=NoPositions())
    same = dataclasses.replace(
        mixed, attention=WINDOW, positions=Rotary(), pattern=(Block(), other)
    )
    assert with_parts_of_first_block(mixed) == same and same.blocks * 2 == mixed.blocks
    assert with_parts_of_first_block(same) == same


def test_positions_of_the_whole_model_stay_where_they_are() -> None:
    learned = dataclasses.replace(TOY, pattern=(Block(positions=Rotary()),))
    assert with_parts_of_first_block(learned) == learned


def test_two_patterns_stay_as_they_are() -> None:
    encoding = dataclasses.replace(
        TOY, encoder_layers=2, pattern=(Block(feed_forward=GATED),), encoder_pattern=ONE_KIND
    )
    assert with_parts_of_first_block(encoding) == encoding


def test_the_pattern_of_both_stacks_is_one() -> None:
    encoding = dataclasses.replace(TOY, encoder_layers=2, encoder_pattern=ONE_KIND)
    assert with_parts_of_first_block(encoding).encoder_pattern is None


def test_a_part_of_another_kind_counts_as_the_plain_one() -> None:
    assert of_kind(GATED, Mlp) == GATED and of_kind(GATED, MultiHead) == MultiHead()
