"""Kernels, interpreted on CPUs, attend as plain attention does, under the layouts they can."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from layouts.absent_devices import has_compiler, topology_mesh
from layouts.cost.dataflow import executed_equations
from layouts.cost.hardware import CHIPS
from layouts.layout import Layout
from layouts.mesh import make_mesh, uncached
from layouts.padding import with_padding
from layouts.shards import num_shards
from models.api import Batch
from models.attention import flash, triton
from models.attention.context import AttentionContext, cross_context, packed_context
from models.attention.flash import LIMITS, Choice, Implementation, Kernel, flash_attention
from models.attention.latent import Latent
from models.attention.mosaic import key_ranges
from models.attention.multi_head import MultiHead, MultiHeadAttention, SoftmaxAttention
from models.attention.plain import Operands
from models.attention.splash import block_sizes, deal, positions_of_shards
from models.initializers import Weights
from models.loss import Criterion
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import Precision
from models.spec import SavedProduct
from models.transformer import Transformer
from tests.toys import ROOT, WHOLE, absent_mesh, on_mesh, optax_promotion, pair_rows, toy

LENGTH, MEMORY, ROWS = 512, 256, 2
SPLASH = Kernel("splash", interpret=True)
TRITON = Kernel("triton", interpret=True)
SPLITS = {
    "whole": WHOLE,
    "batch and heads": Layout(mesh="data:2,model:2", rules="batch:data;heads:model"),
    "queries": Layout(mesh="data:2,model:3", rules="batch:data;queries:model"),
    "queries, or else heads": Layout(mesh="x:2", rules="queries:x;kv_heads:x?"),
    "heads that pad": Layout(mesh="x:4", rules="heads:x+"),
    "heads, or else length": Layout(mesh="x:2", rules="length:x?;heads:x"),
    "length": Layout(mesh="x:2", rules="length:x;memory:x"),
    "length, not keys": Layout(mesh="x:2", rules="length:x"),
    "length, undealt": Layout(mesh="data:2,x:4", rules="batch:data;length:x;memory:x"),
    "length over two mesh axes": Layout(
        mesh="x:2,y:2", rules="length:y;length:x;memory:y;memory:x;heads:y?"
    ),
    "length and heads": Layout(mesh="x:2,y:2", rules="length:y;memory:y;heads:x"),
}
SOME = ("whole", "batch and heads")
IN_CONTEXT = ("length", "length, undealt")
ATTENTIONS: dict[str, SoftmaxAttention] = {
    "causal": MultiHead(),
    "encoder": MultiHead(),
    "cross": MultiHead(),
    "window": MultiHead(window=300),
    "short window": MultiHead(window=100, logit_cap=0.5),
    "cap": MultiHead(logit_cap=0.5),
    "sinks": MultiHead(sinks=True, window=300),
    "latent": Latent(latent=9, rotated=4),
}
CASES = [
    *((SPLASH, "causal", name) for name in SPLITS),
    *((SPLASH, kind, name) for kind in ("encoder", "cross") for name in (*SOME, *IN_CONTEXT)),
    *((SPLASH, kind, name) for kind in ("window", "cap", "latent") for name in ("whole", "length")),
    *((SPLASH, "short window", name) for name in ("whole", *IN_CONTEXT)),
    *((SPLASH, "sinks", name) for name in ("heads that pad", "length and heads")),
    *((TRITON, kind, name) for kind in ("causal", "encoder") for name in SOME),
]
SPEC = toy(heads=12, kv_heads=2, d_kv=8)


def segments(length: int) -> np.ndarray:
    """Two rows of three segments and padding; each segment has tokens."""
    ends = np.array([[0.3, 0.5, 0.9], [0.1, 0.6, 1.0]]) * length
    places = np.arange(length)[None, :, None]
    ids = 1 + (places >= ends[:, None].astype(int)).sum(-1)
    return np.where(ids > 3, 0, ids).astype(np.int32)


def context_of(kind: str, layout: Layout, kernel: Kernel | None) -> AttentionContext:
    segments_BL = layout.reshard(jnp.asarray(segments(LENGTH)), "BL")
    if kind != "cross":
        causal, window = kind != "encoder", ATTENTIONS[kind].window
        return packed_context(
            layout, segments_BL, segments_BL, causal=causal, window=window, kernel=kernel
        )
    memory = np.random.default_rng(7).normal(size=(ROWS, MEMORY, SPEC.d_model))
    memory_BMD = layout.reshard(jnp.asarray(memory, jnp.float32), "BMD")
    segments_BM = layout.reshard(jnp.asarray(segments(MEMORY)), "BM")
    return cross_context(layout, segments_BL, segments_BM, memory_BMD, kernel=kernel)


@functools.cache
def outputs(kind: str, layout: Layout, kernel: Kernel | None) -> dict[str, np.ndarray]:
    """Returns the output of one attention layer, and its gradients, for random weights."""
    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(2, ROWS, LENGTH, SPEC.d_model)).astype(np.float32)
    layout = with_padding(layout, **SPEC.sizes)
    attention = ATTENTIONS[kind]
    build = attention.build_cross if kind == "cross" else attention.build

    def made() -> Any:
        weights = Weights(layout, SPEC.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        return build(SPEC.blocks[0], SPEC, layout, weights)

    @jax.jit
    def computed() -> dict[str, Any]:
        graph, params = nnx.split(made())

        def objective(params: nnx.State, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
            y_BLD, _ = nnx.merge(graph, params)(x_BLD, context_of(kind, layout, kernel))
            return jnp.sum(y_BLD * layout.reshard(jnp.asarray(dy), "BLD")), y_BLD

        x_BLD = layout.reshard(jnp.asarray(x), "BLD")
        gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
        (dparams, dx_BLD), y_BLD = gradient(params, x_BLD)
        return {"dx_BLD": dx_BLD, "y_BLD": y_BLD, **nnx.to_pure_dict(dparams)}

    with jax.set_mesh(make_mesh(layout)), optax_promotion():
        leaves, _ = jax.tree.flatten_with_path(jax.device_get(computed()))
    return {jax.tree_util.keystr(path): array for path, array in leaves}


@pytest.mark.few(12)
@pytest.mark.parametrize(("kernel", "kind", "name"), CASES)
def test_a_kernel_attends_as_plain_attention_does(kernel: Kernel, kind: str, name: str) -> None:
    expected = outputs(kind, WHOLE, None)
    computed = outputs(kind, SPLITS[name], kernel)
    for path, array in expected.items():
        part = tuple(map(slice, array.shape))  # without what pads
        np.testing.assert_allclose(
            computed[path][part], array, rtol=0, atol=1e-5 * np.abs(array).max(), err_msg=path
        )
        assert np.abs(array).max() > 0.1


@pytest.mark.parametrize("rules", ["length:x;length:y", "length:y;length:x", "length:y"])
def test_each_device_gets_as_many_blocks_below_the_diagonal(rules: str) -> None:
    """What is dealt is what masks say, and comes back; also over mesh axes in any order."""
    layout = Layout(mesh="x:2,y:4", rules=rules)
    entry = layout.place("BL")[1]

    def dealt(x_BL: jax.Array) -> jax.Array:
        return jnp.stack([deal(x_BL, entry, 1), deal(deal(x_BL, entry, 1), entry, 1)])

    with jax.set_mesh(make_mesh(layout)):
        shards = num_shards(entry)
        x_BL = layout.reshard(jnp.arange(4 * shards, dtype=jnp.int32)[None], "BL")
        mapped = layout.shard_map(dealt, "BL->WBL", check_vma=False)
        (positions,), (returned,) = map(np.asarray, mapped(x_BL))
    np.testing.assert_array_equal(positions, positions_of_shards(shards, 4, is_dealt=True))
    np.testing.assert_array_equal(returned, np.arange(4 * shards))
    computed_keys = (positions + 1).reshape(shards, -1).sum(1)
    assert set(computed_keys) == {2 * (4 * shards + 1)}


def pairs() -> Batch:
    sources = [[30, 40, 50], [MEMORY]]
    return pair_rows([[100, 60, 90], [200]], sources, LENGTH, SPEC.vocab, source_length=MEMORY)


def gradient_of(spec: Transformer, layout: Layout) -> tuple[int, Any]:
    """Returns how often a kernel attends in a gradient, and the gradient of a model's weights."""
    model, (mesh, batch) = spec.model(layout), on_mesh(layout, pairs())

    def objective(params: Any) -> jax.Array:
        return model.loss(params, batch, Criterion()).objective

    with jax.set_mesh(mesh), optax_promotion():
        params = jax.jit(model.init)(jax.random.key(0))
        traced = jax.jit(jax.grad(objective)).trace(params)
        gradient = traced.lower().compile()(params)
        kernels = executed_equations(traced.jaxpr.jaxpr)
        calls = (times for eqn, times in kernels if "fwd" in eqn.params.get("name", ""))
        return sum(calls), jax.device_get(gradient)


@pytest.mark.few(1)
@pytest.mark.parametrize("saves", [(), ("context",)])
def test_flash_trains_as_plain_does(saves: tuple[SavedProduct, ...]) -> None:
    """Encoder, decoder and cross-attention of a whole model, in a scan and rematerialized."""
    layout = Layout(mesh="data:2,model:3", rules="batch:data;heads:model")
    changes = {"encoder_layers": 1, "positions": Rotary(), "scan": True, "remat": "full"}
    flash = toy(attention=MultiHead(implementation="flash"), remat_saves=saves, **changes)
    attentions = flash.encoder_layers + 2 * flash.layers
    calls, computed = gradient_of(flash, layout)
    plain_calls, expected = gradient_of(toy(**changes), layout)
    assert (calls, plain_calls) == (attentions if saves else 2 * attentions, 0)
    jax.tree.map(
        lambda flash, plain: np.testing.assert_allclose(
            flash, plain, rtol=0, atol=1e-5 * np.abs(plain).max()
        ),
        computed,
        expected,
    )


@pytest.mark.parametrize(
    ("chip", "length", "window", "expected"),
    [
        ("v5e", 8192, None, (1024, 512)),
        ("v5p", 8192, None, (1024, 256)),
        ("v6e", 4096, None, (1024, 512)),
        ("v6e", 8192, None, (2048, 512)),
        ("tpu7x", 16384, None, (2048, 512)),
        ("tpu7x", 8192, 128, (1024, 512)),
    ],
)
def test_blocks_are_those_of_the_chip(
    chip: str, length: int, window: int | None, expected: tuple[int, int]
) -> None:
    with jax.sharding.use_abstract_mesh(absent_mesh(CHIPS[chip].kind, "tpu", x=1)):
        sizes = block_sizes(length, length, 256, window)
    assert (sizes.block_q, sizes.block_kv_compute) == expected
    assert sizes.block_q == sizes.block_kv == sizes.block_q_dkv == sizes.block_kv_dkv


def test_the_docs_show_the_limits_of_the_kernels() -> None:
    rows = [
        f"| {limit['case']} | {limit['reason']} | {', '.join(limit['kernels'])} |"
        for limit in LIMITS
    ]
    head = ["| plain attention for | because | instead of |", "| --- | --- | --- |"]
    assert "\n".join([*head, *rows]) in (ROOT / "docs" / "attention.md").read_text()


def choice_of(
    spec: Transformer,
    layout: Layout = WHOLE,
    lengths: tuple[int, int] = (256, 256),
    **changes: bool,
) -> Choice:
    """Returns the choice of a model's attention; of training if the changes say so."""
    return spec.attention_choice(spec.blocks[0], layout, lengths, **{"training": False, **changes})


def chosen(kind: str, platform: str, **changes: Any) -> Choice:
    """Returns the choice of an attention on devices of a kind."""
    spec = toy(**{"d_kv": 64, **changes.pop("spec", {})})
    enables_x64 = changes.pop("x64", False)
    with (
        jax.sharding.use_abstract_mesh(absent_mesh(kind, platform, x=2)),
        jax.enable_x64(enables_x64),
    ):
        return choice_of(spec, **changes)


@pytest.mark.parametrize(
    ("kind", "platform", "implementation", "kernel"),
    [
        ("TPU v4", "tpu", "auto", Kernel("splash")),
        ("TPU v5 lite", "tpu", "flash", Kernel("splash")),
        ("TPU v5 lite", "tpu", "plain", None),
        ("TPU v3", "tpu", "flash", None),
        ("NVIDIA A100-SXM4-80GB", "gpu", "auto", Kernel("triton")),
        ("Tesla V100-SXM2-16GB", "gpu", "auto", None),
        ("cpu", "cpu", "auto", None),
        ("cpu", "cpu", "flash", SPLASH),
    ],
)
def test_the_devices_of_the_mesh_choose_the_kernel(
    kind: str, platform: str, implementation: Implementation, kernel: Kernel | None
) -> None:
    attention = MultiHead(implementation=implementation)
    choice = chosen(kind, platform, spec={"attention": attention})
    assert choice.kernel == kernel
    assert bool(choice.reason) == (kernel is None)


def test_on_a_hopper_tokamax_computes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is products of 16 bits; its own kernel asks the GPU, which a plan has not."""
    hopper = "NVIDIA H100 80GB HBM3", "gpu"
    bfloat16 = {"spec": {"precision": Precision(compute="bfloat16")}}
    assert "GPU" in chosen(*hopper).reason or "not installed" in chosen(*hopper).reason
    monkeypatch.setattr(flash, "missing_mosaic", lambda: None)
    assert chosen(*hopper, **bfloat16) == Choice(Kernel("mosaic"))
    assert chosen("NVIDIA A100", "gpu", **bfloat16) == Choice(Kernel("triton"))
    wide = chosen(*hopper)
    assert wide.kernel == Kernel("triton")
    assert "float32" in wide.reason


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1), (True, 9), (False, None)])
def test_the_keys_of_a_query_are_a_range(*, causal: bool, window: int | None) -> None:
    segments_BL = jnp.asarray(segments(LENGTH))
    first_BL, end_BL = map(np.asarray, key_ranges(segments_BL, window))
    keys_M = np.arange(LENGTH)
    if causal:
        end_BL = keys_M[None] + 1
    computed = (first_BL[..., None] <= keys_M) & (keys_M < end_BL[..., None])
    with jax.set_mesh(make_mesh(WHOLE)):
        context = packed_context(WHOLE, segments_BL, segments_BL, causal=causal, window=window)
    np.testing.assert_array_equal(computed, context.mask_BLM)


@pytest.mark.parametrize("module", [triton.MODULE + "_of_old", "jax.no_such_package.attention"])
def test_without_kernels_of_jax_attention_on_gpus_is_plain(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Also where the package of the kernels is gone, at which `find_spec` raises."""
    monkeypatch.setattr(triton, "MODULE", module)
    choice = chosen("NVIDIA A100-SXM4-80GB", "gpu")
    assert choice == Choice(None, f"jax {jax.__version__} has no {module}")


def test_without_devices_attention_is_plain() -> None:
    assert choice_of(toy()).kernel is None


def by_rules(rules: str) -> dict[str, Any]:
    return {"layout": Layout(mesh="x:2", rules=rules)}


LIMITED: list[tuple[str, dict[str, Any]]] = [
    ("Relative", {"spec": {"positions": Relative()}}),
    ("logit_cap", {"spec": {"attention": MultiHead(logit_cap=30.0)}}),
    ("MultiHead.sinks", {"spec": {"attention": MultiHead(sinks=True)}}),
    ("MultiHead.dropout", {"spec": {"attention": MultiHead(dropout=0.1)}, "training": True}),
    ("splits `length`", by_rules("length:x")),
    ("splits `length`", by_rules("length:x;memory:x")),
    ("splits `d_kv`", by_rules("memory:x")),
    ("splits `d_kv`", by_rules("d_kv:x")),
    ("`window`", {"spec": {"attention": MultiHead(window=255)}}),
    ("@Latent()", {"spec": {"attention": Latent(latent=16)}}),
    ("multiple of 128", {"lengths": (256, 200)}),
    ("multiple of 128", {"lengths": (384, 384), **by_rules("length:x")}),
    ("JAX_ENABLE_X64", {"x64": True}),
    ("a source", {"is_cross": True}),
    ("`d_kv` below", {"spec": {"d_kv": 8}}),
    ("Precision.compute", {}),
]
UNLIMITED: list[dict[str, Any]] = [
    {"spec": {"attention": MultiHead(dropout=0.1)}},
    {"spec": {"attention": MultiHead(window=256)}},
    by_rules("batch:x"),
    by_rules("heads:x;length:x?;memory:x?"),
    {"spec": {"positions": Rotary(), "attention": MultiHead(chunks=2)}, "training": True},
]


@pytest.mark.parametrize(("words", "changes"), LIMITED)
def test_what_a_kernel_cannot_is_plain_and_says_why(words: str, changes: dict[str, Any]) -> None:
    (limit,) = (limit for limit in LIMITS if words in limit["case"])
    for name, device in (("splash", ("TPU v4", "tpu")), ("triton", ("NVIDIA A100", "gpu"))):
        choice = chosen(*device, **changes)
        assert (choice.kernel is None) == (name in limit["kernels"])
        assert words in choice.reason or choice.kernel is not None


@pytest.mark.parametrize("changes", UNLIMITED)
def test_all_else_a_kernel_can(changes: dict[str, Any]) -> None:
    assert chosen("NVIDIA A100", "gpu", **changes).kernel == Kernel("triton")


def test_each_limit_has_a_test() -> None:
    assert all(any(words in limit["case"] for words, _ in LIMITED) for limit in LIMITS)


def argument(
    layout: Layout, mesh: Mesh | AbstractMesh, axes: str, shape: tuple[int, ...], dtype: str
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.place(axes)))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # JAX 0.12
def test_the_kernel_for_gpus_lowers_without_one() -> None:
    """Its blocks, types and shards; whether they fit into shared memory only a GPU says."""
    layout = SPLITS["batch and heads"]

    def objective(q_BJQLK: jax.Array, k_BJMK: jax.Array, segments_BL: jax.Array) -> jax.Array:
        operands, segments = Operands(q_BJQLK, k_BJMK, k_BJMK), (segments_BL, segments_BL)
        y_BJQLK = flash_attention(layout, Kernel("triton"), operands, *segments, causal=True)
        return jnp.sum(y_BJQLK.astype(jnp.float32))

    mesh = absent_mesh("NVIDIA H100 80GB HBM3", "gpu", data=2, model=2)
    with jax.sharding.use_abstract_mesh(mesh), optax_promotion():
        traced = jax.jit(jax.grad(objective, argnums=(0, 1))).trace(
            argument(layout, mesh, "BJQLK", (2, 4, 2, 256, 128), "bfloat16"),
            argument(layout, mesh, "BJMK", (2, 4, 256, 128), "bfloat16"),
            argument(layout, mesh, "BL", (2, 256), "int32"),
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r'name = "(mha_\w+)"', text)) >= {"mha_forward", "mha_backward"}


SLICES = {"v5e:4x4": (4, 4), "v5p:2x2x1": (2, 2), "v6e:4x4": (4, 4)}


def temporary_bytes(slice: str, kernel: Kernel | None) -> int:
    """Compiles the gradient of grouped causal attention over 4,096 tokens for absent TPUs."""
    data, model = SLICES[slice]
    layout = Layout(mesh=f"data:{data},model:{model}", rules="batch:data;heads:model")
    mesh = topology_mesh(slice, {"data": data, "model": model})
    spec = toy(d_kv=128, heads=4 * model, kv_heads=2 * model)

    def objective(q_BJQLK: jax.Array, k_BJMK: jax.Array, segments_BL: jax.Array) -> jax.Array:
        context = packed_context(layout, segments_BL, segments_BL, kernel=kernel)
        weights = Weights(layout, spec.sizes, nnx.Rngs(0), "bfloat16")
        layer = MultiHeadAttention(spec.attention, spec.blocks[0], spec, layout, weights)
        y_BJQLK = layer.attend(Operands(q_BJQLK, k_BJMK, k_BJMK), context, None)
        return jnp.sum(y_BJQLK.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(objective, argnums=(0, 1)))
    with jax.set_mesh(mesh), optax_promotion(), uncached():
        compiled = gradient.lower(
            argument(layout, mesh, "BJQLK", (data, 2 * model, 2, 4096, 128), "bfloat16"),
            argument(layout, mesh, "BJMK", (data, 2 * model, 4096, 128), "bfloat16"),
            argument(layout, mesh, "BL", (data, 4096), "int32"),
        ).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize("slice", SLICES)
def test_a_kernel_needs_a_tenth_of_the_memory(slice: str) -> None:
    needed_bytes = temporary_bytes(slice, Kernel("splash"))
    assert 0 < 10 * needed_bytes < temporary_bytes(slice, None)


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize(
    ("widths", "window", "cap"),
    [((128, 128), None, None), ((192, 128), None, 30.0), ((64, 64), 1024, 30.0)],
)
def test_rows_over_several_devices_compile_for_tpus(
    widths: tuple[int, int], window: int | None, cap: float | None
) -> None:
    """Of 32,768 tokens on four devices, whose logits would take 8.6 GB on each."""
    layout = Layout(mesh="data:4,x:4", rules="batch:data;length:x;memory:x")
    mesh = topology_mesh("v5e:4x4", {"data": 4, "x": 4})
    length, shape = 32_768, (4, 2)

    def objective(*arrays: jax.Array) -> jax.Array:
        operands, segments = Operands(*arrays[:3]), arrays[3:]
        y_BJQLK = flash_attention(
            layout, Kernel("splash"), operands, *segments, causal=True, window=window, logit_cap=cap
        )
        return jnp.sum(y_BJQLK.astype(jnp.float32) ** 2)

    segments_BL = argument(layout, mesh, "BL", (4, length), "int32")
    with jax.set_mesh(mesh), optax_promotion(), uncached():
        compiled = (
            jax.jit(jax.grad(objective, argnums=(0, 1, 2)))
            .lower(
                argument(layout, mesh, "BJQLK", (*shape, 4, length, widths[0]), "bfloat16"),
                *(
                    argument(layout, mesh, "BJMK", (*shape, length, each), "bfloat16")
                    for each in widths
                ),
                *[segments_BL] * 2,
            )
            .compile()
        )
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < 1e9
