"""Tensors become weights and come back: merged heads, stacked layers and experts."""

import numpy as np
import pytest

from configs.errors import UserError
from trainer.checkpoints.huggingface.weights import (
    ConvertedWeight,
    TensorInfo,
    check_tensors,
    places_of,
)

SIZES = {"D": 5, "J": 2, "Q": 3, "K": 4, "E": 2, "F": 7, "N": 9}
QUERIES = ConvertedWeight("layers_N/wq_DJQK", ("a", "b", "c"), "JQK D", SIZES)
EXPERTS = ConvertedWeight("layers_N/wi_EDF", ("a", "b", "c", "d", "e", "f"), "F D", SIZES)


def numbered(weight: ConvertedWeight) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=weight.folded(weight.view)) for name in weight.names}


def test_heads_are_merged_in_their_order() -> None:
    tensors = numbered(QUERIES)
    weight_NDJQK = QUERIES.from_tensors_by_name(tensors.__getitem__)
    assert weight_NDJQK.shape == QUERIES.shape == (3, 5, 2, 3, 4)
    assert weight_NDJQK[1, 4, 1, 2, 3] == tensors["b"][1 * 12 + 2 * 4 + 3, 4]


def test_experts_of_a_layer_follow_one_another() -> None:
    tensors = numbered(EXPERTS)
    weight_NEDF = EXPERTS.from_tensors_by_name(tensors.__getitem__)
    assert weight_NEDF.shape == EXPERTS.shape == (3, 2, 5, 7)
    assert EXPERTS.names_by_layer[1] == ("c", "d")
    np.testing.assert_array_equal(weight_NEDF[1, 1], tensors["d"].T)


@pytest.mark.parametrize("weight", [QUERIES, EXPERTS], ids=["queries", "experts"])
def test_tensors_come_back(weight: ConvertedWeight) -> None:
    tensors = numbered(weight)
    back = dict(weight.to_tensors_by_name(weight.from_tensors_by_name(tensors.__getitem__)))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)


def test_all_that_does_not_fit_is_named_at_once() -> None:
    found = {
        "a": TensorInfo((24, 5), "float32"), "b": TensorInfo((5, 24), "float32"),
        "x": TensorInfo((3,), "float32"),
    }  # fmt: skip
    with pytest.raises(UserError) as error:
        check_tensors([QUERIES], found, "folder", "llama")
    for words in ("1 missing:\n    c", "1 unexpected:\n    x", "b: found (5, 24), legal: (24, 5)"):
        assert words in str(error.value)


def test_tensors_hold_parts_of_several_weights() -> None:
    sizes = {"D": 3, "J": 2}
    places = places_of([ConvertedWeight("w_DJ", (f"qk/1/{i}",), "D J", sizes) for i in range(2)])
    assert places["qk/1/1"].part == (slice(None), slice(2, 4))
    assert places["qk/1/0"].shape == (3, 4)
