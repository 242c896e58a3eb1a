"""Parts of mixtures: their names, rates and order."""

from data.sources.mixing import name_problems, order_of, part_names, rate_problems


def test_labels_that_are_alike_are_numbered():
    assert part_names([None, None], ["Tsv", "Jsonl"]) == ["Tsv", "Jsonl"]
    assert part_names([None, "web", None], ["Tsv", "Tsv", "Tsv"]) == ["Tsv_1", "web", "Tsv_3"]


def test_rates_are_by_size_unless_they_are_set():
    assert order_of([100, 300], None, 1.0).quotas == (1024, 3072)
    assert order_of([100, 300], None, 1e9).quotas == (2048, 2048)
    assert order_of([100, 300], (3, 1), 1.0).quotas == (3072, 1024)


def test_names_and_rates_that_make_no_sense_are_described():
    assert not [*name_problems("Mixture", "train", ["a", "b", "c"])]
    assert not [*rate_problems("Mixture", (1, 2), 1.0, 2), *rate_problems("Mixture", None, 2, 2)]
    [problem] = name_problems("Mixture", "test", ["a", "b", "a"])
    assert problem == "Mixture.parts: several of 'test' have the name a."
    problems = list(rate_problems("TextMixture", (1, 2), 3.0, 3))
    assert problems[0].startswith("TextMixture.rates: 2 rates for 3 parts.")
    assert problems[1].startswith("TextMixture.temperature = 3.0: it counts only by size")
