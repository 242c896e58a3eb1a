"""Every problem of a layout: what it names, and that what it calls legal is legal."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from layouts.layout import Layout
from layouts.lint import report as lint_report
from layouts.lint.errors import Problem
from layouts.lint.recorder import Record
from layouts.lint.report import _percent, check, lint, report, table
from layouts.mesh import make_mesh, mesh_sizes
from models.feed_forward.moe.layer import Moe
from models.loss import Criterion
from models.parts import Block
from models.positions.rotary import Rotary
from models.transformer import TransformerModel
from tests.layouts.lint.recorded import recorded, zeros
from tests.toys import ROOT, SPLITTABLE, toy

FITTING = recorded(SPLITTABLE, 8, 24)
EXPERTS_SPEC = dataclasses.replace(
    SPLITTABLE, layers=4, pattern=(Block(), Block(feed_forward=Moe(experts=16, dispatch="einsum")))
)
EXPERTS = recorded(EXPERTS_SPEC, 8, 24)
TOY = recorded(toy(), 6, 8)
WHERE = {
    "Layout.mesh": "layouts/mine.gin:2",
    "Layout.rules": "layouts/mine.gin:3",
    "Layout.param_rules": "layouts/mine.gin:4",
    "batch": "Run.batch_sequences",
    "length": "Task.length",
}
MODEL_PARALLEL = "batch:data;heads:model;d_ff:model;vocab:model"


@pytest.fixture(autouse=True, scope="module")
def small_weights_count() -> Iterator[None]:
    """Reports replicated weights of toys as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lint_report, "SMALL_BYTES", 0)
        yield


def problems(
    rules: str,
    mesh: str = "data:2,model:4",
    param_rules: str = "",
    record: Record = FITTING,
    pipeline_repeats: int = 1,
) -> list[Problem]:
    layout = Layout(
        mesh=mesh, rules=rules, param_rules=param_rules, pipeline_repeats=pipeline_repeats
    )
    return lint(layout, mesh_sizes(mesh, None), record, WHERE)


def codes(problems: list[Problem]) -> list[str]:
    return [problem.code for problem in problems]


def rules_of(problems: list[Problem]) -> list[str]:
    """The rules of each problem, without where they are written."""
    return [re.sub(r" \(Layout[^)]*\)", "", problem.rule) for problem in problems]


def text(problems: list[Problem]) -> str:
    """The report, with line numbers of code left out, since they change with the code."""
    return re.sub(r"\.py:\d+", ".py", report("mine", problems))


def test_a_report_lists_misspelt_rules_with_what_is_legal() -> None:
    rules = "batch:data;d_fff:model;vocab:modell;heads=model;batch:data?"
    assert text(problems(rules, param_rules="hidden:data")) == (
        """\
Layout 'mine': 5 problems.
  rule d_fff:model (Layout.rules, layouts/mine.gin:3): no such axis.
      Did you mean d_ff?  This model's axes: batch, length, memory, d_model, d_ff, heads, \
kv_heads, queries, d_kv, layers, vocab.
  rule vocab:modell (Layout.rules, layouts/mine.gin:3): no such mesh axis.
      Did you mean model?  The mesh has data, model (Layout.mesh, layouts/mine.gin:2).
  rule heads=model (Layout.rules, layouts/mine.gin:3): not a rule.
      Legal: axis:mesh_axis, as in "batch:data", with one "?" or one "+" after it.
  rule batch:data? (Layout.rules, layouts/mine.gin:3): appears twice.
      Remove one of them.
  rule hidden:data (Layout.param_rules, layouts/mine.gin:4): no such axis.
      This model's axes: batch, length, memory, d_model, d_ff, heads, kv_heads, queries, d_kv, \
layers, vocab."""
    )


def test_misspelt_rules_have_codes() -> None:
    rules = "batch:data;d_fff:model;vocab:modell;heads=model;batch:data?"
    assert codes(problems(rules, param_rules="hidden:data")) == [
        "unknown-axis",
        "unknown-mesh-axis",
        "malformed-rule",
        "duplicate-rule",
        "unknown-axis",
    ]


@pytest.mark.parametrize("rule", ["batch:data??", "heads:model++", "batch:data?+?"])
def test_a_mark_is_written_once(rule: str) -> None:
    (problem,) = problems(rule)
    assert (problem.code, problem.rule.split()[0]) == ("malformed-rule", rule)


def test_a_report_of_sizes_that_do_not_divide() -> None:
    assert text(problems(MODEL_PARALLEL, param_rules="d_model:data", record=TOY)) == (
        """\
Layout 'mine': 3 problems.
  decoder/layers_N/attention/wk_DJK, decoder/layers_N/attention/wo_JQKD and 2 more: \
kv_heads = 3 does not divide over model = 4.
      Rule heads:model (Layout.rules, layouts/mine.gin:3).
      Legal: kv_heads 4; model 1 or 3.  \
Or remove "heads:model" to replicate heads, or pad it: "heads:model+".
  decoder/layers_N/mlp/wi_DF and decoder/layers_N/mlp/wo_FD: \
d_ff = 14 does not divide over model = 4.
      Rule d_ff:model (Layout.rules, layouts/mine.gin:3).
      Legal: d_ff 12 or 16; model 1, 2, 7 or 14.  \
Or remove "d_ff:model" to replicate d_ff, or pad it: "d_ff:model+".
  embed_VD: vocab = 22 does not divide over model = 4.
      Rule vocab:model (Layout.rules, layouts/mine.gin:3).
      Legal: vocab 20 or 24; model 1, 2, 11 or 22.  \
Or remove "vocab:model" to replicate vocab, or pad it: "vocab:model+"."""
    )


def test_sizes_that_do_not_divide_are_listed_once_a_cause_with_sizes_that_do() -> None:
    errors = problems(MODEL_PARALLEL, param_rules="d_model:data", record=TOY)
    assert codes(errors) == ["indivisible"] * 3
    assert rules_of(errors) == ["heads:model", "d_ff:model", "vocab:model"]
    assert [error.fix.partition(".")[0] for error in errors] == [
        "Legal: kv_heads 4; model 1 or 3",
        "Legal: d_ff 12 or 16; model 1, 2, 7 or 14",
        "Legal: vocab 20 or 24; model 1, 2, 11 or 22",
    ]
    assert errors[2].subject == "embed_VD"


def test_stages_split_the_products_of_layers_and_their_number_must_divide() -> None:
    rules = "batch:data;layers:pipe"
    assert "idle-mesh-axis" not in codes(problems(rules, "data:2,pipe:3"))
    (error, *_) = problems(rules, "data:2,pipe:2")
    assert "layers = 3 does not divide over pipe = 2" in error.message
    assert error.fix.startswith("Legal: layers 2 or 4; pipe 1 or 3.")


def test_the_groups_of_a_circular_pipeline_must_divide_too() -> None:
    rules, mesh = "batch:data;layers:pipe", "data:2,pipe:3"
    assert "indivisible" not in codes(problems(rules, mesh))
    (error, *_) = problems(rules, mesh, pipeline_repeats=2)
    assert "layers = 3 does not divide over pipe = 3 in 2 groups each" in error.message
    assert error.fix.startswith("Legal: layers 6; pipe 1; pipeline_repeats 1.")


def test_layers_of_a_pattern_are_counted_as_the_settings_do() -> None:
    rules, mesh = "batch:data;layers:pipe", "data:2,pipe:4"
    (error, *_) = problems(rules, mesh, record=EXPERTS)
    assert error.message == (
        "layers = 4 (2 repeats of a pattern of 2) does not divide over pipe = 4."
    )
    assert error.fix.startswith("Legal: layers 8; pipe 1 or 2.")
    (error, *_) = problems(rules, "data:2,pipe:2", record=EXPERTS, pipeline_repeats=2)
    assert error.fix.startswith("Legal: layers 8; pipe 1; pipeline_repeats 1.")


def test_stages_divide_the_layers_although_weights_are_split_otherwise() -> None:
    rules = "batch:data;layers:pipe?"
    errors = problems(rules, "data:2,pipe:4", param_rules="d_model:pipe")
    assert ("layers:pipe?", "indivisible") in {(rules_of([e])[0], e.code) for e in errors}


def test_stacks_of_as_many_repeats_of_other_patterns_are_told_apart() -> None:
    spec = dataclasses.replace(
        SPLITTABLE,
        layers=6,
        pattern=EXPERTS_SPEC.pattern,
        encoder_layers=3,
        encoder_pattern=(Block(),),
    )
    found = problems("layers:pipe", "pipe:2", record=recorded(spec, 8, 24))
    messages = {p.subject.partition("/")[0]: p.message for p in found if p.code == "indivisible"}
    assert messages == {
        "decoder": "layers = 6 (3 repeats of a pattern of 2) does not divide over pipe = 2.",
        "encoder": "layers = 3 does not divide over pipe = 2.",
    }


def test_padding_of_what_no_weight_has_is_refused() -> None:
    """Decoding would pad its rows by it, and by no rule of theirs."""
    (error, *_) = problems("d_ff:x", "x:2", param_rules="batch:x+")
    assert error.severity == "error" and "batch:x+" in error.rule
    assert error.message == "pads nothing: no weight of this model has the axis batch."
    found = problems("d_ff:x", "x:2", param_rules="batch:x")
    assert [p.severity for p in found if p.code == "unmatched-rule"] == ["warning"]


def test_first_blocks_count_as_layers_and_are_in_no_stage() -> None:
    spec = dataclasses.replace(SPLITTABLE, layers=5, first_blocks=(Block(), Block()))
    record = recorded(spec, 8, 24)
    found = problems("batch:data;layers:pipe", "data:2,pipe:2", record=record)
    [error] = [problem for problem in found if problem.code == "indivisible"]
    assert error.message == (
        "layers = 5 (3 repeats of a pattern of 1 after 2 first_blocks) does not divide over "
        "pipe = 2."
    )
    assert error.fix.startswith("Legal: layers 4 or 6; pipe 1 or 3.")


def test_repeats_without_stages_are_useless() -> None:
    for rules in ("batch:data", "batch:data;layers:one", "batch:data;batch:pipe;layers:pipe?"):
        found = problems(rules, "data:2,pipe:3,one:1", pipeline_repeats=2)
        assert not any("groups each" in problem.message for problem in found)
        subjects = [p.subject for p in found if p.code == "unmatched-rule"]
        assert "pipeline_repeats = 2 (Layout.pipeline_repeats)" in subjects
    assert not any("pipeline_repeats" in p.subject for p in problems("layers:pipe", "pipe:3"))


def test_the_batch_and_the_length_must_divide_too_and_say_who_sets_them() -> None:
    length, batch = problems(
        "batch:data;batch:model;length:extra", "data:2,model:2,extra:3", "d_model:data", TOY
    )
    assert codes([length, batch]) == ["indivisible"] * 2
    assert length.subject == "positions_LD" and "length = 8 (Task.length)" in length.message
    assert length.fix.startswith("Legal: length 6 or 9; extra 1, 2, 4 or 8.")
    assert "batch = 6 (Run.batch_sequences)" in batch.message
    assert batch.rule == "batch:data and batch:model (Layout.rules, layouts/mine.gin:3)"
    assert batch.fix.startswith("Legal: batch 4 or 8; data x model 1, 2, 3 or 6.")


def test_what_a_rule_pads_is_a_warning_that_says_how_much() -> None:
    rules = "batch:data+;heads:model+;vocab:model+"
    warnings = problems(rules, param_rules="d_model:data", record=TOY)
    padded = [warning for warning in warnings if warning.code == "padded"]
    assert rules_of(padded) == ["heads:model+", "vocab:model+"]
    assert {warning.severity for warning in padded} == {"warning"}
    assert "kv_heads = 3 is padded to 4" in padded[0].message and "25%" in padded[0].message
    assert "vocab = 22 is padded to 24" in padded[1].message and "8.3%" in padded[1].message
    assert [warning.fix for warning in padded] == [
        "Without padding: kv_heads 4; model 1 or 3.",
        "Without padding: vocab 20 or 24; model 1, 2, 11 or 22.",
    ]


def test_the_padding_that_is_offered_is_legal() -> None:
    layout = Layout(mesh="data:2,model:4", rules="batch:data;heads:model;vocab:model")
    sizes = mesh_sizes(layout.mesh, None)
    errors = [p for p in lint(layout, sizes, TOY, WHERE) if p.severity == "error"]
    offered = [re.search(r'or pad it: "(.*)"', problem.fix) for problem in errors]
    rules = ";".join(["batch:data", *(match[1] for match in offered if match)])
    assert rules == "batch:data;heads:model+;vocab:model+"
    padded = dataclasses.replace(layout, rules=rules)
    assert not [p for p in lint(padded, sizes, TOY, WHERE) if p.severity == "error"]


def test_experts_on_many_devices_get_a_mesh_axis_of_their_own() -> None:
    """16 experts on 64 devices are not padded fourfold; what is offered instead is legal."""
    layout = Layout(mesh="data:64", rules="batch:data;experts:data")
    record = recorded(EXPERTS_SPEC, 64, 24)
    experts = next(p for p in lint(layout, {"data": 64}, record, WHERE) if "experts" in p.message)
    assert experts.code == "indivisible" and "pad it" not in experts.fix
    assert "layouts/expert_mesh_axis.gin" in experts.fix
    mesh = re.search(r'"(data:4,expert:16)"', experts.fix)
    assert mesh is not None
    layout = Layout(mesh=mesh[1], rules="batch:data;batch:expert;experts:expert")
    sizes = {"data": 4, "expert": 16}
    assert not [p for p in lint(layout, sizes, record, WHERE) if p.severity == "error"]
    padded = Layout(mesh="data:64", rules="batch:data;experts:data+")
    [warning] = [p for p in lint(padded, {"data": 64}, record, WHERE) if p.code == "padded"]
    assert "75% is padding" in warning.message and '"data:4,expert:16"' in warning.fix


def test_some_axes_cannot_be_padded() -> None:
    rules = "batch:data;d_model:model+;heads:model?+;vocab:model+?"
    errors = [p for p in problems(rules, record=TOY) if p.code == "unpaddable-axis"]
    assert rules_of(errors) == ["d_model:model+", "heads:model?+", "vocab:model+?"]
    reason = "cannot be padded: norms, rotations or loops along it would count the padding."
    assert [error.message for error in errors] == [reason, *["cannot be padded."] * 2]
    legal = "batch, length, memory, d_ff, heads, kv_heads, experts, vocab, height or width"
    assert {error.fix for error in errors} == {f'Legal with a "+": {legal}, and no "?" with it.'}


def test_one_kv_head_is_told_to_split_its_queries() -> None:
    multi_query = recorded(dataclasses.replace(SPLITTABLE, kv_heads=1), 8, 24)
    error = problems(MODEL_PARALLEL, param_rules="d_model:data", record=multi_query)[-1]
    assert (error.code, rules_of([error])) == ("indivisible", ["heads:model"])
    assert error.fix.startswith("Legal: kv_heads 4; model 1.")
    assert '"queries:model" for "heads:model"' in error.fix
    queries = MODEL_PARALLEL.replace("heads", "queries")
    assert "kv_heads" not in text(problems(queries, param_rules="d_model:data", record=multi_query))


def test_two_firm_axes_of_one_tensor_clash_over_a_mesh_axis() -> None:
    """The illegal layout of Shazeer et al. 2018, section 8.5."""
    error, _ = problems("batch:all;d_ff:all", "all:8", "d_model:all?;d_kv:all")
    assert (error.code, rules_of([error])) == ("conflict", ["batch:all and d_ff:all"])
    assert error.subject.startswith("BLD,DF->BLF at models/feed_forward/mlp.py:")
    assert error.fix == 'Remove one rule, or let one give way: "d_ff:all?".'
    error, _ = problems("batch:data;d_ff:model", param_rules="d_model:model")
    assert error.code == "conflict"
    assert error.subject == "decoder/layers_N/mlp/wi_DF and decoder/layers_N/mlp/wo_FD"
    assert error.rule == (
        "d_ff:model (Layout.rules, layouts/mine.gin:3) and "
        "d_model:model (Layout.param_rules, layouts/mine.gin:4)"
    )
    assert error.fix.endswith('let one give way: "d_model:model?".')


def test_a_rule_that_pads_gives_way_without_padding() -> None:
    error = problems("length:data;batch:data+")[0]
    assert error.code == "conflict" and error.fix.endswith('let one give way: "batch:data?".')
    assert "conflict" not in codes(problems("length:data;batch:data?"))


def test_pairs_of_the_axis_table_may_meet() -> None:
    rotary = recorded(dataclasses.replace(SPLITTABLE, positions=Rotary()), 8, 24)
    assert problems("length:all;memory:all", "all:8", "d_model:all", rotary) == []


def test_rules_that_do_nothing_are_warned_of() -> None:
    rules = MODEL_PARALLEL + ";experts:data;kv_heads:model;d_kv:model?"
    warnings = problems(rules, param_rules="d_model:data;batch:data")
    assert {warning.severity for warning in warnings} == {"warning"}
    assert dict(zip(rules_of(warnings), codes(warnings), strict=True)) == {
        "heads:model": "unmatched-rule",
        "experts:data": "unmatched-rule",
        "d_kv:model?": "overruled-rule",
        "batch:data": "unmatched-rule",
    }
    assert "kv_heads or queries have a rule" in warnings[0].message
    assert "no weight of this model has the axis batch" in warnings[-1].message


def test_a_mesh_axis_that_splits_nothing_is_warned_of() -> None:
    """The inefficient layout of Shazeer et al. 2018, section 8.4."""
    assert text(problems("", "all:8", "d_model:all")) == (
        """\
Layout 'mine': 1 problem.
  Warning: mesh axis all:8 (Layout.mesh, layouts/mine.gin:2): splits 0% of the FLOPs; \
all 8 devices along it compute the same 100%: \
BJQLK,BJMK->BJQLM at models/attention/plain.py, \
BJQLM,BJMK->BJQLK at models/attention/plain.py and 7 more.
      Adding "batch:all" to Layout.rules splits 100%."""
    )
    (half,) = problems("batch:data;vocab:model", param_rules="d_model:data")
    assert half.code == "idle-mesh-axis" and half.subject.startswith("mesh axis model:4 (")
    assert "splits 5% of the FLOPs" in half.message
    assert 'Adding "heads:model;d_ff:model" to Layout.rules splits' in half.fix


def test_products_of_dropless_experts_are_split_as_their_tokens_are() -> None:
    """They are inside a `shard_map`, whose types have no letters."""
    moe = Moe(experts=4, d_ff=96, dispatch="dropless")
    record = recorded(dataclasses.replace(SPLITTABLE, pattern=(Block(feed_forward=moe),)), 8, 24)
    assert "idle-mesh-axis" not in codes(problems("batch:data", "data:8", record=record))
    (idle,) = (
        problem
        for problem in problems("heads:model", "data:1,model:4", record=record)
        if problem.code == "idle-mesh-axis"
    )
    assert "grouped_matmul.py" in idle.message
    for rules in ("experts:model;batch:model", "d_ff:model"):
        reported = problems(rules, "data:1,model:4", record=record)
        assert not any("grouped_matmul.py" in problem.message for problem in reported)


def test_small_weights_may_be_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codes(problems("batch:data", "data:8")) == ["replicated-weights"]
    monkeypatch.setattr(lint_report, "SMALL_BYTES", 1e8)
    assert problems("batch:data", "data:8") == []


def test_replicated_weights_are_one_warning_with_the_rule_that_splits_them() -> None:
    (warning,) = problems("batch:data", "data:8")
    assert (warning.code, warning.subject) == ("replicated-weights", "weights")
    assert "100% of their bytes are replicated on 8 devices" in warning.message
    assert "decoder/layers_N/attention/wk_DJK (9.22 kB)" in warning.message
    assert 'Adding "d_model:data" to Layout.param_rules splits' in warning.fix
    assert problems("batch:data", "data:8", "d_model:data") == []
    assert problems("", "data:1") == []


def test_advice_is_legal() -> None:
    """Of these sizes four divides few."""
    advice = problems("batch:data", "data:4", record=recorded(toy(), 8, 8))[-1]
    assert advice.fix == 'Adding "d_kv:data" to Layout.param_rules splits all but 39%.'
    followed = problems("batch:data", "data:4", "d_kv:data", recorded(toy(), 8, 8))
    assert "indivisible" not in codes(followed) and "39% of" in followed[-1].message


def test_mesh_tensorflow_layouts_work_unchanged() -> None:
    """The README's, and the T5 library's, whose ensemble axis only full ensembles have."""
    paper = problems("batch:rows;vocab:cols;d_ff:cols;heads:cols", "rows:2,cols:4")
    assert codes(paper) == ["replicated-weights"] and "3% of" in paper[0].message
    t5 = "ensemble:ensemble,batch:batch,d_ff:model,heads:model,vocab:model,experts:batch"
    warnings = problems(t5, "model:4,batch:2", "d_model:batch")
    assert {warning.severity for warning in warnings} == {"warning"}
    assert codes(warnings) == ["absent-axis", "unmatched-rule"]
    assert rules_of(warnings) == ["ensemble:ensemble", "experts:batch"]


@pytest.mark.parametrize("path", sorted((ROOT / "layouts").glob("*.gin")), ids=lambda p: p.stem)
def test_shipped_layouts_have_no_errors(path: Path) -> None:
    layout = Layout(**dict(re.findall(r'^Layout\.(\w+) = "(.*)"$', path.read_text(), re.M)))
    assert layout.mesh in path.read_text()
    record = EXPERTS if "expert" in path.stem or path.stem == "pipeline" else FITTING
    warnings = check(path.stem, lint(layout, mesh_sizes(layout.mesh, 8), record, {}))
    assert codes(warnings) in ([], ["replicated-weights"])


def test_errors_are_raised_together_with_the_warnings() -> None:
    layout = Layout(mesh="data:2,model:4", rules="d_fff:model;experts:data;batch:data")
    with pytest.raises(UserError, match=r"^Layout 'mine': 2 problems\.") as error:
        check("mine", lint(layout, {"data": 2, "model": 4}, FITTING, {}))
    assert "rule d_fff:model (Layout.rules): no such axis." in str(error.value)
    assert "Warning: rule experts:data (Layout.rules): matches nothing" in str(error.value)


def test_stages_of_layers_that_are_stored_otherwise_are_checked() -> None:
    """Rules for stored layers do not replace the rule that makes the stages."""

    def layers_over(mesh: str, repeats: int = 1) -> list[Problem]:
        return problems("batch:data;layers:pipe", mesh, "layers:data", EXPERTS, repeats)

    assert codes(layers_over("data:2,pipe:2")) == ["replicated-weights"]
    error, *_ = layers_over("data:2,pipe:4")
    assert (error.code, error.rule.split()[0]) == ("indivisible", "layers:pipe")
    assert "; pipe 1 or 2." in error.fix
    assert codes(layers_over("data:2,pipe:2", repeats=2)) == ["indivisible", "replicated-weights"]


AXES = "batch|length|memory|d_model|d_ff|heads|kv_heads|queries|d_kv|vocab|layers"
some_rules = st.lists(st.from_regex(rf"({AXES}):[ab]\??", fullmatch=True), max_size=4).map(";".join)


@example("layers:a;layers:b?", "", "a:2,b:4")  # which a scan goes over
@example("", "heads:a;heads:b;layers:a", "a:2,b:4")  # heads do not divide, and lose a to layers
@settings(max_examples=30, deadline=None, derandomize=True)
@given(some_rules, some_rules, st.sampled_from(["a:2,b:4", "a:8,b:1", "a:4,b:2"]))
def test_the_lint_rejects_what_jax_rejects(rules: str, param_rules: str, mesh: str) -> None:
    """What passes is traced, gradients too; a size that does not divide is refused by jax."""
    layout = Layout(mesh=mesh, rules=rules, param_rules=param_rules)
    spec = dataclasses.replace(SPLITTABLE, kv_heads=4, loss_chunks=2, scan=True, layers=8)
    model = TransformerModel(spec, layout)
    reported = lint(layout, mesh_sizes(mesh, 8), recorded(spec, 8, 24), {})

    def gradients() -> object:
        params, batch = model.init(jax.random.key(0)), zeros(layout, 8, 24)
        key = jax.random.key(1)
        return jax.grad(lambda p: model.loss(p, batch, Criterion(), key).objective)(params)

    with jax.set_mesh(make_mesh(layout)):
        if {"indivisible", "conflict"} <= {*codes(reported)}:
            return  # jax may give the mesh axis to another axis, which divides
        if "indivisible" in codes(reported):
            with pytest.raises(ValueError, match="divide"):
                jax.eval_shape(gradients)
        elif all(problem.severity == "warning" for problem in reported):
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
    reported = text(problems("experts:expert", "data:2,expert:3", record=EXPERTS))
    assert "Legal: experts 15 or 18; expert 1, 2, 4, 8 or 16." in reported
    assert "decoder/layers_N/block1/mlp/router_DE" in reported
    errors = problems("batch:data;experts:data", "data:3", record=EXPERTS)
    [groups] = [e for e in errors if "groups = 8 does not divide over data = 3" in e.message]
    assert "set a smaller Moe.group_tokens or a larger Run.batch_sequences" in groups.fix


@pytest.mark.parametrize("sizes", [{"vocab": 62}, {"kv_heads": 3, "heads": 6}], ids=str)
def test_what_length_yields_in_decoding_must_divide_as_well(sizes: dict[str, int]) -> None:
    """The mesh axis splits positions in training, and another axis where no positions are split."""
    axis, size = next(iter(sizes.items()))
    rules = f"batch:data;length:model;memory:model;{axis}:model?"

    def problems_of(**sizes: int) -> list[Problem]:
        spec = dataclasses.replace(SPLITTABLE, positions=Rotary(), **sizes)
        return problems(rules, param_rules="d_model:model", record=recorded(spec, 8, 24))

    assert problems_of() == []
    (problem,) = problems_of(**sizes)
    assert problem.code == "indivisible" and "in decoding" in problem.subject
    assert f"{axis} = {size} does not divide over model = 4" in str(problem)


def test_nearly_all_is_not_100_percent() -> None:
    assert [_percent(share) for share in (0.4, 0.9999, 1)] == ["40%", "99.99%", "100%"]
