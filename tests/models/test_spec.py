"""Settings of a Transformer: what does not fit together is refused, with the legal values."""

from typing import Any

import pytest

from configs.errors import UserError
from models.moe.routing import ExpertChoice, Top2, TopK
from models.rope import LinearScaling
from models.spec import Moe
from tests.toys import toy

EXPERTS = {"pattern": ("dense", "moe"), "moe": Moe(experts=5)}
ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"heads": 8, "kv_heads": 3},
        "Transformer.heads = 8 is not a multiple of kv_heads = 3",
    ),
    "source vocabulary": ({"source_vocab": 30}, "the model has no encoder"),
    "rotary": ({"positions": "rotary", "d_kv": 5}, "rotary positions need an even width"),
    "sinusoids": ({"positions": "sinusoidal", "d_model": 9}, "sinusoids need an even width"),
    "scaled": (
        {"rope_scaling": LinearScaling(factor=2.0)},
        "rope_scaling = @LinearScaling(): found positions = 'learned'.  Legal: positions = ",
    ),
    "wavelengths": (
        {"positions": "rotary", "rope_theta": 1.0, "rope_scaling": LinearScaling(factor=2.0)},
        "rope_theta = 1.0: found @LinearScaling() as rope_scaling.  Legal: above 1.",
    ),
    "one bucket": (
        {"positions": "relative", "buckets": 1},
        "buckets = 1: relative positions need at least 2 in a decoder",
    ),
    "one bucket for each direction": (
        {"positions": "relative", "buckets": 3, "encoder_layers": 2},
        "buckets = 3: relative positions need at least 4 with an encoder",
    ),
    "no distance beyond the exact ones": (
        {"positions": "relative", "buckets": 32, "max_distance": 16},
        "max_distance = 16: 32 buckets hold the distances below 16 exactly.  Legal: max_distance "
        "of at least 17, or fewer buckets",
    ),
    "window": (
        {"sliding_window": 4, "encoder_layers": 2},
        "sliding_window = 4: found encoder_layers = 2.  Legal: windows in models without",
    ),
    "pattern": ({**EXPERTS, "layers": 5}, "Legal: layers 4 or 6, or another pattern"),
    "one layer": ({**EXPERTS, "layers": 1}, "Legal: layers 2, or another pattern"),
    "encoder's": ({**EXPERTS, "encoder_layers": 3}, "Legal: encoder_layers 2 or 4"),
    "no experts": ({"pattern": ("moe",)}, "set Transformer.moe = @Moe() and Moe.experts"),
    "no expert layer": ({"moe": Moe(experts=5)}, "no layer has experts"),
    "not causal": (
        {**EXPERTS, "moe": Moe(experts=5, router=ExpertChoice())},
        "it reads later tokens, which a decoder must not",
    ),
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


def test_an_encoder_may_have_experts_that_read_later_tokens() -> None:
    moe = Moe(experts=5, router=ExpertChoice(), group_tokens=4)
    spec = toy(encoder_layers=2, encoder_pattern=("dense", "moe"), moe=moe)
    assert spec.pattern == ("dense",) and spec.pattern_of_encoder == ("dense", "moe")
    assert spec.groups == {"inputs_BM": 4}


def test_sizes_are_by_letter_and_scales_follow_from_them() -> None:
    spec = toy(heads=6, kv_heads=2, d_model=16, d_kv=4)
    assert {letter: spec.sizes[letter] for letter in "DJQKN"} == {
        "D": 16, "J": 2, "Q": 3, "K": 4, "N": 2,
    }  # fmt: skip
    assert spec.scales == (4.0, 0.5)
    assert toy(embed_scale=1.0, query_scale=2.0).scales == (1.0, 2.0)
    assert toy(positions="learned").max_length == 8 and toy(positions="rotary").max_length is None
