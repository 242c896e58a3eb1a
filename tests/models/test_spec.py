"""Settings of a Transformer: what does not fit together is refused, with the legal values."""

from typing import Any

import pytest

from configs.errors import UserError
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2, TopK
from models.parts import Block
from models.positions.absolute import Learned, Sinusoidal
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from tests.toys import toy

EXPERTS = {"pattern": (Block(), Block(feed_forward=Moe(experts=5)))}
ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"heads": 8, "kv_heads": 3},
        "Transformer.heads = 8 is not a multiple of kv_heads = 3",
    ),
    "source vocabulary": ({"source_vocab": 30}, "the model has no encoder"),
    "rotary": ({"positions": Rotary(), "d_kv": 5}, "rotary positions need an even width"),
    "sinusoids": ({"positions": Sinusoidal(), "d_model": 9}, "sinusoids need an even width"),
    "one bucket for each direction": (
        {"positions": Relative(buckets=3), "encoder_layers": 2},
        "Relative.buckets = 3: relative positions need at least 4 with an encoder",
    ),
    "window": (
        {"attention": MultiHead(window=4), "encoder_layers": 2},
        "MultiHead.window = 4: found encoder_layers = 2.  Legal: windows in models without",
    ),
    "pattern": ({**EXPERTS, "layers": 5}, "Legal: layers 4 or 6, or another pattern"),
    "no blocks": ({"encoder_layers": 2, "encoder_pattern": ()}, "legal: at least one block"),
    "one layer": ({**EXPERTS, "layers": 1}, "Legal: layers 2, or another pattern"),
    "encoder's": ({**EXPERTS, "encoder_layers": 3}, "Legal: encoder_layers 2 or 4"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_does_not_fit_together_is_refused(case: str) -> None:
    settings, message = ILLEGAL[case]
    with pytest.raises(UserError) as error:
        toy(**settings)
    assert message in str(error.value)


def test_a_router_needs_as_many_experts_as_it_chooses() -> None:
    with pytest.raises(UserError, match=r"Moe.experts = 2: the router chooses 3 per token"):
        Moe(experts=2, router=TopK(k=3))
    assert Moe(experts=2, router=Top2()).experts == 2


def test_an_encoder_alone_may_have_experts() -> None:
    moe = Moe(experts=5, router=Top2(), group_tokens=4)
    spec = toy(encoder_layers=2, encoder_pattern=(Block(), Block(feed_forward=moe)))
    assert [block.feed_forward for block in spec.blocks] == [Mlp()]
    assert [block.feed_forward for block in spec.encoder_blocks] == [Mlp(), moe]
    assert spec.groups == {"inputs_BM": 4}


def test_sizes_are_by_letter() -> None:
    spec = toy(heads=6, kv_heads=2, d_model=16, d_kv=4)
    assert {letter: spec.sizes[letter] for letter in "DJQKN"} == {
        "D": 16, "J": 2, "Q": 3, "K": 4, "N": 2,
    }  # fmt: skip


def test_positions_bound_the_length() -> None:
    assert toy(positions=Learned()).max_length == 8 and toy(positions=Rotary()).max_length is None
