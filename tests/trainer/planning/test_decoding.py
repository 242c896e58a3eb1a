"""Tests plans of decoding: the trace and the compiled program agree, and both with sums by hand."""

import dataclasses
import functools

import pytest

from configs.load import load
from layouts.absent_devices import has_compiler, topology_mesh
from layouts.cost.collectives import by_mesh_axis
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, make_mesh
from models.decoding.beam import Beam
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import TopK
from models.parts import Block
from models.positions.absolute import Sinusoidal
from models.positions.relative import Relative
from models.transformer import Transformer
from tests.toys import ROOT
from tests.trainer.planning.runs import PAIR_TASK, layout_named, toy_run
from trainer.decoding.decoder import padded
from trainer.planning.counts import slice_mesh
from trainer.planning.decoding import (
    DecodeCounts,
    TracedDecode,
    compile_decode,
    estimate_decode,
    plan_decode,
    trace_decode,
)
from trainer.run import Run
from trainer.traces import DecodeShape

ROWS, PROMPT, NEW, SOURCE, WIDTH, SUFFIX = 8, 6, 10, 12, 3, 4
RELATIVE = Relative()
DENSE = Transformer(vocab=64, layers=2, d_model=32, d_ff=80, heads=8, d_kv=12, positions=RELATIVE)
PAIRS = dataclasses.replace(  # a scan of one turn would be no loop
    DENSE,
    encoder_layers=4,
    layers=4,
    pattern=(Block(), Block(feed_forward=Moe(experts=16, dispatch="einsum"))),
)
# A model, how it is searched and a layout that suits its serving.
CASES: dict[str, tuple[Transformer, Search, str]] = {
    "flat beam": (DENSE, Beam(WIDTH), "data_and_model_parallel"),
    "samples": (DENSE, Sampling(1.0, 5, None, WIDTH), "model_parallel"),
    "pairs, experts, beam": (PAIRS, Beam(WIDTH, flat=False), "expert_and_model_parallel"),
}


def run_of(model: Transformer) -> Run:
    return toy_run(model) if not model.has_encoder else dataclasses.replace(
        toy_run(), model=model, task=PAIR_TASK
    )  # fmt: skip


def shape_of(model: Transformer, search: Search) -> DecodeShape:
    suffix = SUFFIX if isinstance(search, Sampling) else 0
    return DecodeShape(search, ROWS, SOURCE if model.has_encoder else 0, PROMPT, NEW, suffix)


@functools.cache
def traced_toy(case: str) -> TracedDecode:
    model, search, name = CASES[case]
    layout = layout_named(name)
    return trace_decode(run_of(model), layout, make_mesh(layout), shape_of(model, search))


@functools.cache
def compiled_toy(case: str) -> DecodeCounts:
    return compile_decode(traced_toy(case))


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_trace_and_compiler_count_the_same(case: str) -> None:
    step, counts = traced_toy(case), compiled_toy(case)
    for part, expected in zip(counts.work, step.work, strict=True):
        if part is None or expected is None:
            assert part is expected and case != "samples"
            continue
        assert part.flops == pytest.approx(expected.flops, rel=0.02)
        compiled_bytes = by_mesh_axis(part.collectives, step.sizes)
        traced_bytes = by_mesh_axis(expected.collectives, step.sizes)
        # A CPU exchanges small integers of the search in ways of its own: nothing of a layer.
        assert compiled_bytes["model"] == pytest.approx(traced_bytes["model"], rel=0.15)


def test_devices_that_split_the_batch_alone_exchange_nothing() -> None:
    """Not even whether all texts are done: each has a loop of its own."""
    layout = layout_named("data_parallel")
    shape = shape_of(DENSE, Beam(WIDTH))
    step = trace_decode(run_of(DENSE), layout, make_mesh(layout), shape)
    counts = compile_decode(step)
    for part, expected in zip(counts.work[:2], step.work[:2], strict=True):
        assert part is not None and expected is not None
        assert part.flops == pytest.approx(expected.flops, rel=0.02)
        assert not part.collectives


def test_products_and_cache_are_those_of_the_model() -> None:
    plan = plan_decode(traced_toy("flat beam"), None, compiled_toy("flat beam"))
    wide, places = DENSE.heads * DENSE.d_kv, PROMPT + WIDTH * padded(NEW)
    layer = 2 * DENSE.d_model * (4 * wide + 2 * DENSE.d_ff) + 4 * places * wide
    softmax = 2 * DENSE.d_model * DENSE.vocab
    tokens = PROMPT + WIDTH * NEW
    by_hand = ROWS * (tokens * DENSE.layers * layer + WIDTH * NEW * softmax)
    bias = 2 * DENSE.layers * RELATIVE.buckets * DENSE.heads  # looked up by a product or not
    assert by_hand <= plan.model_flops <= by_hand + ROWS * tokens * places * bias
    keys_and_values = 2 * 4 * DENSE.layers * ROWS * places * wide
    assert plan.cache_bytes == pytest.approx(keys_and_values, rel=0.01)
    assert plan.memory.bytes_by_cause["cache"] == pytest.approx(keys_and_values / 8, rel=0.01)
    assert plan.fits is None and plan.output_s is None  # nobody said what the devices are


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["whole", "data_parallel", "expert_and_model_parallel"])
def test_model_flops_of_experts_are_those_of_the_dense_model_of_their_width(name: str) -> None:
    layout, router, width = layout_named(name), TopK(k=3), 20
    moe = Moe(experts=16, router=router, d_ff=width)
    models = (
        dataclasses.replace(DENSE, pattern=(Block(feed_forward=moe),)),
        dataclasses.replace(DENSE, d_ff=router.k * width),
    )
    experts, dense = (
        plan_decode(step, None, estimate_decode(step)).model_flops
        for step in (
            trace_decode(run_of(model), layout, make_mesh(layout), shape_of(model, Beam(WIDTH)))
            for model in models
        )
    )
    assert experts == dense


def test_weights_of_8_bits_are_a_quarter_of_those_in_float32() -> None:
    model, search, name = CASES["flat beam"]
    shape = shape_of(model, search)._replace(weights="int8")
    layout = layout_named(name)
    step, stored = (
        trace_decode(run_of(model), layout, make_mesh(layout), shape),
        traced_toy("flat beam"),
    )
    plan, other = (plan_decode(each, None, estimate_decode(each)) for each in (step, stored))
    rounded, whole = (each.memory.bytes_by_cause["parameters"] for each in (plan, other))
    assert whole / 4 < rounded < whole / 3 and plan.parameters == other.parameters
    assert step.work.token.read_bytes < stored.work.token.read_bytes


def test_a_suffix_is_read_behind_all_samples_at_once() -> None:
    step, counts = traced_toy("samples"), compiled_toy("samples")
    assert step.work.suffix is not None and counts.work.suffix is not None
    wide, places = DENSE.heads * DENSE.d_kv, PROMPT + WIDTH * (padded(NEW) + SUFFIX)
    layer = 2 * DENSE.d_model * (4 * wide + 2 * DENSE.d_ff) + 4 * places * wide
    tokens = ROWS * WIDTH * SUFFIX
    by_hand = tokens * (DENSE.layers * layer + 2 * DENSE.d_model * DENSE.vocab)
    assert counts.work.suffix.flops * 8 == pytest.approx(by_hand, rel=0.05)
    plan = plan_decode(step, None, counts)
    assert plan.executed_flops == 8 * (
        counts.work.prefill.flops + NEW * counts.work.token.flops + counts.work.suffix.flops
    )
    positions = 8 * ROWS * places  # on every device
    assert plan.cache_bytes == 4 * (2 * DENSE.layers * ROWS * places * wide + positions)


def test_a_token_waits_for_the_memory() -> None:
    """The guide's 64B model on the smaller of its slices (Huang et al., Table 2): 4 GB of cache."""
    files = ["configs/models/giant_64b.gin", "layouts/model_parallel.gin"]
    config = load([str(ROOT / file) for file in files], ["Precision.store = 'bfloat16'"])
    topology, shape = Topology.named("v3:4x2"), DecodeShape(Sampling(width=16), 1, 0, 1024, 64)
    mesh = slice_mesh({"model": 16}, topology)
    step = trace_decode(config.make(Run), config.make(Layout), mesh, shape)
    plan = plan_decode(step, topology, estimate_decode(step))
    assert plan.cache_bytes == pytest.approx(4 * 2**30, rel=0.01)
    assert plan.fits and plan.timings is not None
    weights = 2 * plan.parameters / 16 / topology.chip.memory_bandwidth
    assert weights < plan.timings.token.memory_s < 1.1 * weights
    prefill, token, _ = plan.timings
    assert token.step_s > token.memory_s > 3 * token.products_s
    assert plan.output_s == pytest.approx(prefill.step_s + 64 * token.step_s)
    assert plan.tokens_per_s == pytest.approx(64 / (plan.output_s or 0))


def test_what_every_device_computes_again_is_executed_but_not_asked_for() -> None:
    layout = Layout(mesh="data:4,model:2", rules="heads:model;d_ff:model;vocab:model")
    step = trace_decode(toy_run(DENSE), layout, abstract_mesh({"data": 4, "model": 2}),
                  shape_of(DENSE, Beam(WIDTH)))  # fmt: skip
    plan = plan_decode(step, None, estimate_decode(step))
    assert plan.executed_flops == pytest.approx(4 * plan.model_flops, rel=0.02)


def traced_experts(experts: int, devices: int, rows: int) -> TracedDecode:
    """Traces greedy decoding of a model whose layers have small experts, sharded with the rows."""
    sizes = {"data": devices}
    layout = Layout(mesh=f"data:{devices}", rules="batch:data;experts:data")
    moe = Moe(experts=experts, d_ff=8)
    model = dataclasses.replace(DENSE, feed_forward=moe, positions=Sinusoidal())
    shape = DecodeShape(Sampling(temperature=0), rows, 0, PROMPT, NEW)
    return trace_decode(run_of(model), layout, abstract_mesh(sizes), shape)


def test_a_device_has_no_more_to_do_among_more_devices() -> None:
    """With as many experts and rows on each; its memory grows by the router's logits alone."""
    few, many = (traced_experts(devices, devices, 4 * devices) for devices in (8, 32))
    routers = [2 * 2 * DENSE.d_model * devices * 4 for devices in (8, 32)]  # of 2 layers, 4 rows
    for part in ("prefill", "token"):
        tokens = PROMPT if part == "prefill" else 1
        flops = [getattr(step.work, part).flops for step in (few, many)]
        assert flops[1] - tokens * routers[1] == flops[0] - tokens * routers[0]
    plan = plan_decode(many, None, estimate_decode(many))
    assert plan.executed_flops < 2 * plan.model_flops
    logits_bytes = 4 * PROMPT * (32 - 8) * 4
    assert many.peak_bytes - few.peak_bytes < 16 * logits_bytes


def test_a_token_reads_the_weights_of_its_experts() -> None:
    few, many = (traced_experts(experts, 1, 1) for experts in (16, 64))
    routers = 4 * DENSE.layers * DENSE.d_model * (64 - 16)
    assert many.work.token.read_bytes - few.work.token.read_bytes == routers


def test_sources_need_not_divide_over_a_split_length() -> None:
    layout = Layout(mesh="data:5", rules="length:data;memory:data")
    pairs = dataclasses.replace(DENSE, encoder_layers=2)
    step = trace_decode(run_of(pairs), layout, abstract_mesh({"data": 5}),
                        shape_of(pairs, Beam(WIDTH)))  # fmt: skip
    source = step.inputs.source
    assert source is not None and source["inputs_BM"].shape == (ROWS, SOURCE)


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
def test_decoding_compiles_for_tpus_that_are_not_there() -> None:
    topology, sizes = Topology.named("v3:2x2"), {"data": 4, "model": 2}
    layout = layout_named("data_and_model_parallel")
    step = trace_decode(
        toy_run(DENSE), layout, topology_mesh(topology.name, sizes), shape_of(DENSE, Beam(WIDTH))
    )
    counts = compile_decode(step)
    assert counts.work.token.flops == pytest.approx(step.work.token.flops, rel=0.02)
    plan = plan_decode(step, topology, counts)
    assert plan.memory.compiled_for == "TPU" and plan.fits
    assert plan.timings is not None
    assert all(part.products_s > 0 and part.other_s > 0 for part in plan.timings if part)
