"""The parts of a model, named in one way."""

import dataclasses

from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.norms import RmsNorm
from models.parts import Block
from models.positions.absolute import NoPositions
from models.positions.rotary import Rotary
from tests.toys import TOY
from trainer.checkpoints.huggingface.parts import of_kind, shortest_repeat, with_shortest_pattern

WINDOW, GATED = MultiHead(window=4), Mlp(gated=True)
ONE_KIND = (Block(),)  # the pattern of a model whose layers have the parts of the Transformer
FLAT = dataclasses.replace(TOY, attention=WINDOW, feed_forward=GATED)


def test_the_only_block_names_parts_of_the_model() -> None:
    block = Block(attention=WINDOW, feed_forward=GATED, norm=TOY.norm)
    assert with_shortest_pattern(dataclasses.replace(TOY, pattern=(block,))) == FLAT
    assert with_shortest_pattern(FLAT) == FLAT and FLAT.pattern == ONE_KIND


def test_a_norm_of_its_own_stays_in_the_block() -> None:
    """The Transformer's is also that at the end of a stack."""
    block = Block(norm=RmsNorm(offset=True))
    other = dataclasses.replace(TOY, pattern=(block,))
    assert with_shortest_pattern(other) == other


def test_the_transformer_names_the_parts_of_the_first_block() -> None:
    mixed = dataclasses.replace(
        TOY, layers=4, pattern=(Block(attention=WINDOW, positions=Rotary()), Block()) * 2,
        positions=NoPositions(),
    )  # fmt: skip
    other = Block(attention=TOY.attention, positions=NoPositions())
    same = dataclasses.replace(
        mixed, attention=WINDOW, positions=Rotary(), pattern=(Block(), other)
    )
    assert with_shortest_pattern(mixed) == same and same.blocks * 2 == mixed.blocks
    assert with_shortest_pattern(same) == same


def test_what_no_pattern_repeats_comes_first() -> None:
    experts = Moe(experts=4)
    blocks = (Block(), Block(feed_forward=experts), Block(feed_forward=experts))
    mixed = dataclasses.replace(TOY, layers=3, pattern=blocks)
    short = with_shortest_pattern(mixed)
    assert short.first_blocks == (Block(feed_forward=TOY.feed_forward),)
    assert short.feed_forward == experts and short.pattern == ONE_KIND
    assert short.blocks_by_layer == mixed.blocks and with_shortest_pattern(short) == short


def test_first_blocks_of_a_model_with_an_encoder_stay() -> None:
    """The pattern is the encoder's, too."""
    gated = Block(feed_forward=GATED)
    spec = dataclasses.replace(
        TOY, layers=3, encoder_layers=2, first_blocks=ONE_KIND, pattern=(Block(), gated)
    )
    assert with_shortest_pattern(spec) == spec


def test_positions_of_the_whole_model_stay_where_they_are() -> None:
    learned = dataclasses.replace(TOY, pattern=(Block(positions=Rotary()),))
    assert with_shortest_pattern(learned) == learned


def test_two_patterns_stay_as_they_are() -> None:
    encoding = dataclasses.replace(
        TOY, encoder_layers=2, pattern=(Block(feed_forward=GATED),), encoder_pattern=ONE_KIND
    )
    assert with_shortest_pattern(encoding) == encoding


def test_the_pattern_of_both_stacks_is_one() -> None:
    encoding = dataclasses.replace(TOY, encoder_layers=2, encoder_pattern=ONE_KIND)
    assert with_shortest_pattern(encoding).encoder_pattern is None


def test_a_part_of_another_kind_counts_as_the_plain_one() -> None:
    assert of_kind(GATED, Mlp) == GATED and of_kind(GATED, MultiHead) == MultiHead()


def test_layers_repeat_a_pattern_after_the_first_ones() -> None:
    kinds = ("dddmmmm", "lglglg", "llllgllllgllllgll")
    assert [shortest_repeat(each) for each in kinds] == [(3, 1), (0, 2), (2, 5)]
