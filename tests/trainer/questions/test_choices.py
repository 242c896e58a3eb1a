"""Likelihoods of choices: sums over their own tokens, one question at a time."""

import dataclasses

import numpy as np
import pytest

from configs.errors import UserError
from data.tokenizers.sentence_piece import SentencePieceVocab
from data.vocab import EOS
from data.vocabs import Vocabs
from models.transformer import Transformer
from tests.trainer.questions.toy import DECODER, PAIR, SPLIT, TEMPLATE, VOCAB, VOCABS, losses, toy
from trainer.questions.choices import check_choices_fit, choice_likelihoods, make_completions
from trainer.questions.prompts import Template, make_prompts
from trainer.questions.questions import Question

SHOT = Question(9, "lost", ("mitu",), ("kara", "mitu"))
QUESTIONS = [
    Question(1, "kara", ("lost",), ("lost", "lost nevo", "x")),
    Question(2, "nevo lost tura", ("kara",), ("kara", "mitu lora neka")),
    Question(3, "miru", ("neka",), ("tura", "neka")),
]


@pytest.mark.parametrize("spec", [DECODER, PAIR], ids=["decoder", "encoder and decoder"])
def test_likelihoods_are_those_of_one_question_at_a_time(spec: Transformer) -> None:
    split = toy(spec, SPLIT)
    prompts = split.prompts(QUESTIONS, SHOT)
    completions = make_completions(prompts, TEMPLATE, split.task, VOCABS)
    likelihoods = choice_likelihoods(
        split.model, split.params, split.mesh, prompts, completions, split.task, VOCABS, 4
    )
    for question, prompt, of_question in zip(QUESTIONS, prompts, likelihoods, strict=True):
        tokens = [*map(int, prompt.tokens)]
        for choice, likelihood in zip(question.choices, of_question, strict=True):
            ids = [*map(int, VOCAB.encode([choice])[0]), *([EOS] if spec.has_encoder else [])]
            expected = -losses(spec, tokens, [ids])[0, : len(ids)].sum()
            np.testing.assert_allclose(likelihood.log_likelihood, expected, rtol=1e-5)
            assert (likelihood.tokens, likelihood.characters) == (len(ids), len(choice))
            np.testing.assert_allclose(likelihood.per_token, expected / len(ids), rtol=1e-5)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_decoder_without_a_beginning_reads_prompts_from_their_first_token(is_asked: bool) -> None:
    """As Hugging Face's Qwen does; a choice that is a whole text still follows a beginning."""
    vocab = SentencePieceVocab(VOCAB.model)
    vocab.reads_begin, vocab.begin_id = False, EOS
    vocabs, split = Vocabs(vocab, vocab), toy(DECODER, SPLIT)
    template = TEMPLATE if is_asked else Template.parse("{question}{answer} ;")
    questions = [q if is_asked else dataclasses.replace(q, text="") for q in QUESTIONS]
    prompts = make_prompts(template, [], questions, split.task, vocabs)
    completions = make_completions(prompts, template, split.task, vocabs)
    likelihoods = choice_likelihoods(
        split.model, split.params, split.mesh, prompts, completions, split.task, vocabs, 4
    )
    for question, prompt, of_question in zip(questions, prompts, likelihoods, strict=True):
        tokens = [*map(int, prompt.tokens)] or [EOS]
        for choice, likelihood in zip(question.choices, of_question, strict=True):
            ids = [*map(int, vocab.encode([choice])[0])]
            expected = -losses(DECODER, tokens, [ids], begins=False)[0, : len(ids)].sum()
            np.testing.assert_allclose(likelihood.log_likelihood, expected, rtol=1e-5)
            assert likelihood.tokens == len(ids)


def test_choices_are_compared_from_the_token_in_which_they_differ() -> None:
    """A prompt that ends in a space, as "kara ", merges it into the words that follow."""
    template = Template("", " ", "", "\n")
    [prompt] = make_prompts(template, [], [QUESTIONS[0]], toy(DECODER).task, VOCABS)
    [completions] = make_completions([prompt], template, toy(DECODER).task, VOCABS)
    assert len(prompt.tokens) == 2  # the word, and the space
    assert [one.scored.start for one in completions] == [1, 1, 1]


def test_choices_that_do_not_fit_a_row_name_their_line() -> None:
    whole = toy(DECODER)
    long = Question(8, "kara", ("lost",), ("lost", " ".join(["mitu"] * 25)))
    prompts = whole.prompts([*QUESTIONS, long])
    completions = make_completions(prompts, TEMPLATE, whole.task, VOCABS)
    check_choices_fit("c.jsonl", prompts[:-1], completions[:-1], whole.task)
    with pytest.raises(UserError, match=r"^c\.jsonl:8: .* row of 26"):
        check_choices_fit("c.jsonl", prompts, completions, whole.task)
