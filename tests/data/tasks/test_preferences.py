"""Preferences in rows: both answers of a prompt in training, the preferred ones elsewhere."""

import json
from collections import Counter

import numpy as np
import pytest

from configs.errors import UserError
from data.cache import prepare
from data.sources.clean import Clean
from data.sources.json_lines import JsonlPreferences
from data.sources.pairs import Preference
from data.tasks.prompts import PreferenceTask
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece

RNG = np.random.default_rng(0)
RECORDS = [
    {"prompt": f"{a} plus {b}", "chosen": str(a + b), "rejected": "no " * int(RNG.integers(1, 6))}
    for a in range(9)
    for b in range(7)
]
LENGTH = 48


@pytest.fixture
def task(tmp_path) -> PreferenceTask:
    path = tmp_path / "preferences.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    source = JsonlPreferences(train=str(path), validation=str(path))
    vocab = SentencePiece(size=40, byte_fallback=False)
    return PreferenceTask(
        name="p", source=source, vocab=vocab, length=LENGTH, template="Q {prompt}="
    )


def segments_of(rows, vocab):
    """Yields row, segment number, and the texts that the loss does not count and that it counts."""
    batch = rows.batch(np.arange(len(rows)))
    for row, segments_L in enumerate(batch["segments_BL"]):
        for segment in range(1, segments_L.max() + 1):
            here = segments_L == segment
            targets, mask = batch["targets_BL"][row, here], batch["loss_mask_BL"][row, here] > 0
            assert targets[-1] == vocab.end_id and list(mask) == sorted(mask)
            inputs = batch["inputs_BL"][row, here]
            assert list(inputs[1:]) == list(targets[:-1]) and inputs[0] == vocab.begin_id
            read, answer = vocab.decode(targets[~mask]), vocab.decode(targets[mask][:-1])
            yield row, segment, read, answer


def test_each_row_has_both_answers_of_its_prompts(task, tmp_path):
    prepared = prepare(task, tmp_path / "data")
    train, vocab = prepared.splits["train"], prepared.vocabs.target
    found = list(segments_of(train, vocab))
    assert len(found) == 2 * len(RECORDS)
    pairs = zip(found[::2], found[1::2], strict=True)
    seen = set()
    for (row, first, read, chosen), (other_row, second, again, rejected) in pairs:
        assert (row, read) == (other_row, again) and (first % 2, second - first) == (1, 1)
        seen.add((read, chosen, rejected))
    expected = {(f"Q {r['prompt']}=", r["chosen"], r["rejected"].strip()) for r in RECORDS}
    assert {(a, b, c.strip()) for a, b, c in seen} == expected
    counted = sum(int(mask.sum()) for mask in train.batch(np.arange(len(train)))["loss_mask_BL"])
    assert train.counts.tokens == counted and train.counts.lines == len(RECORDS)
    documents = train.known_documents
    for number in (0, 17, len(RECORDS) - 1):
        _, row, segments = zip(*documents.pieces_of(np.array([number])), strict=True)
        texts = {(r, s): a for r, s, _, a in found}
        assert len({*row}) == 1 and segments[1] == segments[0] + 1
        answers = [texts[r, s].strip() for r, s in zip(row, segments, strict=True)]
        assert answers == [RECORDS[number]["chosen"], RECORDS[number]["rejected"].strip()]


def test_other_splits_have_the_preferred_answers_alone(task, tmp_path):
    prepared = prepare(task, tmp_path / "data")
    found = list(segments_of(prepared.splits["validation"], prepared.vocabs.target))
    assert {(read, answer) for _, _, read, answer in found} == {
        (f"Q {r['prompt']}=", r["chosen"]) for r in RECORDS
    }


def test_what_does_not_fit_into_a_row_is_left_out(task, tmp_path):
    path = tmp_path / "preferences.jsonl"
    long = {"prompt": "1 plus 1", "chosen": "2", "rejected": "no " * 60}
    path.write_text("".join(json.dumps(record) + "\n" for record in [*RECORDS, long]))
    counts = prepare(task, tmp_path / "data").splits["train"].counts
    assert (counts.left_out, counts.lines) == (1, len(RECORDS))


def test_a_field_that_is_missing_is_named(task, tmp_path):
    (tmp_path / "preferences.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(UserError, match=r"line 1: .* needs field 'rejected': no such field"):
        prepare(task, tmp_path / "data")


def test_several_rejected_answers_of_one_prompt_are_no_repeats(task):
    clean = Clean(drops_duplicates=True, max_ratio=6.0)
    pairs = [Preference("q", "best", answer) for answer in ("bad", "worse", "bad", "b" * 20)]
    dropped = Counter[str]()
    assert list(clean.kept(pairs, "train", dropped)) == pairs[:2]
    assert dropped["a repeat"] == 1 and dropped["above max_ratio"] == 1


def test_pairs_of_answers_are_no_translations(task):
    with pytest.raises(UserError, match=r"it yields pairs of answers\.  Use @PreferenceTask\(\)"):
        Translation(
            name="t", source=task.source, vocab=task.vocab, length=LENGTH, source_length=LENGTH
        )
