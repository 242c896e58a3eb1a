"""Settings of a run that do not fit each other, and what follows from them."""

import dataclasses
from typing import Any

import pytest

from configs.errors import UserError
from models.moe.routing import TopK
from models.spec import Moe
from tests.toys import TOY
from tests.trainer.planning.runs import TASK
from trainer.run import Run

RUN = Run(model=TOY, task=TASK, steps=10, batch_sequences=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_by": "bleu"}, "set Run.bleu_sentences"),
        ({"bleu_sentences": 5}, "Run.bleu_sentences = 5: the task is not a translation task"),
        ({"r_drop": 5.0}, "Run.r_drop = 5.0: without dropout, both passes .* set Transformer.drop"),
        ({"microbatches": 4}, "Run.batch_sequences = 6 does not divide into Run.microbatches = 4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(RUN, **changes)


def test_what_happens_at_intervals_happens_after_the_last_step_too() -> None:
    assert [step for step in range(1, 11) if RUN.at_interval(step, 4)] == [4, 8, 10]
    assert [step for step in range(1, 11) if RUN.at_interval(step, None)] == [10]


@pytest.mark.parametrize(("group_tokens", "rows"), [(None, 1), (12, 1), (48, 2), (36, 3)])
def test_the_rows_of_a_group_stay_together(group_tokens: int | None, rows: int) -> None:
    moe = Moe(experts=4, router=TopK(), group_tokens=group_tokens)
    model = dataclasses.replace(TOY, pattern=("moe",), moe=moe)
    assert dataclasses.replace(RUN, model=model).rows_together == rows
