"""Answers in a model's own words: those of one question at a time, without batch or cache."""

import numpy as np
import pytest

from configs.errors import UserError
from data.vocab import EOS
from models.decoding.sampling import Sampling
from models.transformer import Transformer
from tests.trainer.questions.toy import DECODER, PAIR, SPLIT, TEMPLATE, VOCAB, VOCABS, losses, toy
from trainer.decoding.decoder import Decoder, batches_of
from trainer.questions.prompts import Prompt, answer_questions, answer_requests, check_answers_fit
from trainer.questions.questions import Question

NEW = 5
SHOT = Question(9, "lost", ("mitu", "kara"))
QUESTIONS = [
    Question(i, text, ("kara",))
    for i, text in enumerate(["kara", "nevo lost tura", "miru miru", "lora neka kara mitu", "lost"])
]


def plain_answer(spec: Transformer, prompt: Prompt) -> str:
    """Takes the likeliest next token, again and again, from whole texts."""
    tokens = list[int]()
    for _ in range(NEW):
        texts = [[*tokens, token] for token in range(spec.vocab)]
        next_losses = losses(spec, [*map(int, prompt.tokens)], texts)[:, len(tokens)]
        tokens.append(int(np.argmin(next_losses)))
        if tokens[-1] == EOS:
            break
    return VOCAB.decode(tokens).split("\n")[0].split(";")[0].strip()


@pytest.mark.parametrize("spec", [DECODER, PAIR], ids=["decoder", "encoder and decoder"])
def test_answers_are_those_of_one_question_at_a_time(spec: Transformer) -> None:
    split = toy(spec, SPLIT)
    prompts = split.prompts(QUESTIONS, SHOT)
    decoder = Decoder(split.model, split.params, split.mesh, Sampling(temperature=0), 4)
    answers = answer_questions(decoder, prompts, TEMPLATE, split.task, VOCABS, NEW)
    assert answers == [plain_answer(spec, prompt) for prompt in prompts]
    assert len(set(answers)) > 2


@pytest.mark.parametrize("spec", [DECODER, PAIR], ids=["decoder", "encoder and decoder"])
def test_questions_of_any_length_have_few_shapes(spec: Transformer) -> None:
    whole = toy(spec)
    questions = [Question(n, " ".join(["kara"] * n), ("lost",)) for n in range(1, 40)]
    requests = answer_requests(whole.prompts(questions), whole.task, VOCABS, NEW)
    assert {batch.shape[1:] for batch in batches_of(requests, 4, shards=1)} == (
        {(0, length, 16) for length in (16, 32, 64)}
        if spec is DECODER
        else {(length, 0, 16) for length in (16, 32, 64)}
    )


def test_a_prompt_that_does_not_fit_a_row_names_its_line() -> None:
    whole = toy(DECODER)
    full, long = (Question(n, " ".join(["kara"] * n), ("lost",)) for n in (20, 21))
    prompts = whole.prompts([*QUESTIONS, full, long])
    check_answers_fit("dev.jsonl", prompts[:-1], whole.task, NEW)
    with pytest.raises(UserError, match=r"^dev\.jsonl:21: 22 tokens .* row of 26"):
        check_answers_fit("dev.jsonl", prompts, whole.task, NEW)
