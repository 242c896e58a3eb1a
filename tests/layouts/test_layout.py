"""Laws of placement, for any rules and any tensor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts.axes import Axis, alphabet
from layouts.layout import Layout, Rule, pairs, parse_rules
from layouts.mesh import abstract_mesh, make_mesh
from layouts.padding import with_axes, with_padding

BY_LETTER = alphabet().by_letter
# Heads speak of kv_heads as well, which has tests of its own.
LETTERS = "".join(letter for letter in BY_LETTER if letter not in "HJQ")
MESH_AXES = ("a", "b", "c")

rules = st.lists(
    st.builds(
        Rule,
        st.sampled_from([BY_LETTER[letter].name for letter in LETTERS]),
        st.sampled_from(MESH_AXES),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda rule: rule[:2],
)
# Few letters, so that axes and rules meet often; some are lowercase.
tensors = st.lists(
    st.sampled_from(LETTERS[:6] + LETTERS[:6].lower()), max_size=6, unique_by=str.upper
).map("".join)


def mesh_axes_of(place: jax.P) -> list[set[str]]:
    """The mesh axes that each axis of a tensor is split over."""
    return [{p} if isinstance(p, str) else set(p or ()) for p in place]


def text(rules: list[Rule]) -> str:
    return ";".join(map(str, rules))


@given(rules, tensors)
def test_the_leftmost_of_the_firmest_gets_a_mesh_axis_and_nobody_else(
    rules: list[Rule], axes: str
) -> None:
    places = mesh_axes_of(Layout(rules=text(rules)).place(axes))
    assert len(places) == len(axes)
    for mesh_axis in MESH_AXES:
        choices = [
            (not rule.firm, i)
            for i, letter in enumerate(axes)
            for rule in rules
            if rule.mesh_axis == mesh_axis
            and letter.isupper()
            and rule.axis == BY_LETTER[letter].name
        ]
        holders = [i for i, mesh_axes in enumerate(places) if mesh_axis in mesh_axes]
        assert holders == [i for _, i in sorted(choices)[:1]]


@given(rules, rules, tensors)
def test_parameter_rules_replace_those_of_the_same_axis_for_what_is_stored(
    rules: list[Rule], param_rules: list[Rule], axes: str
) -> None:
    layout = Layout(rules=text(rules), param_rules=text(param_rules))
    named = {rule.axis for rule in param_rules}
    joined = [rule for rule in rules if rule.axis not in named] + param_rules
    assert layout.place(axes, stored=True) == Layout(rules=text(joined)).place(axes)
    assert layout.place(axes) == Layout(rules=text(rules)).place(axes)


@pytest.mark.parametrize(
    ("rules", "axes", "place"),
    [
        ("batch:data;heads:model", "BLD", ("data", None, None)),
        ("batch:data;batch:fsdp", "BLD", (("data", "fsdp"), None, None)),
        ("batch:data;batch:fsdp", "bLD", (None, None, None)),
        ("length:model?;d_ff:model", "BLF", (None, None, "model")),
        ("length:model?;d_ff:model", "BLf", (None, "model", None)),
        ("length:all;memory:all", "BLM", (None, "all", None)),
        ("memory_length:all", "LM", (None, "all")),
        ("outer_batch:all", "BL", ("all", None)),
        ("d_ffx:all;ensemble:all", "BF", (None, None)),
    ],
)
def test_placements(rules: str, axes: str, place: tuple) -> None:
    assert Layout(rules=rules).place(axes) == jax.P(*place)


@pytest.mark.parametrize(
    ("rules", "place"),
    [
        ("heads:model", (None, "model", None)),
        ("queries:model", (None, None, "model")),
        ("heads:model;queries:data", (None, None, "data")),
        ("heads:model;kv_heads:data", (None, "data", None)),
        ("kv_heads:data;queries:model", (None, "data", "model")),
    ],
)
def test_heads_are_kv_heads_unless_a_rule_speaks_of_their_parts(rules: str, place: tuple) -> None:
    assert Layout(rules=rules).place("DJQ") == jax.P(*place)
    assert Layout(rules="heads:model").place("H") == jax.P("model")


@pytest.mark.parametrize("separator", [";", ",", ".", " ", "; ", ",\n  "])
def test_rules_may_be_separated_as_in_mesh_tensorflow(separator: str) -> None:
    computed = parse_rules(separator.join(["batch:rows", "vocab:cols?"]) + separator)
    assert computed == (Rule("batch", "rows"), Rule("vocab", "cols", firm=False))


@pytest.mark.parametrize("text", ["batch", "batch:", ":data", "batch:data;vocab=model"])
def test_a_pair_without_a_colon_between_two_names_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="legal is name:name, as in 'batch:data'"):
        pairs(text)


def test_layouts_compare_by_value_so_that_they_can_be_part_of_a_jit_key() -> None:
    assert hash(Layout(rules="batch:data")) == hash(Layout(rules="batch:data"))
    assert Layout(rules="batch:data") != Layout(rules="batch:model")


@pytest.mark.parametrize("equation", ["BEF->EBF", "EBF->BEF", "BEF->F", "BEF,EFD->EBD"])
def test_products_and_what_is_turned_or_summed_lie_as_their_letters_say(equation: str) -> None:
    layout = Layout(mesh="data:4,model:2", rules="batch:data;experts:data;d_ff:model")
    inputs, out = equation.split("->")
    sizes = {"B": 8, "E": 4, "F": 6, "D": 5}
    rng = np.random.default_rng(0)
    arrays = [rng.random([sizes[x] for x in axes], np.float32) for axes in inputs.split(",")]
    with jax.set_mesh(make_mesh(layout)):
        placed = [
            layout.reshard(jnp.asarray(a), o)
            for a, o in zip(arrays, inputs.split(","), strict=True)
        ]
        computed = layout.einsum(equation, *placed)
    assert jax.typeof(computed).sharding.spec == layout.place(out)
    np.testing.assert_allclose(computed, np.einsum(equation.lower(), *arrays), rtol=1e-5)


def test_the_text_of_a_batch_of_one_is_taken_on_one_device() -> None:
    layout = Layout(mesh="data:1", rules="batch:data")
    with jax.set_mesh(make_mesh(layout)):
        x_BW = layout.reshard(jnp.full((1, 1), 7), "BW")
        first_BU = layout.reshard(jnp.zeros((1, 1), jnp.int32), "BW")
        assert layout.take_along_axis(x_BW, first_BU, "BW").tolist() == [[7]]


def test_rows_follow_their_index_where_another_axis_has_its_mesh_axis() -> None:
    layout = Layout(mesh="x:2,y:2", rules="batch:x?;batch:y?;heads:x")
    x_BWJ, parent_BW = np.arange(24).reshape(4, 3, 2), np.array([[0, 0, 2]] * 4, np.int32)
    with jax.set_mesh(make_mesh(layout)):
        placed_BWJ = layout.reshard(jnp.asarray(x_BWJ), "BWJ")
        placed_BW = layout.reshard(jnp.asarray(parent_BW), "BW")
        assert placed_BWJ.sharding.spec[0] != placed_BW.sharding.spec[0]
        moved_BWJ = layout.take_along_axis(placed_BWJ, placed_BW, "BWJ")
    np.testing.assert_array_equal(moved_BWJ, x_BWJ[:, [0, 0, 2]])


LATENT, BUCKETS = Axis("R", "latent", pads=True), Axis("R", "buckets")


def test_a_letter_is_placed_by_the_rules_of_the_axis_that_a_part_declares() -> None:
    layout = Layout(rules="batch:a;latent:b;buckets:c;capacity:c")
    assert layout.place("BRC") == jax.P("a", None, "c")
    assert with_axes(layout, LATENT).place("BRC") == jax.P("a", "b", "c")
    assert with_axes(layout, BUCKETS).place("BR") == jax.P("a", "c")
    shadowing = with_axes(layout, LATENT._replace(letter="C"))
    assert shadowing.place("BC") == jax.P("a", "b")


def test_a_declared_axis_pads_by_its_name_whatever_else_has_its_letter() -> None:
    layout = with_padding(Layout(mesh="b:2", rules="kv_heads:b+;latent:b+"), J=3)
    inside = with_axes(layout, LATENT._replace(letter="J")).with_sizes(J=5)
    with jax.sharding.use_abstract_mesh(abstract_mesh({"b": 2})):
        assert inside.padded_shape("J", (5,)) == (6,)
        assert inside.unpadded_shape("J", (6,)) == (5,)
        assert layout.unpadded_shape("J", (4,)) == (3,)


@pytest.mark.parametrize("call", ["place", "einsum"])
def test_no_axis_stands_twice_in_a_tensor(call: str) -> None:
    layout = Layout(mesh="data:1", rules="batch:data")
    with pytest.raises(ValueError, match="BB: axis B occurs twice"):
        layout.place("BB") if call == "place" else layout.einsum("BB->B", jnp.ones((3, 3)))


def test_rules_and_meshes_are_pairs() -> None:
    assert pairs("batch:rows;vocab:cols") == (("batch", "rows"), ("vocab", "cols"))
    assert pairs("data:2, model:4") == (("data", "2"), ("model", "4"))
