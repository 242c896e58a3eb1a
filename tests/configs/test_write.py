"""Specs as gin text, and how two of them differ."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import load
from configs.write import diff, dump, shown, values
from tests.configs.gin_specs import GinAdam, GinModel, GinNorm, GinRun, GinSgd, GinStack


def test_diff():
    a = GinRun(steps=1, model=GinModel(layers=2), others=(GinModel(layers=3),))
    b = GinRun(
        steps=5,
        model=GinModel(layers=2, norm=GinNorm(epsilon=0.5)),
        optimizer=GinSgd(),
        others=(GinModel(layers=4),),
    )
    assert diff(a, a) == []
    assert diff(a, b) == [
        ("GinRun.steps", 1, 5),
        ("GinNorm.epsilon", 1e-6, 0.5),
        ("GinRun.optimizer", GinAdam(decay=0.125), GinSgd()),
        ("GinModel.layers", 3, 4),
    ]
    assert diff(GinAdam(), GinSgd()) == [("GinAdam", GinAdam(), GinSgd())]


def test_values_are_by_name():
    run = GinRun(steps=10, model=GinModel(layers=2), others=(GinModel(layers=3),))
    found = values([run])
    assert found["GinRun.steps"] == 10 and found["GinRun.seed"] is None
    assert found["GinRun.others"] == "(@others_4/GinModel(),)" and found["GinRun.sizes"] == "()"
    assert found["GinModel.layers"] == 2 and found["others_4/GinModel.layers"] == 3


def test_dump_spells_everything_out():
    run = GinRun(steps=10, model=GinModel(layers=2), others=(GinModel(layers=3),))
    assert dump([run]).split("\n") == [
        "GinRun.steps = 10",
        "GinRun.model = @GinModel()",
        "GinRun.name = 'toy'",
        "GinRun.seed = None",
        "GinRun.sizes = ()",
        "GinRun.optimizer = @GinAdam()",
        "GinRun.others = (@others_4/GinModel(),)",
        "",
        "GinModel.layers = 2",
        "GinModel.width = 8",
        "GinModel.norm = @GinNorm()",
        "",
        "GinNorm.epsilon = 1e-06",
        "",
        "GinAdam.decay = 0.125",
        "",
        "others_4/GinModel.layers = 3",
        "others_4/GinModel.width = 8",
        "others_4/GinModel.norm = @GinNorm()",
        "",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "GinStack.norms = (@fine/GinNorm(), @GinNorm())\nfine/GinNorm.epsilon = 0.5\n",
        "GinStack.models = (@wide/GinModel(), @deep/GinModel())\nwide/GinModel.width = 16\n"
        "wide/GinModel.layers = 1\ndeep/GinModel.layers = 2\n",
    ],
)
def test_a_file_is_read_over_the_dump_of_its_specs(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.gin").write_text(text)
    stack = load([str(tmp_path / "run.gin")]).make(GinStack)
    (tmp_path / "dump.gin").write_text(dump([stack]))
    both = load([str(tmp_path / name) for name in ("dump.gin", "run.gin")])
    assert both.make(GinStack) == stack


norms = st.builds(GinNorm, epsilon=st.floats(allow_nan=False, allow_infinity=False))


models = st.builds(GinModel, layers=st.integers(1, 3), width=st.integers(1, 3), norm=norms)


runs = st.builds(
    GinRun,
    steps=st.integers(1),
    model=models,
    name=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name != "bad"),
    seed=st.none() | st.integers(),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
    optimizer=st.builds(GinAdam) | st.builds(GinSgd),
    others=st.lists(models, max_size=3).map(tuple),
)


@settings(max_examples=50, deadline=None, database=None)
@given(run=runs, norm=norms)
def test_dump_is_read_back_to_equal_specs(tmp_path_factory, run, norm):
    path = tmp_path_factory.getbasetemp() / "dump.gin"
    path.write_text(dump([run, norm]), encoding="utf-8")
    config = load([str(path)])
    assert config.make(GinRun) == run and config.make(GinNorm) == norm
    assert config.unused(GinRun, GinNorm) == ()


def test_tuples_of_one_have_a_comma() -> None:
    assert (shown(("silu", 1)), shown((None,))) == ("('silu', 1)", "(None,)")
