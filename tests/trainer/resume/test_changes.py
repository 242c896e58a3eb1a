"""Which settings of a run may change when it continues."""

import dataclasses
from typing import Any

import pytest

from configs.errors import UserError
from data.sources.mixing import TextMixture
from data.sources.text import TextFiles
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from tests.toys import TOY
from tests.trainer.planning.runs import TASK
from trainer.metrics.trackers import WandB
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant, Cosine
from trainer.resume.changes import check_changes
from trainer.run import Run

MODEL = dataclasses.replace(TOY, layers=1)
DROPPING, GELU = MultiHead(dropout=0.1), Mlp(activation="gelu")
RUN = Run(model=MODEL, task=TASK, steps=5, batch_sequences=4, optimizer=AdamW(schedule=Cosine()))
REPLACED = {
    "speed": dataclasses.replace(RUN, steps=9, model=dataclasses.replace(MODEL, remat="full")),
    "evaluation": dataclasses.replace(RUN, evaluate_every=2, microbatches=2),
    "attention": dataclasses.replace(
        RUN, model=dataclasses.replace(MODEL, attention=MultiHead(implementation="plain", chunks=2))
    ),
    "compiler": dataclasses.replace(RUN, compiler_options=("tpu:xla_a=1",), log_every=2),
    "trackers": dataclasses.replace(RUN, trackers=(), log_every=2),
    "dropout": dataclasses.replace(RUN, model=dataclasses.replace(MODEL, attention=DROPPING)),
    "schedule": dataclasses.replace(RUN, optimizer=AdamW(schedule=Constant(peak=0.5))),
    "scalars": dataclasses.replace(RUN, optimizer=AdamW(beta1=0.8, clip_global_norm=None)),
    "batch": dataclasses.replace(RUN, batch_sequences=6, z_loss=0.1),
    "opt_state": dataclasses.replace(RUN, optimizer=AdamW(weight_decay=0.0)),
    "optimizer": dataclasses.replace(RUN, optimizer=Adafactor()),
    "seed": dataclasses.replace(RUN, seed=3),
    "model": dataclasses.replace(RUN, model=dataclasses.replace(MODEL, feed_forward=GELU)),
    "task": dataclasses.replace(RUN, task=dataclasses.replace(TASK, packs=False)),
}


def names(kind: str, *, override: bool) -> list[str]:
    changes = check_changes("There", RUN, REPLACED[kind], override=override)
    return [change.name for change in changes]


@pytest.mark.parametrize("kind", ["speed", "evaluation", "attention", "compiler", "trackers"])
def test_what_changes_no_weight_may_always_change(kind: str) -> None:
    assert len(names(kind, override=False)) == 2


def test_what_a_tracker_is_named_may_always_change() -> None:
    before, after = (dataclasses.replace(RUN, trackers=(WandB(project=x),)) for x in ("a", "b"))
    [change] = check_changes("There", before, after, override=False)
    assert change.name == "WandB.project"


@pytest.mark.parametrize("kind", ["schedule", "scalars", "batch"])
def test_what_changes_how_weights_develop_needs_an_override(kind: str) -> None:
    with pytest.raises(UserError, match="legal with --override") as error:
        names(kind, override=False)
    for name in names(kind, override=True):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("opt_state", "AdamW.weight_decay"),
        ("optimizer", "Run.optimizer"),
        ("seed", "Run.seed"),
        ("model", "Mlp.activation"),
        ("dropout", "MultiHead.dropout"),
        ("task", "Task.packs"),
    ],
)
def test_another_model_or_order_of_data_is_refused(kind: str, name: str) -> None:
    with pytest.raises(UserError) as error:
        names(kind, override=True)
    assert f"{name}: " in str(error.value) and "--override" not in str(error.value)


def with_stages(*stages: tuple[int, tuple[int, ...]]) -> Run:
    parts = (TextFiles(train="a.txt"), TextFiles(train="b.txt"))
    source = TextMixture(parts=parts, stages=stages)
    return dataclasses.replace(RUN, task=dataclasses.replace(TASK, source=source))


def test_a_stage_that_has_not_begun_may_come_change_and_go() -> None:
    first, later, other = (5, (1, 2)), (9, (0, 1)), (10, (3, 1))
    for before, after in (((), (later,)), ((first, later), (first, other)), ((later,), ())):
        runs = with_stages(*before), with_stages(*after)
        for step in (0, 9):
            [change] = check_changes("There", *runs, override=True, step=step)
            assert change.name == "TextMixture.stages"
        with pytest.raises(UserError, match=r"TextMixture\.stages: .*: legal with --override"):
            check_changes("There", *runs, override=False, step=9)
        with pytest.raises(UserError, match="stages that begin before step 10 may not change"):
            check_changes("There", *runs, override=True, step=10)


def of_parts(names: str, **settings: Any) -> Run:
    source = TextMixture(parts=tuple(TextFiles(train=f"{x}.txt") for x in names), **settings)
    return dataclasses.replace(RUN, task=dataclasses.replace(TASK, source=source))


def test_parts_are_added_behind_those_of_a_mixture_with_rates() -> None:
    rates, stages = {"rates": (1, 1)}, {"rates": (1, 1), "stages": ((9, (1, 1, 1)),)}
    runs = of_parts("ab", **rates), of_parts("abc", **stages)
    changes = check_changes("There", *runs, override=True, step=9)
    assert [change.name for change in changes] == ["TextMixture.stages", "TextMixture.parts"]
    with pytest.raises(UserError, match=r"TextMixture\.parts: .*: legal with --override"):
        check_changes("There", *runs, override=False, step=9)
    for before, after in (
        (of_parts("ab"), of_parts("abc")),  # by size, which the new part would change
        (of_parts("ab", **rates), of_parts("cab", **stages)),
        (of_parts("ab", **rates), of_parts("acb", **stages)),
        (of_parts("a", rates=(1,)), of_parts("ab", rates=(1,), stages=((9, (1, 1)),))),
        (runs[1], runs[0]),
    ):
        with pytest.raises(UserError, match=r"\.parts: .* differs\.  Legal: more parts"):
            check_changes("There", before, after, override=True, step=9)
    with pytest.raises(UserError, match="stages that begin before step 10 may not change"):
        check_changes("There", *runs, override=True, step=10)


def test_stages_of_the_batch_change_as_those_of_a_mixture_do() -> None:
    with_stage = dataclasses.replace(RUN, batch_stages=((9, 16),))
    other = with_stage, dataclasses.replace(with_stage, batch_sequences=2)
    assert check_changes("There", *other, override=True, step=9)
    with pytest.raises(UserError, match=r"a stage of Run\.batch_stages has begun"):
        check_changes("There", *other, override=True, step=10)
    shorter = dataclasses.replace(RUN, length_stages=((0, 4), (9, 8)))
    before = dataclasses.replace(RUN, length_stages=((0, 2),))
    with pytest.raises(UserError, match=r"Run\.length_stages: .*: stages that begin before step"):
        check_changes("There", before, shorter, override=True, step=8)
    before = dataclasses.replace(RUN, length_stages=((0, 4),))
    [change] = check_changes("There", before, shorter, override=True, step=9)
    assert change.name == "Run.length_stages"
    runs = RUN, dataclasses.replace(RUN, batch_stages=((9, 16),))
    [change] = check_changes("There", *runs, override=True, step=9)
    assert change == ("Run.batch_stages", (), ((9, 16),))
    with pytest.raises(UserError, match=r"Run\.batch_stages: .*: legal with --override"):
        check_changes("There", *runs, override=False, step=9)
    with pytest.raises(UserError, match="stages that begin before step 10 may not change"):
        check_changes("There", *runs, override=True, step=10)
