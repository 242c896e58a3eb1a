import abc
import dataclasses
import pickle
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from configs.errors import RunError, UserError, did_you_mean
from configs.spec import SPECS, Count, Described, Fraction, abstract_spec, is_spec, legal, spec


@spec
class ToyLeaf:
    rate: Fraction = 0.5


@spec
class ToyTwig:
    knots: Count = 1


@spec
class ToyTree:
    layers: Count
    kind: Literal["oak", "elm"] = "oak"
    name: str = ""
    grows: bool = False
    depth: Count | None = None
    sizes: tuple[Count, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()
    leaf: ToyLeaf | ToyTwig = ToyLeaf()
    twigs: tuple[ToyTwig, ...] = ()

    def __post_init__(self) -> None:
        assert self.name != "assert"
        if self.depth is not None and self.depth > self.layers:
            raise UserError(f"ToyTree.depth = {self.depth}: more than layers = {self.layers}.")
        if self.name == "plain":
            raise ValueError("plain names are not allowed.")


def message(**values: Any) -> str:
    with pytest.raises(UserError) as caught:
        ToyTree(**values)
    return str(caught.value)


def test_values_are_kept_and_coerced():
    made = ToyTree(layers=2, sizes=[3, 4], pairs=[["a", 1]], leaf=ToyTwig(), twigs=[ToyTwig()])
    assert (made.sizes, made.pairs, made.twigs) == ((3, 4), (("a", 1),), (ToyTwig(),))
    rate = ToyLeaf(rate=0).rate
    assert rate == 0.0 and isinstance(rate, float)


def test_a_spec_is_a_value():
    a, b = ToyTree(layers=2, sizes=[3]), ToyTree(layers=2, sizes=(3,))
    assert a == b and hash(a) == hash(b) and a != ToyTree(layers=3, sizes=(3,))
    copy = pickle.loads(pickle.dumps(a))
    assert copy == a and type(copy) is ToyTree and isinstance(a, ToyTree)
    assert is_spec(a) and not is_spec(ToyTree) and not is_spec(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.layers = 3


def test_replace_checks():
    assert dataclasses.replace(ToyTree(layers=2), layers=3) == ToyTree(layers=3)
    with pytest.raises(UserError, match=r"ToyTree\.layers = 0: legal: an integer of at least 1"):
        dataclasses.replace(ToyTree(layers=2), layers=0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"layers": "ten"}, "ToyTree.layers = 'ten': found str, legal: an integer of at least 1."),
        ({"layers": 0}, "ToyTree.layers = 0: legal: an integer of at least 1."),
        ({"layers": True}, "ToyTree.layers = True: found bool, legal: an integer of at least 1."),
        ({"layers": 2.0}, "ToyTree.layers = 2.0: found float, legal: an integer of at least 1."),
        ({}, "ToyTree.layers is missing, legal: an integer of at least 1."),
        ({"layers": 2, "kind": "ash"}, "ToyTree.kind = 'ash': legal: 'oak' or 'elm'."),
        ({"layers": 2, "name": 3}, "ToyTree.name = 3: found int, legal: a string."),
        ({"layers": 2, "grows": 1}, "ToyTree.grows = 1: found int, legal: True or False."),
        ({"layers": 2, "depth": 0}, "ToyTree.depth = 0: legal: an integer of at least 1 or None."),
        (
            {"layers": 2, "sizes": (1, "2")},
            "ToyTree.sizes[1] = '2': found str, "
            "legal: a tuple, each item an integer of at least 1.",
        ),
        (
            {"layers": 2, "pairs": (("a", "b"),)},
            "ToyTree.pairs[0][1] = 'b': found str, "
            "legal: a tuple, each item a tuple of a string, an integer.",
        ),
        ({"layers": 2, "leaf": 3}, "ToyTree.leaf = 3: found int, legal: @ToyLeaf() or @ToyTwig()."),
        (
            {"layers": 2, "twigs": (ToyLeaf(),)},
            "ToyTree.twigs[0] = ToyLeaf(rate=0.5): found ToyLeaf, "
            "legal: a tuple, each item @ToyTwig().",
        ),
    ],
)
def test_error_says_where_found_and_legal(values, text):
    assert message(**values) == text


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan"), float("inf")])
def test_range_of_a_fraction(rate):
    with pytest.raises(UserError, match="legal: a number of at least 0 and below 1"):
        ToyLeaf(rate=rate)


def test_infinity_is_no_number():
    @spec
    class ToyNumber:
        x: float

    with pytest.raises(UserError, match=r"ToyNumber\.x = inf: legal: a number\."):
        ToyNumber(x=float("inf"))


def test_all_problems_come_at_once():
    assert message(layers="ten", knd="oak", name=3).splitlines() == [
        "ToyTree: 3 problems.",
        "  ToyTree.layers = 'ten': found str, legal: an integer of at least 1.",
        "  ToyTree.name = 3: found int, legal: a string.",
        "  ToyTree.knd: no such parameter.  Did you mean kind?  Legal: layers, kind, name, grows, "
        "depth, sizes, pairs, leaf, twigs.",
    ]


def test_checks_between_fields():
    assert message(layers=2, depth=3) == "ToyTree.depth = 3: more than layers = 2."
    assert message(layers=2, name="plain") == "ToyTree: plain names are not allowed."


def test_a_failed_assert_is_not_the_users_mistake():
    with pytest.raises(AssertionError):
        ToyTree(layers=2, name="assert")


def test_positional_values_are_refused():
    with pytest.raises(UserError, match="ToyLeaf: give its parameters by name"):
        ToyLeaf(0.5)


def test_a_wrong_default_is_found():
    @spec
    class ToyWrong:
        steps: Count = 0

    with pytest.raises(UserError, match=r"ToyWrong\.steps = 0"):
        ToyWrong()


def test_registered_under_the_bare_name():
    assert SPECS["ToyTree"] is ToyTree
    with pytest.raises(TypeError):
        SPECS["Other"] = ToyTree


def test_two_specs_of_one_name_are_refused():
    other = type("ToyTree", (), {"__module__": "elsewhere", "__annotations__": {}})
    with pytest.raises(UserError, match=r"elsewhere\.ToyTree: the name is taken .* Rename"):
        spec(other)
    assert SPECS["ToyTree"] is ToyTree


def test_a_spec_may_extend_another():
    @spec
    class ToyPlant:
        rate: Fraction = 0.5

    @spec
    class ToyBush(ToyPlant):
        berries: Count

    assert ToyBush(berries=3).rate == 0.5
    with pytest.raises(UserError, match=r"ToyBush\.rate = 2"):
        ToyBush(berries=3, rate=2)

    @spec
    class ToyPot:
        plant: ToyPlant

    assert ToyPot(plant=ToyBush(berries=3)).plant == ToyBush(berries=3)
    with pytest.raises(UserError, match=r"legal: @ToyPlant\(\) or @ToyBush\(\)\."):
        ToyPot(plant=3)


def test_a_spec_that_lacks_what_its_base_describes_is_refused():
    @abstract_spec
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> float: ...

        @abc.abstractmethod
        def edges(self) -> int: ...

    class Square(Shape):
        def area(self) -> float:
            return 1.0

    with pytest.raises(UserError, match=r"test_spec\.Square has no edges\.  Define what"):
        spec(Square)


def test_an_abstract_spec_is_neither_made_nor_offered():
    @abstract_spec
    class ToyFruit:
        stones: Count = 1

    @spec
    class ToyPlum(ToyFruit):
        pass

    @spec
    class ToyBowl:
        fruit: ToyFruit

    assert "ToyFruit" not in SPECS and legal(ToyFruit) == "@ToyPlum()"
    assert ToyBowl(fruit=ToyPlum(stones=2)).fruit == ToyPlum(stones=2)
    with pytest.raises(UserError, match=r"ToyFruit is abstract.  Legal: @ToyPlum\(\)\."):
        ToyFruit()


def test_legal_words():
    assert legal(Annotated[int, Field(gt=1, le=8, multiple_of=2)]) == (
        "an integer above 1 and of at most 8 and that is a multiple of 2"
    )


def test_two_kinds_of_failure():
    assert issubclass(UserError, ValueError) and issubclass(RunError, RuntimeError)
    assert did_you_mean("adamw", ["AdamW", "Adafactor"]) == "  Did you mean AdamW?"
    assert did_you_mean("d_fff", ["batch"]) == ""


def test_all_problems_of_a_spec_are_told_at_once() -> None:
    @spec
    class Lamp:
        watts: Count
        colours: tuple[str, ...] = ("white",)

    lamp: Any = Lamp
    assert lamp(watts=40, colours=["red", "green"]).colours == ("red", "green")
    with pytest.raises(UserError) as caught:
        lamp(watts="ten", colour="red")
    assert str(caught.value).splitlines() == [
        "Lamp: 2 problems.",
        "  Lamp.watts = 'ten': found str, legal: an integer of at least 1.",
        "  Lamp.colour: no such parameter.  Did you mean colours?  Legal: watts, colours.",
    ]


def test_legal_values_are_told_in_words() -> None:
    letter = Annotated[str, Field(pattern="^[a-z]$"), Described("of one small letter")]
    assert legal(letter | None) == "a string of one small letter or None"
    assert legal(Fraction | None) == "a number of at least 0 and below 1 or None"
    assert legal(tuple[Literal["relu", "gelu"], ...]) == "a tuple, each item 'relu' or 'gelu'"
