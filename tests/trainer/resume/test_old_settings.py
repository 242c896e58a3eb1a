"""Settings that versions before the tree of parts saved."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from configs.load import load
from configs.spec import spec
from configs.write import dump
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2, TopK
from models.norms.rms import RmsNorm
from models.parts import Block
from models.positions.relative import Relative
from models.positions.rope_scaling import Llama3Scaling
from models.positions.rotary import Rotary
from models.positions.sinusoidal import Sinusoidal
from models.spec import TransformerSpec
from models.transformer import Transformer
from tests.trainer.planning.runs import TASK
from trainer.model_dir import ModelDir
from trainer.optimizers.adamw import AdamW
from trainer.resume.changes import check_changes
from trainer.resume.history import Start, record_start
from trainer.resume.old_settings import upgraded
from trainer.run import Run

# What commit 3277179 saved of a model of these sizes.
SAVED = """\
Transformer.vocab = 16
Transformer.layers = 4
Transformer.encoder_layers = 0
Transformer.source_vocab = None
Transformer.d_model = 8
Transformer.d_ff = 16
Transformer.heads = 2
Transformer.kv_heads = None
Transformer.d_kv = 4
Transformer.activation = 'relu'
Transformer.gated = False
Transformer.positions = 'learned'
Transformer.rope_theta = 10000.0
Transformer.rope_scaling = None
Transformer.length = 256
Transformer.buckets = 32
Transformer.max_distance = 128
Transformer.shares_bias = False
Transformer.tied = True
Transformer.embed_scale = None
Transformer.query_scale = None
Transformer.logit_scale = 1.0
Transformer.norm_epsilon = 1e-06
Transformer.norm_offset = False
Transformer.qk_norm = False
Transformer.attention_biases = 'none'
Transformer.sliding_window = None
Transformer.combined_qkv = False
Transformer.dropout = 0.0
Transformer.hidden_dropout = None
Transformer.attention_dropout = 0.0
Transformer.scan = True
Transformer.remat = 'none'
Transformer.remat_saves = ()
Transformer.attention = 'auto'
Transformer.attention_chunks = 1
Transformer.loss_chunks = 1
Transformer.pattern = ('dense',)
Transformer.encoder_pattern = None
Transformer.moe = None
Transformer.precision = @Precision()

Precision.store = 'float32'
Precision.compute = 'float32'
"""
LLAMA3 = """
Llama3Scaling.factor = 8.0
Llama3Scaling.original_length = 64
Llama3Scaling.low_freq_factor = 1.0
Llama3Scaling.high_freq_factor = 4.0
"""
MOE = """
Moe.experts = 4
Moe.d_ff = 8
Moe.router = @TopK()
Moe.dispatch = 'gather'
Moe.group_tokens = 16

TopK.capacity_factor = 1.0
TopK.evaluation_capacity_factor = 2.0
TopK.least_capacity = 4
TopK.jitter = 0.0
TopK.aux_loss = 0.01
TopK.z_loss = 0.0
TopK.k = 1
TopK.normalises = False
"""
MODEL = Transformer(vocab=16, layers=4, d_model=8, d_ff=16, heads=2, d_kv=4)
EXPERTS = Moe(experts=4, d_ff=8, router=TopK(k=1), group_tokens=16)
ENCODING = dataclasses.replace(MODEL, encoder_layers=2)


def saved(*settings: str, more: str = "") -> str:
    """The text of a run with other settings of the model, and with specs that they name."""
    lines = SAVED.splitlines()
    for setting in settings:
        [place] = [i for i, line in enumerate(lines) if line.startswith(setting.split("= ")[0])]
        lines[place] = setting
    return "\n".join(lines) + "\n" + more


def loaded(text: str, folder: Path, kind: Any = Transformer) -> Any:
    """What a text says; all of its settings are read."""
    file = folder / "config.gin"
    file.write_text(text)
    config = load([str(file)])
    assert config.unused(kind) == ()
    return config.make(kind)


ROTARY = dataclasses.replace(
    MODEL,
    attention=MultiHead(window=32, biases="qkv", qk_norm=True, query_scale=0.5, combined_qkv=True),
    positions=Rotary(theta=500_000.0, scaling=Llama3Scaling(factor=8.0, original_length=64)),
    feed_forward=Mlp(activation="silu", gated=True),
    norm=RmsNorm(epsilon=1e-5, offset=True),
)
CASES: dict[str, tuple[str, Transformer]] = {
    "default": (saved(), MODEL),
    "speed": (
        saved(
            "Transformer.hidden_dropout = 0.0",
            "Transformer.attention_dropout = 0.1",
            "Transformer.attention = 'plain'",
            "Transformer.attention_chunks = 2",
        ),
        dataclasses.replace(
            MODEL,
            attention=MultiHead(implementation="plain", chunks=2, dropout=0.1),
            feed_forward=Mlp(dropout=0.0),
        ),
    ),
    "rotary": (
        saved(
            "Transformer.activation = 'silu'",
            "Transformer.gated = True",
            "Transformer.positions = 'rotary'",
            "Transformer.rope_theta = 500000.0",
            "Transformer.rope_scaling = @Llama3Scaling()",
            "Transformer.query_scale = 0.5",
            "Transformer.norm_epsilon = 1e-05",
            "Transformer.norm_offset = True",
            "Transformer.qk_norm = True",
            "Transformer.attention_biases = 'qkv'",
            "Transformer.sliding_window = 32",
            "Transformer.combined_qkv = True",
            more=LLAMA3,
        ),
        ROTARY,
    ),
    "relative": (
        saved(
            "Transformer.encoder_layers = 2",
            "Transformer.positions = 'relative'",
            "Transformer.buckets = 8",
            "Transformer.max_distance = 20",
            "Transformer.shares_bias = True",
        ),
        dataclasses.replace(ENCODING, positions=Relative(buckets=8, max_distance=20, shared=True)),
    ),
    "experts in every second layer": (
        saved(
            "Transformer.positions = 'sinusoidal'",
            "Transformer.activation = 'gelu'",
            "Transformer.pattern = ('dense', 'moe')",
            "Transformer.moe = @Moe()",
            more=MOE,
        ),
        dataclasses.replace(
            MODEL,
            positions=Sinusoidal(),
            feed_forward=Mlp(activation="gelu"),
            pattern=(
                Block(),
                Block(feed_forward=dataclasses.replace(EXPERTS, expert=Mlp(activation="gelu"))),
            ),
        ),
    ),
    "experts in all layers": (
        saved(
            "Transformer.gated = True",
            "Transformer.pattern = ('moe',)",
            "Transformer.moe = @Moe()",
            more=MOE,
        ),
        dataclasses.replace(
            MODEL, feed_forward=dataclasses.replace(EXPERTS, expert=Mlp(gated=True))
        ),
    ),
    "experts in the encoder": (
        saved(
            "Transformer.encoder_layers = 2",
            "Transformer.encoder_pattern = ('moe',)",
            "Transformer.moe = @Moe()",
            more=MOE,
        ),
        dataclasses.replace(ENCODING, encoder_pattern=(Block(feed_forward=EXPERTS),)),
    ),
    "experts in the decoder": (
        saved(
            "Transformer.encoder_layers = 2",
            "Transformer.pattern = ('moe',)",
            "Transformer.encoder_pattern = ('dense', 'dense')",
            "Transformer.moe = @Moe()",
            more=MOE,
        ),
        dataclasses.replace(
            ENCODING, pattern=(Block(feed_forward=EXPERTS),), encoder_pattern=(Block(), Block())
        ),
    ),
    "the pattern of no encoder": (saved("Transformer.encoder_pattern = ('moe',)"), MODEL),
}


@pytest.mark.parametrize("name", CASES)
def test_saved_settings_are_those_of_the_tree(name: str, tmp_path: Path) -> None:
    text, model = CASES[name]
    new = upgraded(text)
    assert loaded(new, tmp_path) == model
    assert upgraded(new) == new and new.count("\n") == text.count("\n")


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_now_stays_as_it_is(name: str) -> None:
    text = dump([CASES[name][1]], ["models.positions.rope_scaling"])
    assert upgraded(text) == text


def test_each_former_setting_has_a_new_name() -> None:
    names = {line.split(" = ")[0].partition(".")[2] for line in SAVED.splitlines()}
    assert TransformerSpec.renamed.keys() <= names
    new = upgraded(saved("Transformer.positions = 'rotary'"))
    new += upgraded(saved("Transformer.positions = 'relative'"))
    for name, now in TransformerSpec.renamed.items():
        assert f"Transformer.{name} = " not in new
        assert f"{now} = " in new or name == "moe"


@spec
class PairOfModels:
    first: Transformer
    second: Transformer


def test_each_of_two_models_keeps_its_parts(tmp_path: Path) -> None:
    first = saved(
        "Transformer.positions = 'rotary'",
        "Transformer.activation = 'gelu'",
        "Transformer.pattern = ('moe',)",
        "Transformer.moe = @Moe()",
        more=MOE,
    )
    second = saved(
        "Transformer.gated = True",
        "Transformer.positions = 'relative'",
        "Transformer.pattern = ('dense', 'moe')",
        "Transformer.moe = @moe_6/Moe()",
    )
    second = second.partition("\n\n")[0].replace("Transformer.", "second_5/Transformer.")
    second += "\n\nmoe_6/Moe.experts = 2\nmoe_6/Moe.router = @Top2()\n"
    top = "PairOfModels.first = @Transformer()\nPairOfModels.second = @second_5/Transformer()\n\n"
    pair = loaded(upgraded(top + first + "\n" + second), tmp_path, PairOfModels)
    experts = dataclasses.replace(EXPERTS, expert=Mlp(activation="gelu"))
    assert pair.first == dataclasses.replace(MODEL, positions=Rotary(), feed_forward=experts)
    gated = Mlp(gated=True)
    others = dataclasses.replace(EXPERTS, experts=2, expert=gated, router=Top2())
    assert pair.second == dataclasses.replace(
        MODEL,
        positions=Relative(),
        feed_forward=gated,
        pattern=(Block(), Block(feed_forward=others)),
    )


def test_modules_that_moved_are_imported_from_where_they_are() -> None:
    old = "import models.architectures\nimport models.moe.routing\nimport mine\n"
    assert upgraded(old) == (
        "import models.transformer\nimport models.feed_forward.moe.routing\nimport mine\n"
    )


@pytest.mark.parametrize("has_record", [True, False])
def test_a_saved_run_continues(tmp_path: Path, has_record: bool) -> None:
    text, model = CASES["rotary"]
    run = Run(model=model, task=TASK, steps=5, batch_sequences=4, optimizer=AdamW())
    own = [section for section in dump([run]).split("\n\n") if not is_of_model(section)]
    text = "\n\n".join([*own, text])
    directory = ModelDir(tmp_path)
    directory.config_file.write_text(text)
    if has_record:
        record_start(tmp_path, Start(0, "", settings=text))
    assert directory.recorded_run() == run
    config = directory.load((), ("Run.steps = 9", "MultiHead.implementation = 'plain'"))
    changes = check_changes("There", run, config.make(Run), override=False)
    assert [change.name for change in changes] == ["MultiHead.implementation", "Run.steps"]
    directory.config_file.write_text(text.replace("rope_theta = 5", "rope_theta = 6"))
    if has_record:
        with pytest.raises(UserError, match=r"Rotary.theta: 500000.0 there, 600000.0 now"):
            directory.load()


def is_of_model(section: str) -> bool:
    kinds = ("Transformer", "MultiHead", "Rotary", "Llama3Scaling", "Mlp", "RmsNorm", "Block",
             "Precision")  # fmt: skip
    return section.startswith(tuple(f"{kind}." for kind in kinds))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rope_theta = 5e5", r"rope_theta: no such parameter\.  It is Rotary\.theta now\."),
        ("gated = True", r"gated: no such parameter\.  It is Mlp\.gated now\."),
        ("attention = 'flash'", r"attention = 'flash': found str, legal: .*@MultiHead\(\)"),
        ("positions = 'rotary'", r"positions = 'rotary': found str, legal: .*@Rotary\(\)"),
        ("pattern = ('dense',)", r"pattern\[0\] = 'dense': found str, legal: .*@Block\(\)"),
    ],
)
def test_a_former_name_is_refused_with_the_new_one(given: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"Transformer\.{words}"):
        load([], [f"Transformer.{given}"]).make(Transformer)


def test_code_that_names_a_former_setting_is_told_the_new_one() -> None:
    former: Any = {"sliding_window": 4}
    with pytest.raises(UserError, match=r"It is MultiHead.window now"):
        dataclasses.replace(MODEL, **former)
