"""Scores of lines: sums of their own tokens, whatever shares their rows."""

import numpy as np
import pytest

from data.sources.json_lines import Jsonl
from data.sources.text import TextFiles
from data.task import Task
from data.tasks.prompts import PromptTask
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, make
from data.vocabs import Vocabs
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Batch, Model, Params
from models.loss import TokenLosses
from tests.toys import TOY
from tests.trainer.bigram import Bigram, log_probabilities
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding import score as scoring
from trainer.decoding.score import score_lines, token_losses
from trainer.run import Run

WORDS = ("kara", "lost", "mitu", "nevo")
SPEC = SentencePiece(size=263)
VOCAB = make(SPEC, iter([" ".join(WORDS)] * 20), words=WORDS)
TASK = Task(name="toy", source=TextFiles(train="text.txt"), vocab=SPEC, length=6)
LINES = ["kara lost", "", "mitu", "nevo kara lost mitu kara mitu nevo lost", "lost lost nevo"]


def bigram(layout: Layout, params: dict[str, np.ndarray], task: Task) -> TrainedModel:
    run = Run(model=TOY, task=task, steps=1, batch_sequences=2)
    return TrainedModel(Bigram(layout), params, run, Vocabs(VOCAB, VOCAB), make_mesh(layout), 1)


def test_a_line_is_scored_alone_and_a_long_one_in_pieces() -> None:
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.5, (263, 5)).astype(np.float32)
              for name in ("embed_VD", "softmax_VD")}  # fmt: skip
    layout = Layout(mesh="data:2", rules="batch:data")
    calls: list[tuple[int, int]] = []
    trained = bigram(layout, params, TASK)
    scores = score_lines(trained, LINES, 2, lambda done, total: calls.append((done, total)))
    for line, ids, score in zip(LINES, VOCAB.encode(LINES), scores, strict=True):
        targets = np.array([*ids, EOS])
        inputs = np.roll(targets, 1)
        inputs[:: TASK.length] = 0  # a piece does not see the one before
        log_LV = log_probabilities(params, {"inputs_BL": inputs})
        total = log_LV[np.arange(len(targets)), targets].sum()
        assert (score.tokens, score.words) == (len(targets), len(line.split()))
        assert score.pieces == -(-len(targets) // TASK.length)
        np.testing.assert_allclose(score.log_likelihood, total, rtol=1e-6)
    done, total = calls[-1]
    assert done == total and len(calls) > 1


def test_few_lines_have_a_small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {name: np.zeros((263, 5), np.float32) for name in ("embed_VD", "softmax_VD")}
    trained, rows = bigram(Layout(mesh="data:2", rules="batch:data"), params, TASK), list[int]()

    def noted(model: Model, params: Params, batch: Batch) -> TokenLosses:
        rows.append(batch["targets_BL"].shape[0])
        return token_losses(model, params, batch)

    monkeypatch.setattr(scoring, "token_losses", noted)
    assert len(score_lines(trained, LINES[:3], 64)) == 3
    assert score_lines(trained, [" ".join(LINES[3].split() * 20)], 4)[0].pieces > 8
    assert rows == [2, *[4] * (len(rows) - 1)] and len(rows) > 3


def test_the_tokens_of_a_prompt_are_not_scored() -> None:
    source = Jsonl(train="x.jsonl", source_field="q", target_field="a")
    task = PromptTask(name="toy", source=source, vocab=SPEC, length=9, template="{prompt} ")
    params = {name: np.zeros((263, 5), np.float32) for name in ("embed_VD", "softmax_VD")}
    layout = Layout(mesh="data:1", rules="batch:data")
    lines = ["kara lost\tmitu nevo", "mitu\tlost", "kara " * 9 + "\tkara"]
    scores = score_lines(bigram(layout, params, task), lines, 2)
    assert [(score.tokens, score.words, score.pieces) for score in scores] == [
        (3, 2, 1), (2, 1, 1), (0, 1, 0),
    ]  # fmt: skip
