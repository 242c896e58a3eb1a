"""Settings of a run that do not fit each other, and what follows from them."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from data.sources.mixing import TextMixture
from data.sources.pair_kinds import Tsv
from data.sources.text import TextFiles
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import TopK
from models.precision import Precision
from tests.toys import TOY, row_ids
from tests.trainer.planning.runs import ENCODER_DECODER, PAIR_TASK, TASK
from trainer.checks import check_precision
from trainer.run import Run, with_vocab_rows

RUN = Run(model=TOY, task=TASK, steps=10, batch_sequences=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_by": "bleu"}, "set Run.bleu_sentences"),
        ({"bleu_sentences": 5}, "Run.bleu_sentences = 5: the task is not a translation task"),
        ({"r_drop": 5.0}, "Run.r_drop = 5.0: without dropout, both passes .* set Transformer.drop"),
        ({"epochs": 2.0}, "Run.steps = 10, Run.epochs = 2.0: one of them sets the"),
        ({"steps": None}, "Run.steps = None, Run.epochs = None: one of them sets the"),
        ({"microbatches": 4}, "Run.batch_sequences = 6 does not divide into Run.microbatches = 4"),
        (
            {"microbatches": 2, "batch_stages": ((1, 8), (3, 9))},
            r"Run.batch_stages\[1\]\[1\] = 9 does not divide into Run.microbatches = 2",
        ),
        ({"batch_stages": ((3, 8), (3, 9))}, r"Run.batch_stages: begin after steps \[3, 3\]"),
        ({"length_stages": ((5, 12), (0, 8))}, r"Run.length_stages: begin after steps \[5, 0\]"),
        (
            {"length_stages": ((0, 12), (5, 7))},
            r"Run.length_stages\[1\]\[1\] = 7: Task.length = 24 does not divide into rows of 7",
        ),
        (
            {"task": PAIR_TASK, "model": ENCODER_DECODER, "length_stages": ((0, 12),)},
            r"length_stages\[0\]\[1\] = 12: the rows of a @Translation\(\) cannot be cut",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(RUN, **changes)


def test_stages_of_rows_keep_the_tokens_of_a_batch() -> None:
    run = dataclasses.replace(
        RUN, batch_stages=((4, 8),), length_stages=((0, 6), (4, 8), (9, 24)), microbatches=2
    )
    shapes = [(run.stage(step).batch_sequences, run.stage(step).task.length) for step in range(10)]
    assert shapes == [(24, 6)] * 4 + [(24, 8)] * 5 + [(8, 24)]
    assert [each.task.length for each in run.by_stage] == [6, 8, 24]
    assert run.stage(0).stage_begins == {0} and run.stage(9).by_stage == [run.stage(9)]


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    [(2.0, 7, 3), (3.0, 6, 3), (0.5, 11, 1), (0.7, 60, 7), (1.1, 180, 33)],
)
def test_a_run_of_epochs_ends_with_the_batch_that_reads_the_last_of_their_rows(
    epochs: float, rows: int, steps: int
) -> None:
    run = dataclasses.replace(RUN, steps=None, epochs=epochs)
    assert run.with_steps(rows) == dataclasses.replace(RUN, steps=steps)
    assert run.with_steps(None) == run and RUN.with_steps(rows) == RUN
    batches = [row_ids(0, step, RUN.batch_sequences, rows) for step in range(steps)]
    read = np.concatenate(batches)[: round(epochs * rows)]  # which is all but what fills it up
    assert set(np.bincount(read, minlength=rows)) <= {int(epochs), math.ceil(epochs)}
    assert (steps - 1) * RUN.batch_sequences < len(read) == round(epochs * rows)
    with pytest.raises(UserError, match=r"Run.epochs = 1e\+300: with .* Set fewer"):
        dataclasses.replace(run, epochs=1e300).with_steps(rows)
    with pytest.raises(UserError, match=r"depends on the rows of task toy.*`meshloom prepare`"):
        _ = run.total_steps


def test_a_mixture_has_no_epochs() -> None:
    parts = (TextFiles(train="a.txt", name="a"), TextFiles(train="b.txt", name="b"))
    task = dataclasses.replace(TASK, source=TextMixture(parts=parts))
    with pytest.raises(UserError, match=r"Run.epochs = 2: task toy is a mixture.* Set Run.steps"):
        dataclasses.replace(RUN, task=task, steps=None, epochs=2.0)
    one = dataclasses.replace(TASK, source=TextMixture(parts=parts[:1]))
    assert dataclasses.replace(RUN, task=one, steps=None, epochs=2.0).with_steps(6).steps == 2


def test_the_embedding_has_the_rows_of_the_vocabulary_unless_they_are_set(tmp_path: Path) -> None:
    model = dataclasses.replace(TOY, vocab=None)
    for size, rows in ((500, 512), (512, 512), (513, 640)):
        task = dataclasses.replace(TASK, vocab=SentencePiece(size=size))
        assert dataclasses.replace(RUN, model=model, task=task).model.vocab == rows
        assert dataclasses.replace(RUN, task=task).model.vocab == TOY.vocab
    lines = ["a line of words", "another line"]
    file = tmp_path / "vocab.model"
    file.write_bytes(make(SentencePiece(size=280), iter(lines)).model)
    task = dataclasses.replace(TASK, vocab=SentencePiece(model_file=str(file)))
    assert dataclasses.replace(RUN, model=model, task=task).model.vocab == 384


def test_both_sides_have_the_rows_of_their_vocabularies() -> None:
    task = Translation(
        name="pairs", source=Tsv(train="none"), vocab=SentencePiece(size=300), length=6,
        source_vocab=SentencePiece(size=200), source_length=6,
    )  # fmt: skip
    for encoder_layers, rows in ((1, (384, 256)), (0, (384, None))):
        model = dataclasses.replace(TOY, vocab=None, encoder_layers=encoder_layers)
        derived = dataclasses.replace(RUN, model=model, task=task).model
        assert (derived.vocab, derived.source_vocab) == rows
    alone = with_vocab_rows(model, {})
    with pytest.raises(UserError, match=r"Transformer\.vocab = None: no task gives"):
        _ = alone.vocab_rows


def test_what_happens_at_intervals_happens_after_the_last_step_too() -> None:
    assert [step for step in range(1, 11) if RUN.at_interval(step, 4)] == [4, 8, 10]
    assert [step for step in range(1, 11) if RUN.at_interval(step, None)] == [10]


@pytest.mark.parametrize(("group_tokens", "rows"), [(None, 1), (12, 1), (48, 2), (36, 3)])
def test_the_rows_of_a_group_stay_together(group_tokens: int | None, rows: int) -> None:
    moe = Moe(experts=4, router=TopK(), group_tokens=group_tokens)
    model = dataclasses.replace(TOY, feed_forward=moe)
    assert dataclasses.replace(RUN, model=model).rows_together == rows


@pytest.mark.parametrize(
    ("flags", "compute", "warns"),
    [
        ("avx512f", "bfloat16", True), ("avx512f", "float16", True), ("avx512f", "float32", False),
        ("avx512f avx512_bf16", "bfloat16", False), ("amx_bf16 amx_tile", "bfloat16", False),
    ],
)  # fmt: skip
def test_a_type_that_this_processor_is_slow_in_is_warned_of(
    tmp_path: Path, flags: str, compute: str, warns: bool
) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {flags}\n")
    model = dataclasses.replace(TOY, precision=dataclasses.replace(Precision(), compute=compute))
    run = dataclasses.replace(RUN, model=model)
    warnings = check_precision(run, cpuinfo)
    assert [f"Precision.compute = '{compute}'" in warning for warning in warnings] == [True] * warns
    assert check_precision(run, tmp_path / "none") == []
