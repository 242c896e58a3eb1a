"""Convolutions over split height and width equal the whole one, forward and backward."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from configs.errors import UserError
from layouts import convolution
from layouts.axes import Axis
from layouts.cost.collectives import Collective
from layouts.cost.jaxpr_cost import cost_of
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.lint.report import lint
from layouts.mesh import abstract_mesh, make_mesh
from layouts.padding import with_axes, with_padding

pytestmark = pytest.mark.usefixtures("float64")
Pair = tuple[int, int]
Padding = Literal["SAME", "VALID"] | tuple[Pair, Pair]
Case = tuple[Layout, Pair, Pair, Pair, Pair, Pair, Padding]
B, D, F = 2, 2, 4
EXAMPLES = 12
EQUATION = "BYXD,OPDF->BYXF"
ROWS = Layout(mesh="x:8", rules="height:x+")
LAYOUTS = (
    ROWS,
    Layout(mesh="x:8", rules="width:x+"),
    Layout(mesh="x:4,y:2", rules="height:x+;width:y+"),
    Layout(mesh="x:2,y:2,z:2", rules="batch:z;height:x+;height:y+"),
    Layout(mesh="x:2,y:2,z:2", rules="height:x+;width:y+;d_ff:z"),
    Layout(mesh="x:4,y:2", rules="width:x+;d_model:y", param_rules="d_ff:x"),
    Layout(mesh="x:4,y:2", rules="height:x+;width:y+;d_ff:x?;d_model:y?"),
)
small = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout; the size of images and kernel, strides, both dilations and padding."""
    kernel, strides, dilation, base = draw(small), draw(small), draw(small), draw(small)
    spans = [(size - 1) * spread + 1 for size, spread in zip(kernel, dilation, strict=True)]
    edge = [st.tuples(*[st.integers(-2, span - 1)] * 2) for span in spans]
    padding = draw(st.one_of(st.sampled_from(["SAME", "VALID"]), st.tuples(*edge)))
    edges = [(0, 0)] * 2 if isinstance(padding, str) else padding
    least = [
        max(-(-(span - 1 - sum(rows)) // between) + 1, 1)
        for span, rows, between in zip(spans, edges, base, strict=True)
    ]
    image = draw(st.tuples(*(st.integers(size, max(size, 17)) for size in least)))
    return draw(st.sampled_from(LAYOUTS)), image, kernel, strides, dilation, base, padding


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """What computes the value of a function of two arrays, and its gradients."""

    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(function, x, w)
        return y, *pull(dy)

    return jax.jit(run)


def padded(
    x: jax.Array, kernel: Pair, strides: Pair, dilation: Pair, base_dilation: Pair, padding: Padding
) -> jax.Array:
    """An image with zeros around it and between its rows.

    XLA's own padding reads beyond the image where a whole window is padding (CPUs, jax 0.10).
    """
    config = [(0, 0, 0)] * 4
    for i, size in enumerate(x.shape[1:3]):
        span, dilated = (kernel[i] - 1) * dilation[i] + 1, (size - 1) * base_dilation[i] + 1
        places = -(-size * base_dilation[i] // strides[i])
        total = max((places - 1) * strides[i] + span - dilated, 0)
        low = total // 2 if base_dilation[i] == 1 else min(-(-total // 2), span - 1)
        same = {"SAME": (low, total - low), "VALID": (0, 0)}
        rows = same[padding] if isinstance(padding, str) else padding[i]
        config[1 + i] = (*rows, base_dilation[i] - 1)
    return jax.lax.pad(x, x.dtype.type(0), config)


def check_equal(
    layout: Layout,
    image: Pair,
    kernel: Pair,
    strides: Pair = (1, 1),
    dilation: Pair = (1, 1),
    base_dilation: Pair = (1, 1),
    padding: Padding = "SAME",
) -> None:
    """Compares values and gradients with JAX's on one device; the padding of x is not zero."""

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        x = padded(x, kernel, strides, dilation, base_dilation, padding)
        return jax.lax.conv_general_dilated(
            x, w, strides, "VALID", rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s) for s in ((B, *image, D), (*kernel, D, F)))
    shape = jax.eval_shape(whole, x, w).shape
    dy = rng.normal(size=shape)
    before = with_padding(layout, Y=image[0], X=image[1])
    after = with_padding(layout, Y=shape[1], X=shape[2])

    def split(x: jax.Array, w: jax.Array) -> jax.Array:
        x_BYXD = before.reshard(x, "BYXD")
        for axis in "YX":
            x_BYXD = before.mask_padding(x_BYXD, "BYXD", axis, 7)
        y_BYXF = before.convolve(
            EQUATION, x_BYXD, w, strides=strides, dilation=dilation, base_dilation=base_dilation,
            padding=padding,
        )  # fmt: skip
        assert jax.typeof(y_BYXF).sharding.spec == layout.place("BYXF")
        return after.reshard(y_BYXF, "byxf")

    expected = with_gradients(whole)(x, w, dy)
    with jax.set_mesh(make_mesh(layout)):
        computed = with_gradients(split)(x, w, dy)
    for array, reference in zip(computed, expected, strict=True):
        np.testing.assert_allclose(array, reference, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=EXAMPLES)
@given(cases())
def test_a_split_convolution_equals_the_whole_one(case: Case) -> None:
    check_equal(*case)


@pytest.mark.parametrize(
    ("image", "kernel", "strides", "dilation", "base", "padding"),
    [
        ((7, 3), (2, 3), (1, 3), (1, 2), (2, 3), "VALID"),
        ((8, 1), (2, 3), (2, 3), (1, 3), (1, 2), ((1, 1), (6, 2))),
        ((7, 9), (3, 3), (2, 1), (1, 1), (3, 1), "VALID"),
    ],
)
def test_what_xla_refuses_to_compile_is_computed(
    image: Pair, kernel: Pair, strides: Pair, dilation: Pair, base: Pair, padding: Padding
) -> None:
    """XLA's algebraic simplifier aborts at the first two, in the forward or the backward pass."""
    layout = Layout(mesh="x:4,y:2", rules="width:x+;d_model:y", param_rules="d_ff:x")
    check_equal(layout, image, kernel, strides, dilation, base, padding)


def test_a_halo_may_come_from_several_neighbours() -> None:
    """A shard of 2 rows, whose windows reach 6 rows up and 6 down: three devices each way."""
    check_equal(ROWS, image=(16, 5), kernel=(5, 2), dilation=(3, 1))


def test_a_halo_comes_from_neighbours_whatever_the_order_of_the_mesh_axes() -> None:
    layout = Layout(mesh="x:2,y:2,z:2", rules="height:z;height:x;width:y+")
    check_equal(layout, image=(16, 5), kernel=(3, 2))


def test_shards_of_the_result_may_begin_anywhere() -> None:
    """19 rows are 3 a device, and the 10 of the result 2 a device: windows drift by a row each."""
    check_equal(ROWS, image=(19, 5), kernel=(3, 3), strides=(2, 2))


def test_the_axes_may_have_any_order() -> None:
    """Strides and dilation follow the kernel, whatever the order of the image's axes."""
    rng = np.random.default_rng(0)
    x_BYXD, w_OPDF = (rng.normal(size=size) for size in ((B, 16, 9, D), (3, 2, D, F)))

    @jax.jit
    def convolved(x_BYXD: jax.Array, x_BXYD: jax.Array) -> tuple[jax.Array, jax.Array]:
        slides: dict[str, Any] = {"strides": (2, 1), "dilation": (1, 3)}
        y_BYXF = ROWS.convolve(EQUATION, x_BYXD, w_OPDF, **slides)
        return y_BYXF, ROWS.convolve("BXYD,OPDF->FYXB", x_BXYD, w_OPDF, **slides)

    with jax.set_mesh(make_mesh(ROWS)):
        y_BYXF, y_FYXB = map(np.asarray, convolved(x_BYXD, x_BYXD.swapaxes(1, 2)))
    np.testing.assert_allclose(y_FYXB.transpose(3, 1, 2, 0), y_BYXF, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("stride", "base"), [(1, 2), (1, 3), (2, 3), (2, 4)])
def test_a_dilated_image_may_be_split(stride: int, base: int) -> None:
    """The cases of GShard's figure 13: windows begin between the same rows, or not."""
    for image in (16, 19):
        strides, dilations = (stride, 1), (base, 1)
        check_equal(ROWS, (image, 3), (4, 2), strides, base_dilation=dilations)
        check_equal(ROWS, (image, 3), (4, 2), strides, (2, 1), dilations, ((3, -1), (0, 2)))


@pytest.mark.parametrize(("taps", "between"), [(2, 2), (3, 2), (2, 3), (4, 2), (1, 2)])
def test_a_transposed_convolution_is_one_of_a_dilated_image(taps: int, between: int) -> None:
    rng = np.random.default_rng(0)
    x_BYXD, w_OPDF = (rng.normal(size=size) for size in ((B, 16, 4, D), (taps, taps, D, F)))
    expected = jax.lax.conv_transpose(
        x_BYXD, w_OPDF, (between, between), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    with jax.set_mesh(make_mesh(ROWS)):
        y_BYXF = jax.jit(
            lambda x, w: ROWS.convolve(EQUATION, x, w, base_dilation=(between, between))
        )(x_BYXD, w_OPDF)
    np.testing.assert_allclose(y_BYXF, expected, rtol=1e-12, atol=1e-12)


def check_split(
    layout: Layout,
    function: Callable[..., jax.Array],
    expected: Callable[..., jax.Array],
    *arrays: np.ndarray,
) -> None:
    """Compares values and gradients of a function under a layout with those of another."""
    dy = np.random.default_rng(1).normal(size=jax.eval_shape(expected, *arrays).shape)

    def run(function: Callable[..., jax.Array]) -> Any:
        y, pull = jax.vjp(function, *arrays)
        return jax.tree.map(np.asarray, (y, pull(dy)))

    with jax.set_mesh(make_mesh(layout)):
        computed = run(jax.jit(function))
    for array, reference in zip(
        jax.tree.leaves(computed), jax.tree.leaves(run(jax.jit(expected))), strict=True
    ):
        np.testing.assert_allclose(array, reference, rtol=1e-12, atol=1e-12)


def test_a_letter_of_all_operands_makes_groups() -> None:
    """Each of 4 groups, split over devices, has a kernel of its own; so has each channel."""
    layout = Layout(mesh="x:4,y:2", rules="heads:x;height:y")
    rng = np.random.default_rng(0)
    x_BYXHD, w_OPHDF = (rng.normal(size=s) for s in ((B, 8, 5, 4, D), (3, 2, 4, D, F)))

    def whole(x: jax.Array, w: jax.Array, groups: int) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    check_split(
        layout,
        lambda x, w: layout.convolve("BYXHD,OPHDF->BYXHF", x, w),
        lambda x, w: whole(
            x.reshape(B, 8, 5, 4 * D), w.transpose(0, 1, 3, 2, 4).reshape(3, 2, D, 4 * F), 4
        ).reshape(B, 8, 5, 4, F),
        x_BYXHD,
        w_OPHDF,
    )
    check_split(
        layout,
        lambda x, w: layout.convolve("BYXH,OPH->BYXH", x, w),
        lambda x, w: whole(x, w[:, :, None], 4),
        x_BYXHD[..., 0],
        w_OPHDF[..., 0, 0],
    )


def test_volumes_have_a_third_axis() -> None:
    """A model declares it."""
    layout = with_axes(
        Layout(mesh="x:2,y:2,z:2", rules="depth:x+;height:y;width:z+"),
        Axis("Z", "depth", pads=True),
        Axis("R", "kernel_depth", slides="Z"),
    )
    rng = np.random.default_rng(0)
    x_BZYXD, w_ROPDF = (rng.normal(size=s) for s in ((B, 5, 6, 7, D), (2, 3, 3, D, F)))
    after = with_padding(layout, Z=5, X=7)
    before = with_padding(layout, Z=5, X=7)

    def split(x: jax.Array, w: jax.Array) -> jax.Array:
        y_BZYXF = before.convolve("BZYXD,ROPDF->BZYXF", before.reshard(x, "BZYXD"), w)
        return after.reshard(y_BZYXF, "bzyxf")

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        )

    check_split(layout, split, whole, x_BZYXD, w_ROPDF)


@pytest.mark.parametrize("kind", ["max", "sum"])
@pytest.mark.parametrize("padding", ["SAME", "VALID", (1, 0)])
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 1), (2, 3)])
def test_pools_of_split_images_are_those_of_whole_ones(
    kind: Literal["max", "sum"], padding: convolution.Padding, size: int, stride: int
) -> None:
    """All numbers are negative, so that a zero from outside of the image would be the largest."""
    layout = Layout(mesh="x:4,y:2", rules="height:x+;width:y+")
    x_BYXD = -1 - np.random.default_rng(0).random((B, 15, 7, D))
    init, combine = (-np.inf, jax.lax.max) if kind == "max" else (0.0, jax.lax.add)
    rows = padding if isinstance(padding, str) else [(0, 0), padding, padding, (0, 0)]

    def whole(x: jax.Array) -> jax.Array:
        window, strides = (1, size, size, 1), (1, stride, stride, 1)
        return jax.lax.reduce_window(x, init, combine, window, strides, rows)

    shape = jax.eval_shape(whole, x_BYXD).shape
    before, after = with_padding(layout, Y=15, X=7), with_padding(layout, Y=shape[1], X=shape[2])

    def split(x: jax.Array) -> jax.Array:
        y_BYXD = before.pool(
            "BYXD", before.reshard(x, "BYXD"), {"Y": size, "X": size},
            strides={"Y": stride, "X": stride}, padding=padding, kind=kind,
        )  # fmt: skip
        return after.reshard(y_BYXD, "byxd")

    check_split(layout, split, whole, x_BYXD)


def test_sums_of_bfloat16_do_not_stop_at_256() -> None:
    whole = Layout(mesh="x:1", rules="")
    with jax.set_mesh(make_mesh(whole)):
        sums = whole.pool("BYX", jnp.ones((1, 40, 40), "bfloat16"), {"Y": 40, "X": 40}, kind="sum")
    assert sums.dtype == jnp.bfloat16 and float(sums[0, 0, 0]) == 1600


def test_what_is_no_convolution_is_an_error() -> None:
    for equation in ("BYXD,OPDF->BYX", "BYXD,DF->BF", "BYXD,OPDF", "BLYXD,OPDF->BLYXF"):
        with pytest.raises(ValueError, match=r"convolve '.*legal are equations such as"):
            ROWS.convolve(equation, jnp.zeros((1, 8, 8, D)), jnp.zeros((3, 3, D, F)))
    x, w = jnp.zeros((1, 8, 8, D)), jnp.zeros((3, 3, D, F))
    for named, message in (
        ({"padding": "valid"}, "legal padding is 'SAME', 'VALID' or two"),
        ({"padding": (1, 1)}, "legal padding is"),
        ({"padding": ((1, 2, 3), (1, 1))}, "legal padding is"),
        ({"strides": (0, 1)}, "whole numbers of at least 1"),
        ({"dilation": (1, 1.5)}, "whole numbers of at least 1"),
        ({"strides": (2,)}, "legal are 2 strides, dilations and paddings, for O, P"),
    ):
        with pytest.raises(ValueError, match=message):
            ROWS.convolve(EQUATION, x, w, **named)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"images of int64\.  Legal: floating point"):
        ROWS.convolve(EQUATION, x.astype(int), w)
    for named, message in (
        ({"kind": "mean"}, "Legal: 'max' or 'sum'"),
        ({"padding": 1}, "legal padding is"),
        ({"strides": {"X": 2}}, r"strides along \['X'\], without a window"),
    ):
        with pytest.raises(ValueError, match=message):
            ROWS.pool("BYXD", x, {"Y": 2}, **named)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pool 'BYXD': windows along \['Z'\]"):
        ROWS.pool("BYXD", jnp.zeros((1, 8, 8, D)), {"Z": 2})


def test_without_a_halo_the_law_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution.Shards, "halo", (0, 0))
    with pytest.raises(AssertionError, match="Not equal"):
        check_equal(ROWS, image=(16, 5), kernel=(3, 3))


def test_devices_exchange_nothing_but_the_halo() -> None:
    """One row from each side, of 4 rows of 5 x 2 numbers; the trace alone knows it, too."""
    layout = Layout(mesh="x:8", rules="height:x")
    mesh = make_mesh(layout)
    image = jax.ShapeDtypeStruct(
        (B, 32, 5, D), jnp.float32, sharding=NamedSharding(mesh, layout.place("BYXD"))
    )
    kernel = jax.ShapeDtypeStruct((3, 3, D, F), jnp.float32)
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda x, w: layout.convolve(EQUATION, x, w)).trace(image, kernel)
        compiled = CompiledText.read(traced.lower().compile().as_text() or "")
    expected = cost_of(traced.jaxpr.jaxpr, mesh.shape)

    def traffic(collectives: list[Collective] | tuple[Collective, ...]) -> list[tuple[Any, ...]]:
        return [(c.kind, c.mesh_axes, c.bytes) for c in collectives]

    row = ("collective-permute", ("x",), B * 5 * D * 4)
    assert traffic(expected.collectives) == traffic(compiled.collectives(mesh.shape)) == 2 * [row]
    assert all(c.source.startswith("tests/layouts/test_conv") for c in expected.collectives)
    assert expected.flops == compiled.flops == 2 * B * 4 * (5 * 3 - 2) * 3 * D * F


def convolve_on_one_mesh_axis(layout: Layout, sizes: Pair = (6, 5), **settings: Any) -> jax.Array:
    with jax.sharding.use_abstract_mesh(abstract_mesh({"x": 4})):
        layout = with_padding(layout, Y=sizes[0], X=sizes[1])
        x_BYXD = layout.reshard(jnp.zeros((B, *sizes, D)), "BYXD")
        return layout.convolve(EQUATION, x_BYXD, jnp.zeros((3, 3, D, F)), **settings)


def test_a_result_that_does_not_divide_is_an_error() -> None:
    rows = Layout(mesh="x:4", rules="height:x")
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda: convolve_on_one_mesh_axis(rows, (8, 5), padding="VALID"))
    for part in (EQUATION, "height = 6", "4 devices", "height 4 or 8", '"height:...+"'):
        assert part in str(error.value)


def test_a_kernel_larger_than_the_image_is_an_error() -> None:
    whole = Layout(mesh="x:4", rules="")
    with pytest.raises(UserError, match=r"spans 5 does not fit in width = 4.*Legal: width of at"):
        jax.eval_shape(
            lambda: convolve_on_one_mesh_axis(whole, (6, 4), padding="VALID", dilation=(1, 2))
        )


def recorded_trace(layout: Layout) -> dict[str, jax.Array]:
    w_OPDF = layout.random(jax.random.normal, jax.random.key(0), "OPDF", (3, 3, D, F), stored=True)
    x_BYXD = layout.iota("BYXD", (B, 6, 5, D), "Y").astype(jnp.float32)
    layout.convolve(EQUATION, x_BYXD, w_OPDF, strides=(2, 1))
    return {"w_OPDF": w_OPDF}


def test_lint_knows_the_product_and_its_sizes() -> None:
    recorded = record(recorded_trace, ())
    [product] = recorded.products
    assert product.equation == "BYXD,__DF->BYXF"  # the kernel is whole
    assert product.flops == 2 * B * (3 * 3 - 1) * (5 * 3 - 2) * D * F  # none with the padding
    layout = Layout(mesh="x:2", rules="height:x")
    problem = lint(layout, {"x": 2}, recorded, {})[0]
    assert problem.code == "indivisible" and "height = 3" in problem.message
    assert "test_convolution.py" in problem.subject and '"height:x+"' in problem.fix
    both = Layout(mesh="x:2", rules="height:x;d_ff:x")
    assert "conflict" in {problem.code for problem in lint(both, {"x": 2}, recorded, {})}
