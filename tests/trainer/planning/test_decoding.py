"""Plans of decoding: the trace and the compiled program agree, and both with sums by hand."""

import dataclasses
import functools

import pytest

from configs.load import load
from data.sources.pair_kinds import ParallelFiles
from data.task import Translation
from data.vocab import SentencePiece
from layouts.cost.collectives import Collective, by_mesh_axis
from layouts.cost.interconnect import Slice
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, has_tpu_compiler, make_mesh, topology_mesh
from models.decoding.beam import Beam
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from models.spec import Moe
from models.transformer import Transformer
from tests.toys import ROOT
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.planning.decoding import (
    Counted,
    Part,
    Traced,
    Wanted,
    compiled,
    estimated,
    plan,
    planned,
    traced,
)
from trainer.run import Run

ROWS, PROMPT, NEW, SOURCE, WIDTH = 8, 6, 10, 12, 3
DENSE = Transformer(vocab=64, layers=2, d_model=32, d_ff=80, heads=8, d_kv=12, positions="relative")
PAIRS = dataclasses.replace(  # a scan of one turn would be no loop
    DENSE,
    encoder_layers=4,
    layers=4,
    pattern=("dense", "moe"),
    moe=Moe(experts=16, dispatch="einsum"),
)
TASK = Translation(
    name="toy", vocab=SentencePiece(size=64), length=24, source_length=12,
    source=ParallelFiles(train_source=("a",), train_target=("b",)),
)  # fmt: skip
# A model, how it is searched and a layout that suits its serving.
CASES: dict[str, tuple[Transformer, Search, str]] = {
    "flat beam": (DENSE, Beam(WIDTH), "data_and_model_parallel"),
    "samples": (DENSE, Sampling(1.0, 5, None, WIDTH), "model_parallel"),
    "pairs, experts, beam": (PAIRS, Beam(WIDTH, flat=False), "expert_and_model_parallel"),
}


def run_of(model: Transformer) -> Run:
    return toy_run(model) if not model.reads_source else dataclasses.replace(
        toy_run(), model=model, task=TASK
    )  # fmt: skip


def wanted(model: Transformer, search: Search) -> Wanted:
    return Wanted(search, ROWS, SOURCE if model.reads_source else 0, PROMPT, NEW)


@functools.cache
def traced_toy(case: str) -> Traced:
    model, search, name = CASES[case]
    layout = layout_named(name)
    return traced(run_of(model), layout, make_mesh(layout), wanted(model, search))


@functools.cache
def compiled_toy(case: str) -> Counted:
    return compiled(traced_toy(case))


@pytest.mark.parametrize("case", CASES)
def test_trace_and_compiler_count_the_same(case: str) -> None:
    step, found = traced_toy(case), compiled_toy(case)
    for own, expected in zip(found[:2], step.parts, strict=True):
        assert own.flops == pytest.approx(expected.flops, rel=0.02)
        sent, asked = (by_mesh_axis(part.collectives, step.sizes) for part in (own, expected))
        # A CPU exchanges small integers of the search in ways of its own: nothing of a layer.
        assert sent["model"] == pytest.approx(asked["model"], rel=0.15)


def test_the_start_is_what_a_whole_has_beside_a_token() -> None:
    once, each = (Collective("all-reduce", ("x",), 2, size, 1, "") for size in (8, 4))
    whole = Part(10, (once, each, each), 0, {"products": 7, "other": 5})
    token = Part(4, (each,), 3, {"products": 2, "other": 1})
    left = Part(6, (once, each), 9, {"products": 5, "other": 4})
    assert whole.without(token, 9) == left


def test_products_and_cache_are_those_of_the_model() -> None:
    found = plan(traced_toy("flat beam"), None, compiled_toy("flat beam"))
    wide, places = DENSE.heads * DENSE.d_kv, PROMPT + WIDTH * NEW
    layer = 2 * DENSE.d_model * (4 * wide + 2 * DENSE.d_ff) + 4 * places * wide
    softmax = 2 * DENSE.d_model * DENSE.vocab
    tokens = PROMPT + WIDTH * NEW
    by_hand = ROWS * (tokens * DENSE.layers * layer + WIDTH * NEW * softmax)
    bias = 2 * DENSE.layers * DENSE.buckets * DENSE.heads  # looked up by a product or not
    assert by_hand <= found.model_flops <= by_hand + ROWS * tokens * places * bias
    keys_and_values = 2 * 4 * DENSE.layers * ROWS * places * wide
    assert found.cache_bytes == pytest.approx(keys_and_values, rel=0.01)
    assert found.counted.bytes_by_cause["cache"] == pytest.approx(keys_and_values / 8, rel=0.01)
    assert found.fits is None and found.output_s is None  # nobody said what the devices are


def test_a_token_waits_for_the_memory() -> None:
    """The guide's 64B model on the smaller of its slices (Huang et al., Table 2): 4 GB of cache."""
    files = ["configs/models/giant_64b.gin", "layouts/model_parallel.gin"]
    config = load([str(ROOT / file) for file in files], ["Precision.store = 'bfloat16'"])
    slice, wish = Slice.named("v3:4x2"), Wanted(Sampling(width=16), 1, 0, 1024, 64)
    found = planned(config.make(Run), config.make(Layout), {"model": 16}, slice, wish)
    assert found.cache_bytes == pytest.approx(4 * 2**30, rel=0.01)
    assert found.fits and found.timings is not None and found.token_s is not None
    weights = 2 * found.parameters / 16 / slice.chip.memory_bandwidth
    assert weights < found.timings[1].memory_s < 1.1 * weights
    assert found.token_s > found.timings[1].memory_s > 3 * found.timings[1].products_s
    assert found.output_s == pytest.approx(found.timings[0].step_s + 64 * found.token_s)
    assert found.tokens_per_s == pytest.approx(64 / (found.output_s or 0))


def test_what_every_device_computes_again_is_executed_but_not_asked_for() -> None:
    layout = Layout(mesh="data:4,model:2", rules="heads:model;d_ff:model;vocab:model")
    step = traced(toy_run(DENSE), layout, abstract_mesh({"data": 4, "model": 2}),
                  wanted(DENSE, Beam(WIDTH)))  # fmt: skip
    found = plan(step, None, estimated(step))
    assert found.executed_flops == pytest.approx(4 * found.model_flops, rel=0.02)


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed: pip install libtpu")
def test_decoding_compiles_for_tpus_that_are_not_there() -> None:
    slice, sizes = Slice.named("v3:2x2"), {"data": 4, "model": 2}
    layout = layout_named("data_and_model_parallel")
    step = traced(
        toy_run(DENSE), layout, topology_mesh(slice.name, sizes), wanted(DENSE, Beam(WIDTH))
    )
    counted = compiled(step)
    assert counted.token.flops == pytest.approx(step.parts[1].flops, rel=0.02)
    found = plan(step, slice, counted)
    assert found.counted.compiled_for == "TPU" and found.fits
    assert found.timings is not None
    assert all(own.products_s > 0 and own.other_s > 0 for own in found.timings)
