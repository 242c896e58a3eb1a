"""Random runs and layouts, for the search that compares layouts with one device.

In every choice the simplest comes first: hypothesis shrinks a failure to few settings.
"""

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from configs.errors import UserError
from configs.spec import is_spec
from configs.write import dump
from data.sources.pair_kinds import Phrases
from data.sources.text import Docstrings
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from layouts.axes import AXES, SYNONYMS
from layouts.layout import Layout, pairs
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.decoding.beam import Beam
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Router, Top2, TopK
from models.parts import Block, Part
from models.positions.absolute import Learned, NoPositions, Sinusoidal
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import Precision
from models.transformer import Transformer
from tests.toys import FLOAT64, with_parts
from trainer.checks import check_run
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.optimizer import OptimizerSpec
from trainer.optimizers.schedules import Constant
from trainer.run import Run

T = TypeVar("T")
MESHES = ((2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2), (2, 4), (8, 1), (2, 3), (2, 2, 2),
          (2, 2, 2), (1, 4, 2), (3,), (5,), (3, 2), (7,), (1, 3), (6,))  # fmt: skip
MESH_AXES = "xyz"
LAYOUTS_A_RUN = 8
MOSTLY = (True,) * 5 + (False,)
# What people write; the search adds rules to these, and takes some away.
TEMPLATES = (
    "",
    "batch:{0}",
    "batch:{0};heads:{1};d_ff:{1};vocab:{1}",
    "batch:{0};heads:{1};d_ff:{1};vocab:{1};length:{1}?",
    "batch:{0};heads:{1};d_ff:{1};vocab:{1};d_model:{1}?",
    "batch:{0};heads:{1};d_ff:{1};vocab:{1};experts:{0}",
    "batch:{0};experts:{1}",
    "batch:{0};length:{1};memory:{1};vocab:{1}?",
    "length:{0};memory:{0}",
)
PARAM_TEMPLATES = ("", "", "d_model:{0}?", "d_model:{1}?", "d_model:{0}")
PADS = tuple(axis.name for axis in AXES if axis.pads)
EXPERT_AXES = ("experts", "groups", "group_tokens", "capacity", "choices")
# Axes of many tensors come up more often than those of few.
DENSE_AXES = (
    *("batch", "length", "memory", "d_model", "d_ff", "heads", "vocab") * 2,
    *(axis.name for axis in AXES if axis.name not in EXPERT_AXES),
    *SYNONYMS,
)
BFLOAT16 = Precision(compute="bfloat16")
RATE = Constant(peak=3e-3, warmup_steps=2)
# A floor under AdamW's divisor: a gradient that is nothing but round-off moves no weight.
OPTIMIZERS: tuple[OptimizerSpec, ...] = (
    AdamW(schedule=RATE, clip_global_norm=0.5, epsilon=1e-5),
    Adafactor(schedule=RATE, clip_global_norm=0.5, factored_from=4),
)
SEARCHES: tuple[Search, ...] = (
    Sampling(temperature=0),
    Beam(width=3),
    Beam(width=2, flat=False),
    Sampling(temperature=1.5, width=2),
    Sampling(temperature=1.5, top_k=5),
    Sampling(temperature=1.5, top_p=0.9, width=2, flat=False),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run under a layout, and a search to decode with."""

    run: Run
    layout: Layout
    search: Search
    prompt_tokens: int

    @property
    def spec(self) -> Transformer:
        assert isinstance(self.run.model, Transformer)
        return self.run.model

    @property
    def kind(self) -> str:
        """Names the kind of model."""
        dispatches = [f", experts by {moe.dispatch}" for moe in self.spec.moes]
        return "".join(("pairs" if self.spec.has_encoder else "text", *dispatches))

    @property
    def has_kernel(self) -> bool:
        """Tells whether a kernel computes attention, where one can."""
        parts = (block.attention for block in self.spec.blocks)
        return any(getattr(part, "implementation", None) == "flash" for part in parts)

    def gin(self) -> str:
        """Writes the case as a gin file, without what has its default."""
        specs = [self.run, self.layout]
        defaults = _defaults(specs)
        lines = dump(specs).splitlines(keepends=True)
        text = "".join(x for x in lines if x.partition(" = ")[0].split("/")[-1] not in defaults)
        return f"# {self.search}, prompts of {self.prompt_tokens}\n{text}"


def _defaults(specs: list[Any]) -> set[str]:
    """Names the parameters that have their default in all specs of a class, nested ones too."""
    every: dict[str, bool] = {}
    pending = list(specs)
    while pending:
        made = pending.pop()
        for field in dataclasses.fields(made):
            value, name = getattr(made, field.name), f"{type(made).__name__}.{field.name}"
            every[name] = every.get(name, True) and value == field.default
            items = value if isinstance(value, tuple) else (value,)
            pending += [item for item in items if is_spec(item)]
    return {name for name, is_default in every.items() if is_default}


class Choose(Protocol):
    """Takes one of some options: at random, as hypothesis draws, or as a list of numbers says."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def a_router(choose: Choose, experts: int) -> Router:
    shared: dict[str, Any] = {
        "capacity_factor": choose((1.0, 0.75, 16.0)),
        "least_capacity": choose((4, 1)),
        "jitter": choose((0.0, 0.1)),
        "z_loss": choose((0.0, 1e-3)),
    }
    if choose(("top 2", "top k")) == "top k" or experts == 1:
        return TopK(
            k=choose((1, 3)) if experts > 1 else 1, normalises=choose((False, True)), **shared
        )
    return Top2(random_second=choose((False, True)), **shared)


def some_experts(choose: Choose, length: int, expert: Mlp) -> Moe:
    experts = choose((8, 16, 4, 6, 8, 1))
    return Moe(
        experts=experts,
        d_ff=choose((None, 24)),
        router=a_router(choose, experts),
        dispatch=choose(("gather", "einsum", "dropless")),
        group_tokens=choose((None, length, length // 2, 2 * length, 8 * length)),
        expert=expert,
    )


POSITIONS = {"learned": Learned(), "rotary": Rotary(), "sinusoidal": Sinusoidal()}


def a_model(choose: Choose, length: int, *, has_encoder: bool) -> Transformer:
    """Chooses a model for rows of this length."""
    patterns: list[tuple[Any, Any]] = [(("dense",), None), (("moe",), None)]
    # Compilation takes the time: two kinds of layers, in one stack or in one each.
    if has_encoder:
        patterns += [(("dense",), ("moe",)), (("moe",), ("dense",))]
    else:
        patterns += [(("dense", "moe"), None)]
    pattern, encoder_pattern = choose(patterns)
    causal = "moe" in pattern
    has_experts = causal or "moe" in (encoder_pattern or ())
    queries, kv_heads = choose(((1, 4), (1, 8), (2, 4), (2, 8), (4, 1), (2, 3), (1, 5)))
    position_kind = choose(("learned", "rotary", "relative", "sinusoidal"))
    window = choose((None, None, 5, 7))
    repeats = (1, 1, 2, 4)  # four: two stages, each with two groups of layers
    # Chosen where they have no effect as well: an option then moves none of those that follow.
    encoder_repeats, source_vocab = choose(repeats) * has_encoder, choose((None, 72))
    given_kv_heads, length_limit = choose((None, kv_heads)), choose((32, 36))
    relative = Relative(buckets=choose((8, 6)), max_distance=16, shared=choose((False, True)))
    vocab, layers = choose((64, 48, 64, 62)), choose(repeats) * len(pattern)
    d_model, d_ff, d_kv = choose((16, 24, 16, 18)), choose((40, 32, 40, 30)), choose((8, 6))
    mlp, tied = Mlp(gated=choose((False, True))), choose((True, False))
    combined_qkv, dropout = choose((False, True)), choose((0.0, 0.1))
    attention_dropout, scan = choose((0.0, 0.0, 0.2)), choose((True, False))
    remat, chunks, loss_chunks = (
        choose(("none", "dots", "full")), choose((1, 2, 3)), choose((1, 2, 3))
    )  # fmt: skip
    blocks, feed_forward = {"dense": Block()}, mlp
    if has_experts:
        moe = some_experts(choose, length, mlp)
        blocks["moe"] = Block(feed_forward=moe)
        if pattern == ("moe",) and encoder_pattern is None:
            blocks["moe"], feed_forward = Block(), moe
    positions = POSITIONS.get(position_kind, relative)
    # As BART has them, where no choice is left: another one would move those that follow.
    is_bart = has_encoder and position_kind == "learned" and not scan
    if is_bart:
        positions = Learned(by_stack=True, scaled=False, first=2)
    return Transformer(
        vocab=vocab,
        layers=layers,
        encoder_layers=encoder_repeats * len(encoder_pattern or pattern),
        source_vocab=source_vocab if has_encoder else None,
        d_model=d_model,
        d_ff=d_ff,
        heads=queries * kv_heads,
        kv_heads=given_kv_heads if queries == 1 else kv_heads,
        d_kv=d_kv,
        attention=MultiHead(
            combined_qkv=combined_qkv,
            dropout=attention_dropout,
            window=None if has_encoder else window,
            chunks=chunks,
        ),
        positions=positions,
        embed_norm=is_bart,
        feed_forward=feed_forward,
        # Decoding takes 16 places for the prompt and 16 for the text.
        length=length_limit if position_kind == "learned" else 256,
        tied=tied,
        dropout=dropout,
        scan=scan,
        remat=remat,
        loss_chunks=loss_chunks,
        pattern=tuple(blocks[kind] for kind in pattern),
        encoder_pattern=encoder_pattern and tuple(blocks[kind] for kind in encoder_pattern),
        precision=choose((FLOAT64, FLOAT64, FLOAT64, FLOAT64, BFLOAT16)),
    )


def a_run(choose: Choose) -> Run:
    """Chooses what is trained; groups of tokens that a batch does not divide into become rows."""
    has_encoder, length, source_length = (
        choose((False, True)), choose((16, 24, 12)), choose((8, 16, 12, 18))
    )  # fmt: skip
    vocab = SentencePiece(size=48)
    if has_encoder:
        task: Task = Translation(
            name="phrases", source=Phrases(), vocab=vocab, length=length,
            source_length=source_length,
        )  # fmt: skip
    else:
        task = Task(name="docstrings", source=Docstrings(), vocab=vocab, length=length)
    microbatches, model = choose((1, 2, 3)), a_model(choose, length, has_encoder=has_encoder)
    r_drop = choose((0.0, 0.0, 1.0)) if model.has_dropout else 0.0
    run = Run(
        model=model,
        task=task,
        optimizer=choose(OPTIMIZERS),
        steps=2,
        batch_sequences=microbatches * choose((8, 8, 8, 4, 6)),
        microbatches=microbatches,
        label_smoothing=choose((0.0, 0.1)),
        z_loss=choose((0.0, 1e-3)),
        r_drop=r_drop,
    )
    model = with_turns(choose, model)
    run = with_kernel(choose, dataclasses.replace(run, model=model))
    model = run.model
    assert isinstance(model, Transformer)
    try:
        check_run(run)
    except UserError:
        assert model.moes
        run = dataclasses.replace(run, model=with_parts(model, in_rows))
    return run


def with_turns(choose: Choose, model: Transformer) -> Transformer:
    """Gives the first block of some decoders another window, or other positions, or some a layer
    before their pattern."""
    change = choose(("none", "none", "none", "none", "window", "positions", "first"))
    positions = choose((NoPositions(), Rotary(theta=100.0), Relative(buckets=8, max_distance=16)))
    if change == "none" or (change == "window" and model.has_encoder):
        return model
    if change == "first":
        first_blocks = (dataclasses.replace(model.pattern[-1], norm_places="both"),)
        return dataclasses.replace(model, layers=model.layers + 1, first_blocks=first_blocks)
    changes: dict[str, Any] = {"positions": positions}
    if change == "window":
        changes = {"attention": dataclasses.replace(model.attention, window=3)}
    first, second = model.pattern[0], model.pattern[-1]
    return dataclasses.replace(
        model,
        layers=max(model.layers, 2),
        pattern=(dataclasses.replace(first, **changes), second),
        encoder_pattern=model.encoder_pattern or model.pattern if model.has_encoder else None,
    )


def with_kernel(choose: Choose, run: Run) -> Run:
    """Computes the attention of some models by an interpreted kernel, in rows that it takes.

    Kernels compute in float32, where round-off may flip a ReLU: such models have none.
    """
    kind = choose(("none",) * 6 + ("causal", "window", "cap", "latent"))
    length = choose((256, 512))  # the longer ones are dealt to devices that share a row
    model, task = run.model, run.task
    assert isinstance(model, Transformer)
    if kind == "none":
        return run
    parts = [part for block in model.blocks for part in block.parts]
    has_bias = any(isinstance(part, Relative) for part in parts)

    def change(part: Part) -> Part:
        if isinstance(part, Moe):
            return dataclasses.replace(part, expert=change(part.expert))
        if isinstance(part, Mlp):
            return dataclasses.replace(part, activation="silu")
        if not isinstance(part, MultiHead):
            return part
        changes: dict[str, Any] = {"implementation": "flash", "dropout": 0.0, "window": part.window}
        if kind == "cap":
            changes["logit_cap"] = 0.5
        if kind == "window" and not model.has_encoder:
            changes["window"] = 150
        if kind == "latent" and not (model.has_encoder or has_bias):
            return Latent(latent=8, rotated=4, **changes)
        return dataclasses.replace(part, **changes)

    sizes = {"source_length": 256} if model.has_encoder else {}
    precision = Precision() if model.precision == FLOAT64 else model.precision
    model = dataclasses.replace(
        with_parts(model, change), length=max(model.length, length), precision=precision
    )
    task = dataclasses.replace(task, length=length, **sizes)
    r_drop = run.r_drop if model.has_dropout else 0.0
    return dataclasses.replace(run, model=model, task=task, r_drop=r_drop)


def in_rows(part: Part) -> Part:
    """Returns the part; experts route the tokens of each row together."""
    return dataclasses.replace(part, group_tokens=None) if isinstance(part, Moe) else part


def a_rule(choose: Choose, axes: Sequence[str], mesh: Sequence[str]) -> str:
    """Chooses one rule; more than half of them give way to others."""
    axis = choose(axes)
    suffixes = ("", "?", "?", "?", "+") if axis in PADS else ("", "?", "?")
    return f"{axis}:{choose(mesh)}{choose(suffixes)}"


def some_rules(
    choose: Choose, templates: Sequence[str], additions: int, axes: Sequence[str], mesh: str
) -> str:
    """Chooses a template, with changes, and other rules."""
    # Of two rules that would share the only mesh axis, the second gives way.
    names = mesh if len(mesh) > 1 else (mesh, f"{mesh}?")
    template = [part.format(*names) for part in choose(templates).split(";") if part]
    kept = [part for part in template if choose(MOSTLY)]
    pads = [part.split(":")[0] in PADS and "?" not in part for part in kept]
    padded = [
        f"{part}+" if may_pad and not choose(MOSTLY) else part
        for part, may_pad in zip(kept, pads, strict=True)
    ]
    added = [a_rule(choose, axes, mesh) for _ in range(choose(range(additions + 1)))]
    unique: dict[str, str] = {}  # an axis is named once for a mesh axis
    for rule in [*padded, *added]:
        unique.setdefault(rule.rstrip("?+"), rule.replace("??", "?"))
    chosen = list(unique.values())
    return ";".join(chosen if choose((True, False)) else chosen[::-1])


def a_layout(choose: Choose, run: Run) -> Layout:
    """Chooses a mesh of up to eight devices, and rules."""
    assert isinstance(run.model, Transformer)
    sizes = choose(MESHES)
    mesh = MESH_AXES[: len(sizes)]
    axes = (*DENSE_AXES, *EXPERT_AXES * 3) if run.model.moes else DENSE_AXES
    torus = ";".join(f"{name}:{axis}" for name, axis in zip(mesh, "xyz", strict=False))
    return Layout(
        mesh=",".join(f"{name}:{size}" for name, size in zip(mesh, sizes, strict=True)),
        rules=some_rules(choose, TEMPLATES, 3, axes, mesh),
        param_rules=some_rules(choose, PARAM_TEMPLATES, 1, axes, mesh),
        order=choose((None, None, None, torus)),
    )


def perhaps_in_stages(choose: Choose, layout: Layout) -> Layout:
    """Runs the layers of some layouts in stages; their mesh axis may split batch and vocab too."""
    layout = dataclasses.replace(layout, pipeline_repeats=choose((1, 1, 2)))
    if choose(MOSTLY):
        return layout
    *_, stages = (name for name, _ in pairs(layout.mesh))
    others = [
        rule for rule in layout.rules.split(";") if rule.rstrip("?+").split(":")[-1] != stages
    ]
    shared = choose(
        ("", "", f"vocab:{stages}", f"batch:{stages}", f"vocab:{stages};batch:{stages}")
    )
    rules = filter(None, [*others, shared, f"layers:{stages}"])
    return dataclasses.replace(layout, rules=";".join(rules))


def a_case(choose: Choose, run: Run) -> Case:
    layout, search, prompt = a_layout(choose, run), choose(SEARCHES), choose((0, 5))
    return Case(run, perhaps_in_stages(choose, layout), search, prompt)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a case, as a strategy of hypothesis."""

    def choose(options: Sequence[T]) -> T:
        return draw(st.sampled_from(options))

    return a_case(choose, a_run(choose))


def numbered_case(number: int) -> tuple[Case, list[int]]:
    """Returns the case of a number, and the numbers of the options that it took.

    Neighbours share a run: it is recorded, and trained on one device, once for all of them.
    """
    runs, layouts, options = Random(number // LAYOUTS_A_RUN), Random(number), list[int]()

    def chooser(random: Random) -> Choose:
        def choose(choices: Sequence[T]) -> T:
            options.append(random.randrange(len(choices)))
            return choices[options[-1]]

        return choose

    run = a_run(chooser(runs))
    return a_case(chooser(layouts), run), options


def chosen_case(chosen: Sequence[int]) -> Case:
    """Returns the case that takes these options; the first where a number is none of them."""
    pending = iter(chosen)

    def choose(options: Sequence[T]) -> T:
        number = next(pending, 0)
        return options[number if number < len(options) else 0]

    return a_case(choose, a_run(choose))
