"""Specs made from bindings, and the mistakes found on the way."""

import pickle
from typing import Any

import gin
import pytest

from configs.errors import UserError
from configs.load import load
from configs.spec import spec
from tests.configs.gin_specs import RUN, GinAdam, GinModel, GinNorm, GinRun, GinSgd, message


def test_makes_nested_specs(write):
    text = RUN + "GinRun.sizes = [1, 2]\nGinRun.optimizer = @GinSgd()\nGinNorm.epsilon = 1\n"
    made = load([write(text)]).make(GinRun)
    model = GinModel(layers=2, norm=GinNorm(epsilon=1.0))
    assert made == GinRun(steps=10, model=model, sizes=(1, 2), optimizer=GinSgd())
    assert isinstance(made, GinRun) and pickle.loads(pickle.dumps(made)) == made


def test_scopes(write):
    text = RUN + (
        "small/GinModel.layers = 1\n"
        "big/GinModel.layers = 4\nbig/GinNorm.epsilon = 0.5\nbig/wide/GinModel.width = 16\n"
        "GinRun.others = (@small/GinModel(), @big/GinModel(), @big/wide/GinModel())\n"
    )
    made = load([write(text)]).make(GinRun)
    norm = GinNorm(epsilon=0.5)
    assert made.model == GinModel(layers=2)
    assert made.others == (
        GinModel(layers=1),
        GinModel(layers=4, norm=norm),
        GinModel(layers=4, width=16, norm=norm),
    )


def test_scopes_agree_with_gins_own(write):
    """The same text under gin's own evaluation, with plain classes of the same shape."""
    text = (
        "OwnRun.a = @one/OwnModel()\nOwnRun.b = @one/two/OwnModel()\nOwnRun.c = @two/OwnModel()\n"
        "OwnModel.x = 1\none/OwnModel.x = 2\ntwo/OwnModel.x = 3\none/two/OwnModel.y = 4\n"
        "OwnModel.inner = @OwnInner()\none/OwnInner.z = 5\ntwo/OwnInner.z = %V\nV = 6\n"
        "two/OwnModel.inner = @one/OwnInner()\n"
    )

    @spec
    class OwnInner:
        z: int = 0

    @spec
    class OwnModel:
        x: int = 0
        y: int = 0
        inner: OwnInner | None = None

    @spec
    class OwnRun:
        a: OwnModel
        b: OwnModel
        c: OwnModel

    ours = load([write(text)]).make(OwnRun)
    try:
        for cls in (OwnInner, OwnModel, OwnRun):
            gin.register(cls, module="tests")
        gin.parse_config(text)
        assert gin.get_configurable(OwnRun)() == ours
    finally:
        gin.clear_config()


def test_blocks_macros_and_comments(write):
    text = "# toy\nGinModel:\n  layers = %DEPTH  # macro\n  width = 4\nDEPTH = %OTHER\nOTHER = 3\n"
    assert load([write(text)]).make(GinModel) == GinModel(layers=3, width=4)
    with_param = load([write(text)], ["OTHER=5"])
    assert with_param.make(GinModel).layers == 5


def test_a_spec_as_default_can_be_bound_without_a_reference(write):
    made = load([write(RUN + "GinNorm.epsilon = 0.5\n")]).make(GinRun)
    assert made.model.norm == GinNorm(epsilon=0.5)
    assert made.optimizer == GinAdam(decay=0.125)  # the field's default, not the class's


def test_python_values(write):
    text = RUN + "GinRun.name = 'it\\'s'\nGinRun.seed = -3\nGinRun.sizes = (1,)\n"
    made = load([write(text)]).make(GinRun)
    assert (made.name, made.seed, made.sizes) == ("it's", -3, (1,))
    assert load(["run.gin"], ["GinRun.seed = None"]).make(GinRun).seed is None


def test_missing_values_are_all_named():
    with pytest.raises(UserError) as caught:
        load([]).make(GinRun)
    assert str(caught.value).splitlines() == [
        "GinRun: 2 problems.",
        "  GinRun.steps is missing, legal: an integer of at least 1.  "
        'Set it in a gin file or with --gin_param="GinRun.steps=...".',
        "  GinRun.model is missing, legal: @GinModel().  "
        'Set it in a gin file or with --gin_param="GinRun.model=...".',
    ]


def test_wrong_values_are_all_named_with_their_place(write):
    text = "GinRun.steps = 'ten'\nGinRun.model = @GinModel()\nGinModel.width = 0\n"
    error = message(write(text), params=("GinRun.sizes=[1, 'a']",), make=GinRun)
    assert error.splitlines() == [
        "GinRun: 4 problems.",
        "  GinModel.layers is missing, legal: an integer of at least 1.  "
        'Set it in a gin file or with --gin_param="GinModel.layers=...".',
        "  run.gin:3: GinModel.width = 0: legal: an integer of at least 1.",
        "  run.gin:1: GinRun.steps = 'ten': found str, legal: an integer of at least 1.",
        "  --gin_param: GinRun.sizes[1] = 'a': found str, legal: a tuple, each item an integer.",
    ]


def test_a_problem_names_the_scope_of_its_setting(write):
    text = "GinRun.steps = 1\nGinRun.model = @a/b/GinModel()\na/GinModel.width = 0\n"
    assert message(write(text), make=GinRun).splitlines()[1:] == [
        "  a/b/GinModel.layers is missing, legal: an integer of at least 1.  "
        'Set it in a gin file or with --gin_param="a/b/GinModel.layers=...".',
        "  run.gin:3: a/GinModel.width = 0: legal: an integer of at least 1.",
    ]


def test_wrong_kind_of_spec(write):
    error = message(write(RUN + "GinRun.model = @GinSgd()\n"), make=GinRun)
    assert error == (
        "run.gin:4: GinRun.model = GinSgd(decay=0.5): found GinSgd, legal: @GinModel()."
    )


def test_checks_between_fields_are_reported(write):
    error = message(write(RUN), params=("GinRun.name='bad'",), make=GinRun)
    assert error == "GinRun.name = 'bad': legal: a good name."


@pytest.mark.parametrize("line", ["GinModel.width = %A", "GinModel.norm = @x/GinModel()"])
def test_circles_end(write, line):
    text = f"GinModel.layers = 1\n{line}\nA = %B\nB = %A\n"
    assert "refers to itself" in message(write(text), make=GinModel)


def test_one_reference_in_two_scopes_is_no_circle(write):
    text = "GinNest.inner = @s/GinNest()\ns/GinNest.inner = @t/GinNest()\nt/GinNest.inner = None\n"

    @spec
    class GinNest:
        inner: Any = None

    @spec
    class GinOuter:
        first: Any = None

    again = "GinOuter.first = @s/GinNest()\ns/GinNest.inner = @t/GinOuter()\n"
    again += "t/GinOuter.first = @GinNest()\nt/GinNest.inner = None\n"
    nested = load([write(text)]).make(GinNest)
    assert nested == GinNest(inner=GinNest(inner=GinNest()))
    made = load([write(again)]).make(GinOuter)
    assert made == GinOuter(first=GinNest(inner=GinOuter(first=GinNest())))
