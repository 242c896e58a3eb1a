"""Parts of mixtures: their names, rates and order."""

import pytest

from configs.errors import UserError
from data.sources.mixing import MixedSource, part_names
from data.sources.pair_kinds import Mixture, Tsv
from data.sources.text import TextFiles
from data.sources.text_mixture import TextMixture


def texts(count, **settings):
    return TextMixture(parts=(TextFiles(train="x.txt"),) * count, **settings)


def pairs(count, **settings):
    return Mixture(parts=tuple(Tsv(train=f"{i}.tsv") for i in range(count)), **settings)


MIXTURES = pytest.mark.parametrize("mixture", [texts, pairs])


def test_labels_that_are_alike_are_numbered():
    assert part_names([None, None], ["Tsv", "Jsonl"]) == ["Tsv", "Jsonl"]
    assert part_names([None, "web", None], ["Tsv", "Tsv", "Tsv"]) == ["Tsv_1", "web", "Tsv_3"]


@MIXTURES
def test_rates_are_by_size_unless_they_are_set(mixture):
    assert isinstance(mixture(2), MixedSource)
    assert mixture(2).mix([100, 300]).quotas == (1024, 3072)
    assert mixture(2, temperature=1e9).mix([100, 300]).quotas == (2048, 2048)
    assert mixture(2, rates=(3, 1)).mix([100, 300]).quotas == (3072, 1024)


def test_names_that_make_no_sense_are_described():
    parts = [Tsv(train=f"{name}.tsv", name=name) for name in "aba"]
    assert Mixture(parts=parts[:2])
    with pytest.raises(UserError) as error:
        Mixture(parts=parts)
    assert "Mixture.parts: several of 'train' have the name a." in str(error.value)


@MIXTURES
def test_rates_that_make_no_sense_are_described(mixture):
    assert mixture(2, rates=(1, 2)) and mixture(2, temperature=2)
    kind = type(mixture(2)).__name__
    with pytest.raises(UserError) as error:
        mixture(3, rates=(1, 2), temperature=3.0)
    assert f"{kind}.rates: 2 rates for 3 parts." in str(error.value)
    assert f"{kind}.temperature = 3.0: it counts only by size" in str(error.value)
