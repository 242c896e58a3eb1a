"""Plans: the trace and the compiled program agree, and say what a run costs."""

import dataclasses
from collections.abc import Iterable

import jax
import pytest
from jax.sharding import AbstractMesh, Mesh

from layouts.absent_devices import has_compiler, topology_mesh
from layouts.cost.collectives import Collective, by_mesh_axis
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, make_mesh, mesh_sizes
from models.attention.flash import Implementation
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Dispatch, Moe
from models.feed_forward.moe.routing import TopK
from models.parts import Block
from models.positions.absolute import Learned
from models.positions.rotary import Rotary
from models.precision import Precision
from models.spec import OffloadedValue
from models.transformer import Transformer
from tests.toys import optax_promotion
from tests.trainer.planning.runs import (
    DENSE,
    EXPERTS,
    LAYOUTS,
    PAIR_TASK,
    RUNS,
    TASK,
    compilation_of_toy,
    compiled,
    compiled_toy,
    layout_named,
    toy_run,
    traced,
    traced_toy,
)
from tests.trainer.planning.traffic import CASES, FILE, golden, jax_version, traffic
from trainer.checks import step_flops
from trainer.planning.counts import Compilation
from trainer.planning.training import (
    StepCounts,
    TracedStep,
    compile_step,
    count_step,
    estimate_step,
    plan_from_trace,
    plan_step,
    trace_step,
)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_and_compiler_count_the_same_products(name: str) -> None:
    assert compiled_toy(name).work.flops == pytest.approx(traced_toy(name).cost.flops, rel=0.02)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_and_compiler_send_the_same_along_each_mesh_axis(name: str) -> None:
    if name == "pipeline" and tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
        pytest.skip("Before jax 0.12, what goes into a stage and out of it is gathered over data.")
    step = traced_toy(name)
    compiled_bytes = by_mesh_axis(compiled_toy(name).work.collectives, step.sizes)
    traced_bytes = by_mesh_axis(step.cost.collectives, step.sizes)
    assert compiled_bytes == pytest.approx(traced_bytes, rel=0.1)


@pytest.mark.parametrize("name", ["data_parallel", "data_and_model_parallel", "fsdp"])
def test_microbatches_compute_no_product_twice(name: str) -> None:
    """Nor does the trace have logits, most of the FLOPs here, that the compiler leaves out."""
    layout, once = layout_named(name), toy_run(dataclasses.replace(DENSE, layers=1, vocab=512))
    with optax_promotion():
        flops, several = (
            trace_step(run, layout, make_mesh(layout)).cost.flops
            for run in (once, dataclasses.replace(once, microbatches=2))
        )
    assert several == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize("name", ["data_parallel", "data_and_model_parallel", "sequence_parallel"])
def test_gradients_of_microbatches_cross_devices_once_a_step(name: str) -> None:
    """Those of scales, a hundredth of the bytes, cross once a microbatch."""
    step = traced("microbatches", name)
    once, several, predicted = (
        by_mesh_axis(collectives, step.sizes)["data"]
        for collectives in (
            compiled("dense", name).work.collectives,
            compiled("microbatches", name).work.collectives,
            step.cost.collectives,
        )
    )
    assert several == pytest.approx(once, rel=0.05)
    assert several == pytest.approx(predicted, rel=0.05)


WAITING = {
    "queries alone are split": (
        Layout(mesh="x:2,y:2", rules="batch:x;length:y;memory:y;queries:y"),
        {"heads": 4, "kv_heads": 2, "attention": MultiHead(combined_qkv=True)},
    ),
    "rows have a mesh axis of one device": (
        Layout(mesh="x:1,y:2", rules="batch:x;batch:y"),
        {"feed_forward": Moe(experts=4, dispatch="dropless")},
    ),
    "experts are padded": (
        Layout(mesh="x:2,y:2", rules="batch:x;experts:y+"), {"feed_forward": Moe(experts=3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITING)
def test_gradients_wait_however_weights_are_read(name: str) -> None:
    """A warning would fail this test."""
    layout, parts = WAITING[name]
    run = dataclasses.replace(
        toy_run(dataclasses.replace(DENSE, layers=1, **parts)), microbatches=2
    )
    with optax_promotion():
        step = trace_step(run, layout, make_mesh(layout))
    assert step.gradient_sums is not None and step.gradient_sums["step"]


def test_a_plan_counts_the_gradients_that_cross_devices_once_a_step() -> None:
    total = sum(leaf.size for leaf in jax.tree.leaves(traced_toy("data_parallel").state["params"]))
    scales = (2 * DENSE.layers + 1) * DENSE.d_model
    positions = Layout(mesh="data:1,context:4", rules="batch:data;length:context")
    with optax_promotion():
        of_positions = trace_step(RUNS["microbatches"], positions, make_mesh(positions))
    table = DENSE.length * DENSE.d_model  # of positions, which is split as they are
    for step, at_once in (
        (traced("microbatches", "data_parallel"), scales),
        (of_positions, scales + table),
    ):
        assert step.gradient_sums == {"step": total - at_once, "microbatch": at_once}
    sums = traced("microbatches", "fsdp").gradient_sums
    assert sums == {"step": 0, "microbatch": total}  # weights are split as rows are
    for kind, name in (
        ("dense", "data_parallel"), ("microbatches", "pipeline"), ("microbatches", "model_parallel")
    ):  # fmt: skip
        assert traced(kind, name).gradient_sums is None


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "name"), CASES, ids=str)
def test_compiled_steps_send_what_they_sent_when_the_golden_file_was_written(
    kind: str, name: str
) -> None:
    version, lines = golden()
    if version != jax_version():
        pytest.skip(f"{FILE.name} is of {version}: another compiler may choose other collectives.")
    assert list(traffic(kind, name)) == [
        line for line in lines if line.startswith(f"{kind} {name}:")
    ], "If this is meant, run: python -m tests.trainer.planning.traffic"


def test_the_golden_file_has_no_lines_of_other_cases() -> None:
    assert {line.partition(":")[0] for line in golden()[1]} == {" ".join(case) for case in CASES}


def test_every_collective_has_a_line_that_causes_it() -> None:
    collectives = compiled_toy("data_and_model_parallel").work.collectives
    sources = {collective.source for collective in collectives}
    assert all(source.startswith(("models/", "trainer/")) for source in sources)
    feed_forward = {source for source in sources if "feed_forward/mlp.py" in source}
    assert any("bf,fd->bd" in source and "(backward)" not in source for source in feed_forward)
    assert any("bd,df->bf" in source and "(backward)" in source for source in feed_forward)


def test_causes_add_up_to_the_memory_that_the_compiler_reports() -> None:
    step, compilation = traced_toy("fsdp"), compilation_of_toy("fsdp")
    counts = compiled_toy("fsdp")
    assert counts.memory.needed_bytes == reported_bytes(compilation)
    weights = plan_step(step, None, counts).weights
    assert counts.memory.bytes_by_cause["parameters"] == sum(w.bytes for w in weights) // 8


def test_a_cause_that_is_counted_twice_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    step, compilation = traced_toy("fsdp"), compilation_of_toy("fsdp")
    doubled = {cause: 2 * size for cause, size in step.argument_bytes.items()}
    monkeypatch.setattr(TracedStep, "argument_bytes", property(lambda _: dict(doubled)))
    assert count_step(step, compilation).memory.needed_bytes > reported_bytes(compilation)


def reported_bytes(compilation: Compilation) -> int:
    """Adds up what XLA reports: arguments, results that are no arguments, temporaries, code."""
    memory = compilation.executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes + code


def test_without_a_slice_neither_fit_nor_time_is_known() -> None:
    plan = plan_step(traced_toy("fsdp"), None, compiled_toy("fsdp"))
    assert plan.fits is None and plan.step_s is None and plan.utilisation is None


def test_what_needs_more_than_a_device_has_does_not_fit() -> None:
    topology, step = Topology.named("v3:2x2"), traced_toy("data_and_model_parallel")
    work, memory = estimate_step(step)
    limit = topology.chip.memory_bytes
    for needed_bytes, refused, fits in (
        (limit, False, True), (limit + 1, False, False), (limit, True, False),
    ):  # fmt: skip
        counted = memory._replace(needed_bytes=needed_bytes, out_of_memory=refused)
        assert plan_step(step, topology, StepCounts(work, counted)).fits is fits


def test_a_plan_of_a_slice_needs_no_compiler() -> None:
    plan = plan_from_trace(
        toy_run(),
        layout_named("data_and_model_parallel"),
        {"data": 4, "model": 2},
        Topology.named("v3:2x2"),
    )
    assert plan.memory.compiled_for is None and plan.memory.compile_s is None
    tokens, wide = 16 * DENSE.length, DENSE.heads * DENSE.d_kv
    attention = 4 * DENSE.length * wide  # with half of it masked
    layer = 2 * DENSE.d_model * (4 * wide + 2 * DENSE.d_ff) + attention / 2
    by_hand = 3 * tokens * (DENSE.layers * layer + 2 * DENSE.d_model * DENSE.vocab)
    assert plan.model_flops == pytest.approx(by_hand, rel=0.01)
    # The loss makes its gradients on the way forward, without computing anything twice.
    masked = 3 * tokens * DENSE.layers * attention / 2
    assert plan.masked_flops == pytest.approx(masked)
    assert plan.executed_flops == pytest.approx(plan.model_flops + masked, rel=0.02)
    peak = 4 * 123e12  # four chips, as Google publishes of v3
    assert plan.timing is not None and plan.step_s is not None
    assert plan.utilisation == pytest.approx(by_hand / (plan.step_s * peak), rel=0.02)
    assert plan.step_s > plan.timing.products_s > by_hand / peak
    assert set(plan.timing.traffic_s) <= {"data", "model", "data,model"}


@pytest.mark.parametrize(("name", "has_kernel"), [("v3:2x2", False), ("v5e:2x4", True)])
def test_a_plan_of_a_slice_uses_its_kernels(name: str, has_kernel: bool) -> None:
    """The kernel keeps no logits, so that most of the memory of plain attention is not needed."""
    model = Transformer(vocab=64, layers=1, d_model=32, d_ff=40, heads=8, d_kv=16, length=1024)
    run = dataclasses.replace(toy_run(model), task=dataclasses.replace(TASK, length=1024))
    layout, sizes = layout_named("data_and_model_parallel"), {"data": 4, "model": 2}
    models = (
        dataclasses.replace(model, attention=MultiHead(implementation=implementation))
        for implementation in ("auto", "plain")
    )
    plan, plain = (
        plan_from_trace(dataclasses.replace(run, model=model), layout, sizes, Topology.named(name))
        for model in models
    )
    assert (plan.memory.needed_bytes < plain.memory.needed_bytes / 4) == has_kernel
    reason = "splash" if has_kernel else "plain, there is no kernel for these devices"
    assert plan.attention == {"decoder": reason}
    assert plan.model_flops == plain.model_flops
    assert plan.executed_flops >= plan.model_flops


def test_a_plan_says_what_attends_in_each_part() -> None:
    run = RUNS["encoder-decoder"]
    task = dataclasses.replace(PAIR_TASK, length=128, source_length=96)
    topology = Topology.named("v5e:2x4")
    plan = plan_from_trace(
        dataclasses.replace(run, task=task, model=dataclasses.replace(run.model, length=128)),
        layout_named("data_parallel"),
        {"data": 8},
        topology,
    )
    length = "rows whose length on each device is not a multiple of 128"
    assert plan.attention["decoder"] == "splash"
    assert length in plan.attention["encoder"] and length in plan.attention["source"]


def test_padding_costs_what_a_model_of_the_padded_size_costs() -> None:
    """But the model asks for no more than it has: 6 heads held as 8, 66 tokens as 68."""
    layout = Layout(mesh="data:2,model:4", rules="batch:data;heads:model+;vocab:model+")
    padded, larger = (
        plan_from_trace(
            toy_run(dataclasses.replace(DENSE, layers=1, heads=heads, vocab=vocab)),
            layout,
            {"data": 2, "model": 4},
            None,
        )
        for heads, vocab in ((6, 66), (8, 68))
    )
    assert padded.executed_flops == larger.executed_flops
    assert padded.memory.bytes_by_cause["parameters"] == larger.memory.bytes_by_cause["parameters"]
    assert padded.model_flops < larger.model_flops
    head, token = 4 * DENSE.d_model * DENSE.d_kv, DENSE.d_model
    assert larger.parameters - padded.parameters == 2 * head + 2 * token


def long_row_step(
    implementation: Implementation,
    mesh: Mesh | AbstractMesh,
    offloads: tuple[OffloadedValue, ...] = (),
) -> TracedStep:
    """Traces a step with a row of 32,768 tokens on each of four devices."""
    model = Transformer(
        vocab=640, layers=2, d_model=256, d_ff=512, heads=8, d_kv=128, positions=Rotary(),
        attention=MultiHead(implementation=implementation), remat="full", remat_offloads=offloads,
        loss_chunks=4,
        precision=Precision(compute="bfloat16"),
    )  # fmt: skip
    task = dataclasses.replace(TASK, length=32_768)
    run = dataclasses.replace(toy_run(model), task=task, batch_sequences=4)
    with optax_promotion():
        return trace_step(run, layout_named("data_parallel"), mesh)


@pytest.mark.parametrize(("implementation", "fits"), [("auto", True), ("plain", False)])
def test_a_row_of_32768_tokens_fits_on_a_device_by_a_kernel(
    implementation: Implementation, fits: bool
) -> None:
    topology = Topology.named("v5e:2x2")
    step = long_row_step(implementation, abstract_mesh({"data": 4}, topology.chip.kind))
    assert plan_step(step, topology, estimate_step(step)).fits is fits


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
def test_a_row_of_32768_tokens_compiles_for_a_device() -> None:
    topology = Topology.named("v5e:2x2")
    step = long_row_step("auto", topology_mesh(topology.name, {"data": 4}))
    with optax_promotion():
        plan = plan_step(step, topology, compile_step(step))
    assert plan.fits and plan.memory.needed_bytes < 2**30
    assert any("splash" in op.source for op in plan.work.ops) and plan.work.host_bytes == 0


def test_a_trace_counts_the_memory_of_the_host_apart() -> None:
    mesh = abstract_mesh({"data": 4}, Topology.named("v5e:2x2").chip.kind)
    here, there = (
        estimate_step(long_row_step("auto", mesh, offloads)) for offloads in ((), ("layer_input",))
    )
    values = 2 * 32_768 * 256 * 2  # the inputs of two layers
    assert here.memory.needed_bytes - there.memory.needed_bytes >= values
    assert (here.work.host_bytes, there.work.host_bytes) == (0, values)


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
def test_what_is_offloaded_waits_on_the_host() -> None:
    """Layer inputs in bfloat16; on a slow link to the host, they take the time of the step."""
    topology = Topology.named("v5e:2x2")
    mesh = topology_mesh(topology.name, {"data": 4})
    step = long_row_step("auto", mesh, ("layer_input", "out_proj"))
    with optax_promotion():
        counts = compile_step(step)
    values = 2 * 2 * 32_768 * 256 * 2  # and copies that the compiler keeps there
    assert values <= counts.work.host_bytes < 2 * values
    assert estimate_step(step).work.host_bytes == values
    plan = plan_step(step, topology, counts)
    assert plan.timing is not None
    transfers_s = 2 * counts.work.host_bytes / topology.chip.host_bandwidth
    assert plan.timing.memory_s == transfers_s
    assert plan.timing.step_s >= transfers_s


def largest_sum_bytes(collectives: Iterable[Collective], mesh_axis: str) -> int:
    """The bytes of the largest array that devices along a mesh axis add up whole."""
    return max(c.bytes for c in collectives if c.kind == "all-reduce" and mesh_axis in c.mesh_axes)


@pytest.mark.few(3)
@pytest.mark.parametrize("combined_qkv", [False, True])
@pytest.mark.parametrize(
    ("name", "mesh_axis"),
    [("fsdp", "data"), ("two_dimensional", "x"), ("three_dimensional", "fsdp")],
)
def test_gradients_of_gathered_weights_are_scattered(
    name: str, mesh_axis: str, combined_qkv: bool
) -> None:
    """Only vectors are added up whole: the scales of norms, and figures of the experts."""
    gated = Mlp(gated=True)
    model = dataclasses.replace(
        EXPERTS, layers=2, tied=False, attention=MultiHead(combined_qkv=combined_qkv),
        positions=Learned(), feed_forward=gated,
        pattern=(
            Block(), Block(feed_forward=Moe(experts=16, dispatch="dropless", expert=gated))
        ),
    )  # fmt: skip
    layout = layout_named(name)
    with optax_promotion():
        step = trace_step(toy_run(model), layout, abstract_mesh(mesh_sizes(layout.mesh, 8)))
    assert largest_sum_bytes(step.cost.collectives, mesh_axis) <= 4 * model.d_model


@pytest.mark.parametrize(
    ("name", "platform"), [("v3:2x2", "TPU"), ("tpu7x:2x2x1", "TPU"), ("h100:2x4", "GPU")]
)
def test_the_step_compiles_for_devices_that_are_not_there(name: str, platform: str) -> None:
    if not has_compiler(platform.lower()):
        pytest.skip(f"the compiler for {platform}s is not installed")
    topology, sizes = Topology.named(name), {"data": 4, "model": 2}
    layout = layout_named("data_and_model_parallel")
    with optax_promotion():
        step = trace_step(toy_run(), layout, topology_mesh(topology.name, sizes))
        counts = compile_step(step)
    assert counts.work.flops == pytest.approx(step.cost.flops, rel=0.02)
    plan = plan_step(step, topology, counts)
    assert plan.memory.compiled_for == platform and plan.fits
    assert plan.timing is not None
    assert plan.timing.products_s > 0 and plan.timing.other_s > 0
    assert plan.step_s is not None and plan.step_s > plan.timing.products_s


@pytest.mark.parametrize("dispatch", ["einsum", "gather", "dropless"])
def test_model_flops_are_those_of_the_experts_that_a_token_chooses(dispatch: Dispatch) -> None:
    """Whatever the dispatch computes for empty slots, and whatever a window hides."""
    gated, choices, width, shared, window = Mlp(gated=True), 3, 56, 20, 6
    moe = Moe(experts=16, dispatch=dispatch, expert=gated, router=TopK(k=choices), d_ff=width,
              shared_d_ff=shared)  # fmt: skip
    blocks = Block(attention=MultiHead(window=window)), Block(feed_forward=moe)
    model = dataclasses.replace(DENSE, pattern=blocks)
    tokens, wide, d = 16 * model.length, model.heads * model.d_kv, model.d_model
    seen = window - window**2 / 2 / model.length, model.length / 2
    attention = sum(2 * 4 * d * wide + 4 * pairs * wide for pairs in seen)
    feed_forward = 2 * 2 * d * model.d_ff + 3 * 2 * d * (choices * width + shared)
    layers = model.layers / 2 * (attention + feed_forward)
    by_hand = 3 * tokens * (layers + 2 * d * model.vocab_rows)
    assert step_flops(toy_run(model)) == pytest.approx(by_hand, rel=1e-6)
