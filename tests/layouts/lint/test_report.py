"""Every problem of a layout: its exact words, and that the words are true."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from layouts.layout import Layout
from layouts.lint.recorder import Record
from layouts.lint.report import check, lint, report, table
from layouts.mesh import make_mesh, mesh_sizes
from models.loss import Criterion
from models.spec import Moe
from models.transformer import TransformerModel
from tests.layouts.lint.recorded import recorded, zeros
from tests.toys import ROOT, SPLITTABLE, toy

FITTING = recorded(SPLITTABLE, 8, 24)
EXPERTS = recorded(
    dataclasses.replace(
        SPLITTABLE, layers=4, pattern=("dense", "moe"), moe=Moe(experts=16, dispatch="einsum")
    ),
    8,
    24,
)
TOY = recorded(toy(), 6, 8)
WHERE = {
    "Layout.mesh": "layouts/mine.gin:2",
    "Layout.rules": "layouts/mine.gin:3",
    "Layout.param_rules": "layouts/mine.gin:4",
    "batch": "Run.batch_sequences",
    "length": "Task.length",
}
MODEL_PARALLEL = "batch:data;heads:model;d_ff:model;vocab:model"


def said(
    rules: str, mesh: str = "data:2,model:4", param_rules: str = "", record: Record = FITTING
) -> str:
    """The report, with line numbers of code left out, since they change with the code."""
    layout = Layout(mesh=mesh, rules=rules, param_rules=param_rules)
    problems = lint(layout, mesh_sizes(mesh, None), record, WHERE)
    return re.sub(r"\.py:\d+", ".py", report("mine", problems))


def test_misspelt_rules_are_listed_with_what_is_legal() -> None:
    rules = "batch:data;d_fff:model;vocab:modell;heads=model;batch:data?"
    assert said(rules, param_rules="hidden:data") == (
        """\
Layout 'mine': 5 problems.
  rule d_fff:model (Layout.rules, layouts/mine.gin:3): no such axis.
      Did you mean d_ff?  This model's axes: batch, length, memory, d_model, d_ff, heads, \
kv_heads, queries, d_kv, layers, vocab.
  rule vocab:modell (Layout.rules, layouts/mine.gin:3): no such mesh axis.
      Did you mean model?  The mesh has data, model (Layout.mesh, layouts/mine.gin:2).
  rule heads=model (Layout.rules, layouts/mine.gin:3): is no rule.
      Legal: axis:mesh_axis, as in "batch:data".
  rule batch:data? (Layout.rules, layouts/mine.gin:3): is there twice.
      Remove one of them.
  rule hidden:data (Layout.param_rules, layouts/mine.gin:4): no such axis.
      This model's axes: batch, length, memory, d_model, d_ff, heads, kv_heads, queries, d_kv, \
layers, vocab."""
    )


def test_sizes_that_do_not_divide_are_listed_once_a_cause_with_sizes_that_do() -> None:
    assert said(MODEL_PARALLEL, param_rules="d_model:data", record=TOY) == (
        """\
Layout 'mine': 3 problems.
  decoder/layers_N/attention/wk_DJK, decoder/layers_N/attention/wo_JQKD and 2 more: \
kv_heads = 3 does not divide over model = 4.
      Rule heads:model (Layout.rules, layouts/mine.gin:3).
      Legal: kv_heads 4; model 1 or 3.  \
Or remove "heads:model" and hold heads whole, or pad it: "heads:model+".
  decoder/layers_N/mlp/wi_DF and decoder/layers_N/mlp/wo_FD: \
d_ff = 14 does not divide over model = 4.
      Rule d_ff:model (Layout.rules, layouts/mine.gin:3).
      Legal: d_ff 12 or 16; model 1, 2, 7 or 14.  Or remove "d_ff:model" and hold d_ff whole.
  embed_VD: vocab = 22 does not divide over model = 4.
      Rule vocab:model (Layout.rules, layouts/mine.gin:3).
      Legal: vocab 20 or 24; model 1, 2, 11 or 22.  \
Or remove "vocab:model" and hold vocab whole, or pad it: "vocab:model+"."""
    )


def test_the_batch_and_the_length_must_divide_too_and_say_who_sets_them() -> None:
    text = said(
        "batch:data;batch:model;length:extra", "data:2,model:2,extra:3", "d_model:data", TOY
    )
    assert re.sub(r" and \d+ more: ", " and MORE: ", text) == (
        """\
Layout 'mine': 2 problems.
  positions_LD: length = 8 (Task.length) does not divide over extra = 3.
      Rule length:extra (Layout.rules, layouts/mine.gin:3).
      Legal: length 6 or 9; extra 1, 2, 4 or 8.  Or remove "length:extra" and hold length whole.
  BL at tests/layouts/lint/recorded.py, BLM at models/attention.py and MORE: \
batch = 6 (Run.batch_sequences) does not divide over data x model = 2 x 2.
      Rule batch:data and batch:model (Layout.rules, layouts/mine.gin:3).
      Legal: batch 4 or 8; data x model 1, 2, 3 or 6.  \
Or remove "batch:model" and hold batch whole, or pad it: "batch:model+"."""
    )


def test_what_a_rule_pads_is_a_warning_that_says_how_much() -> None:
    text = said("batch:data+;heads:model+;vocab:model+", param_rules="d_model:data", record=TOY)
    padded = [line.strip() for line in text.splitlines() if "held as" in line or "Without" in line]
    assert padded == [
        "Warning: decoder/layers_N/attention/wk_DJK, decoder/layers_N/attention/wo_JQKD and 2 "
        "more: kv_heads = 3 is held as 4 over model = 4: 25% of it is padding.",
        "Without any: kv_heads 4; model 1 or 3.",
        "Warning: embed_VD: vocab = 22 is held as 24 over model = 4: 8.3% of it is padding.",
        "Without any: vocab 20 or 24; model 1, 2, 11 or 22.",
    ]


def test_the_padding_that_is_offered_is_legal() -> None:
    layout = Layout(mesh="data:2,model:4", rules="batch:data;heads:model;vocab:model")
    sizes = mesh_sizes(layout.mesh, None)
    errors = [p for p in lint(layout, sizes, TOY, WHERE) if p.severity == "error"]
    offered = [re.search(r'or pad it: "(.*)"', problem.fix) for problem in errors]
    rules = ";".join(["batch:data", *(found[1] for found in offered if found)])
    assert rules == "batch:data;heads:model+;vocab:model+"
    padded = dataclasses.replace(layout, rules=rules)
    assert not [p for p in lint(padded, sizes, TOY, WHERE) if p.severity == "error"]


def test_some_axes_cannot_be_padded() -> None:
    legal = 'Legal with a "+": batch, heads, kv_heads, experts or vocab, and no "?" beside it.'
    text = said("batch:data;d_ff:model+;heads:model?+;vocab:model+?", record=TOY)
    for rule in ("d_ff:model+", "heads:model?+", "vocab:model+?"):
        own = f"rule {rule} (Layout.rules, layouts/mine.gin:3): cannot be padded.\n      {legal}"
        assert own in text


def test_one_kv_head_is_told_to_split_its_queries() -> None:
    multi_query = recorded(dataclasses.replace(SPLITTABLE, kv_heads=1), 8, 24)
    text = said(MODEL_PARALLEL, param_rules="d_model:data", record=multi_query)
    assert text.endswith(
        """kv_heads = 1 does not divide over model = 4.
      Rule heads:model (Layout.rules, layouts/mine.gin:3).
      Legal: kv_heads 4; model 1.  \
Or split the queries of each: "queries:model" for "heads:model"."""
    )
    followed = said(MODEL_PARALLEL.replace("heads", "queries"), "data:2,model:4", "d_model:data")
    assert "kv_heads" not in followed


def test_two_firm_axes_of_one_tensor_clash_over_a_mesh_axis() -> None:
    """The illegal layout of Shazeer et al. 2018, section 8.5."""
    text = said("batch:all;d_ff:all", "all:8", "d_model:all?;d_kv:all")
    assert text.startswith(
        """\
Layout 'mine': 2 problems.
  BLD,DF->BLF at models/feed_forward.py and BLF at models/dropout.py: \
batch and d_ff both want the mesh axis all.
      Rule batch:all and d_ff:all (Layout.rules, layouts/mine.gin:3).
      Remove one rule, or let one give way: "d_ff:all?".
"""
    )
    text = said("batch:data;d_ff:model", param_rules="d_model:model")
    assert text.startswith(
        """\
Layout 'mine': 2 problems.
  decoder/layers_N/mlp/wi_DF and decoder/layers_N/mlp/wo_FD: \
d_ff and d_model both want the mesh axis model.
      Rule d_ff:model (Layout.rules, layouts/mine.gin:3) and \
d_model:model (Layout.param_rules, layouts/mine.gin:4).
      Remove one rule, or let one give way: "d_model:model?"."""
    )


def test_pairs_of_the_axis_table_may_meet() -> None:
    rotary = recorded(dataclasses.replace(SPLITTABLE, positions="rotary"), 8, 24)
    text = said("length:all;memory:all", "all:8", "d_model:all", rotary)
    assert text == "Layout 'mine': 0 problems."


def test_rules_that_do_nothing_are_warned_of() -> None:
    rules = MODEL_PARALLEL + ";experts:data;kv_heads:model;d_kv:model?"
    assert said(rules, param_rules="d_model:data;batch:data") == (
        """\
Layout 'mine': 4 problems.
  Warning: rule heads:model (Layout.rules, layouts/mine.gin:3): \
matches nothing: kv_heads or queries have a rule of their own, which is used.
  Warning: rule experts:data (Layout.rules, layouts/mine.gin:3): \
matches nothing: no tensor of this model has the axis experts.
  Warning: rule d_kv:model? (Layout.rules, layouts/mine.gin:3): \
never takes effect: another axis has model in every tensor with d_kv.
  Warning: rule batch:data (Layout.param_rules, layouts/mine.gin:4): \
matches nothing: no weight of this model has the axis batch."""
    )


def test_a_mesh_axis_that_splits_nothing_is_warned_of() -> None:
    """The inefficient layout of Shazeer et al. 2018, section 8.4."""
    assert said("", "all:8", "d_model:all") == (
        """\
Layout 'mine': 1 problem.
  Warning: mesh axis all:8 (Layout.mesh, layouts/mine.gin:2): splits 0% of the FLOPs; \
all 8 devices along it compute the same 100%: \
BJQLK,BJMK->BJQLM at models/attention.py, BJQLM,BJMK->BJQLK at models/attention.py and 7 more.
      Adding "batch:all" to Layout.rules splits 100%."""
    )
    half = said("batch:data;vocab:model", param_rules="d_model:data")
    assert "mesh axis model:4 (Layout.mesh, layouts/mine.gin:2): splits 5% of the FLOPs" in half
    assert 'Adding "heads:model;d_ff:model" to Layout.rules splits 100%.' in half


def test_weights_left_whole_are_one_warning_with_the_rule_that_splits_them() -> None:
    assert said("batch:data", "data:8") == (
        """\
Layout 'mine': 1 problem.
  Warning: weights: 100% of their bytes are whole on each of 8 devices: \
decoder/layers_N/attention/wk_DJK (9.22 kB), decoder/layers_N/attention/wo_JQKD (9.22 kB) \
and 9 more.
      Adding "d_model:data" to Layout.param_rules splits all."""
    )
    followed = said("batch:data", "data:8", "d_model:data")
    assert followed == "Layout 'mine': 0 problems."
    assert said("", "data:1") == "Layout 'mine': 0 problems."


def test_advice_is_legal() -> None:
    """Of these sizes four divides few."""
    text = said("batch:data", "data:4", record=recorded(toy(), 8, 8))
    assert text.endswith('Adding "d_kv:data" to Layout.param_rules splits all but 39%.')
    followed = said("batch:data", "data:4", "d_kv:data", recorded(toy(), 8, 8))
    assert "weights: 39% of" in followed and "does not divide" not in followed


def test_mesh_tensorflow_layouts_work_unchanged() -> None:
    """The README's, and the T5 library's, whose ensemble axis only full ensembles have."""
    paper = said("batch:rows;vocab:cols;d_ff:cols;heads:cols", "rows:2,cols:4")
    assert "Warning" in paper and paper.count("\n  ") == paper.count("\n  Warning: weights: 3%") * 2
    t5 = "ensemble:ensemble,batch:batch,d_ff:model,heads:model,vocab:model,experts:batch"
    text = said(t5, "model:4,batch:2", "d_model:batch")
    assert text == (
        """\
Layout 'mine': 2 problems.
  Warning: rule ensemble:ensemble (Layout.rules, layouts/mine.gin:3): \
nothing here has Mesh-TensorFlow's axis ensemble, several models in one run.
      Without this rule the result is the same.
  Warning: rule experts:batch (Layout.rules, layouts/mine.gin:3): \
matches nothing: no tensor of this model has the axis experts."""
    )


@pytest.mark.parametrize("path", sorted((ROOT / "layouts").glob("*.gin")), ids=lambda p: p.stem)
def test_shipped_layouts_have_no_errors(path: Path) -> None:
    layout = Layout(**dict(re.findall(r'^Layout\.(\w+) = "(.*)"$', path.read_text(), re.M)))
    assert layout.mesh in path.read_text()
    record = EXPERTS if "expert" in path.stem else FITTING
    problems = check(path.stem, layout, mesh_sizes(layout.mesh, 8), record, {})
    assert [p.subject for p in problems] in ([], ["weights"])


def test_errors_are_raised_together_with_the_warnings() -> None:
    layout = Layout(mesh="data:2,model:4", rules="d_fff:model;experts:data;batch:data")
    with pytest.raises(UserError, match=r"^Layout 'mine': 2 problems\.") as error:
        check("mine", layout, {"data": 2, "model": 4}, FITTING, {})
    assert "rule d_fff:model (Layout.rules): no such axis." in str(error.value)
    assert "Warning: rule experts:data (Layout.rules): matches nothing" in str(error.value)


AXES = "batch|length|memory|d_model|d_ff|heads|kv_heads|queries|d_kv|vocab|layers"
some_rules = st.lists(st.from_regex(rf"({AXES}):[ab]\??", fullmatch=True), max_size=4).map(";".join)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(some_rules, some_rules, st.sampled_from(["a:2,b:4", "a:8,b:1", "a:4,b:2"]))
def test_the_lint_rejects_what_jax_rejects(rules: str, param_rules: str, mesh: str) -> None:
    """What passes is traced, gradients too; a size that does not divide is refused by jax."""
    layout = Layout(mesh=mesh, rules=rules, param_rules=param_rules)
    spec = dataclasses.replace(SPLITTABLE, kv_heads=4, loss_chunks=2, scan=True)
    model = TransformerModel(spec, layout)
    problems = lint(layout, mesh_sizes(mesh, 8), recorded(spec, 8, 24), {})

    def gradients() -> object:
        params, batch = model.init(jax.random.key(0)), zeros(layout, 8, 24)
        key = jax.random.key(1)
        return jax.grad(lambda p: model.loss(p, batch, Criterion(), key).objective)(params)

    with jax.set_mesh(make_mesh(layout)):
        if any("does not divide" in problem.message for problem in problems):
            with pytest.raises(ValueError, match="divide"):
                jax.eval_shape(gradients)
        elif all(problem.severity == "warning" for problem in problems):
            jax.eval_shape(gradients)


def test_the_table_counts_bytes_per_device_as_jax_places_them() -> None:
    layout = Layout(mesh="data:2,model:4", rules=MODEL_PARALLEL, param_rules="d_model:data")
    rows = {row.path: row for row in table(FITTING.weights, layout, {"data": 2, "model": 4})}
    model = TransformerModel(SPLITTABLE, layout)
    with jax.set_mesh(make_mesh(layout)):
        params = jax.jit(model.init)(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert len(leaves) == len(rows)
    for path, leaf in leaves:
        row = rows[jax.tree_util.keystr(path, simple=True, separator="/")]
        assert row.bytes == leaf.nbytes
        assert row.bytes_per_device == leaf.addressable_shards[0].data.nbytes
        assert row.place == leaf.sharding.spec


def test_sizes_of_experts_and_groups_must_divide() -> None:
    """16 experts over 3 devices, and 8 rows in as many groups over 3."""
    text = said("experts:expert", "data:2,expert:3", record=EXPERTS)
    assert "decoder/layers_N/block1/mlp/router_DE" in text
    assert "experts = 16 does not divide over expert = 3" in text
    assert "Legal: experts 15 or 18; expert 1, 2, 4, 8 or 16." in text
    text = said("batch:data;experts:data", "data:3", record=EXPERTS)
    assert "groups = 8 does not divide over data = 3" in text
