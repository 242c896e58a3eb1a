"""Checks a run before anything is compiled: layout and vocabulary against the model."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from configs.errors import RunError, UserError
from configs.paths import path_of
from data.vocabs import SOURCE_FILE, TARGET_FILE, Vocabs
from layouts.axes import alphabet, letters_of
from layouts.device_order import Torus
from layouts.layout import Layout
from layouts.lint.errors import LintContext, Problem
from layouts.lint.recorder import Record, record
from layouts.lint.report import check, find_trace_problem, lint, report
from layouts.mesh import abstract_mesh, use_mesh
from layouts.shards import num_shards
from models.api import ModelSpec
from models.layers.pipeline import Schedule, stage_axes
from models.precision import Precision
from models.preferences import Dpo
from models.spec import TransformerSpec
from trainer.model_dir import ModelDir, teacher_spec
from trainer.run import ROWS_MULTIPLE, Run

logger = logging.getLogger(__name__)

MAX_BUBBLE = 0.2  # the largest idle fraction of stages without a warning

NARROW_PRODUCTS = {"bfloat16": {"avx512_bf16", "amx_bf16"}, "float16": {"avx512_fp16"}}
"""Linux's names of x86 instructions that multiply these types."""

# Traces a jitted function of a run under a layout, on a mesh that may have no devices.
TraceFn = Callable[[Run, Layout, Mesh | AbstractMesh], object]
Sizes = Mapping[str, int]  # of mesh axes
Origins = Mapping[str, str]  # the file that set each setting


@functools.lru_cache(maxsize=64)
def record_loss(run: Run) -> Record:
    """Records every weight, tensor and product in the loss of one microbatch; allocates nothing.

    A run records before it sets its mesh, once for each batch size.
    """

    def trace(layout: Layout) -> object:
        model = run.model.model(layout)
        params = model.init(jax.random.key(0))
        rows = run.microbatch_rows
        batch = {
            name: layout.reshard(jnp.zeros((rows, *shape), jnp.int32), letters_of(name))
            for name, shape in run.task.array_shapes.items()
        }
        model.loss(params, batch, run.criterion, jax.random.key(0))
        return params

    return record(trace, run.model.declared_axes)


def check_layout(
    run: Run, layout: Layout, mesh_sizes: Sizes, origins: Origins, torus: Torus | None = None
) -> list[str]:
    """Raises every error of the layout with this model and batch; returns the warnings."""
    problems = lint(layout, mesh_sizes, record_loss(run), with_size_origins(run, origins), torus)
    return [str(problem) for problem in check(layout_name(origins), problems)]


def attention_choices(run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Names the attention implementation of each part of the model on a mesh."""
    with use_mesh(mesh):
        return run.model.attention_choices(layout, run.task.array_lengths)


def pipeline_schedule(run: Run, layout: Layout, mesh_sizes: Sizes) -> Schedule:
    """Returns the pipeline schedule of a run, with a single stage if it has no pipeline."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict(mesh_sizes))):
        if not run.model.model(layout).runs_stages:
            return Schedule(1, run.microbatches)
        return Schedule(num_shards(stage_axes(layout)), run.microbatches, layout.pipeline_repeats)


def check_bubble(run: Run, layout: Layout, mesh_sizes: Sizes) -> list[str]:
    """Returns a warning if stages are idle for much of their time."""
    schedule = pipeline_schedule(run, layout, mesh_sizes)
    stages, repeats = schedule.stages, schedule.repeats
    if schedule.bubble <= MAX_BUBBLE:
        return []
    enough = math.ceil((stages - 1) * (1 / MAX_BUBBLE - 1) / repeats)
    legal, other = " or more", "  Layout.pipeline_repeats lowers it too."
    if repeats > 1:  # a group with fewer microbatches than stages takes as long as a full one
        enough = math.ceil(enough / stages) * stages
        legal, other = f", or more by multiples of {stages}", ""
    idle = schedule._replace(microbatches=enough).bubble
    return [
        f"Warning: Run.microbatches = {run.microbatches}: {stages} stages of layers idle "
        f"{schedule.bubble:.0%} of their time.  With {enough} microbatches{legal}, "
        f"{idle:.0%} at most.{other}"
    ]


def check_precision(run: Run, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Returns a warning if this machine's CPU has no products of the run's compute type."""
    precision = getattr(run.model, "precision", Precision())
    flags = NARROW_PRODUCTS.get(precision.compute)
    if flags is None or jax.default_backend() != "cpu" or not cpuinfo.is_file():
        return []
    if flags & set(cpuinfo.read_text().split()):
        return []
    return [
        f"Warning: Precision.compute = {precision.compute!r}: this processor has none of "
        f"{', '.join(sorted(flags))}, so it is often no faster than "
        "float32.  Compare with Precision.compute = 'float32' on this machine."
    ]


@contextlib.contextmanager
def explained_errors(
    run: Run, layout: Layout, mesh_sizes: Sizes, origins: Origins, *trace_fns: TraceFn
) -> Iterator[None]:
    """Explains a JAX error that the layout causes, and suggests a layout that works.

    `trace_fns` are the functions that run inside; they are traced again only after an error.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        problem = find_untraceable(run, layout, mesh_sizes, origins, *trace_fns)
        if problem is None:
            raise
        raise UserError(report(layout_name(origins), [problem])) from error


def find_untraceable(
    run: Run, layout: Layout, mesh_sizes: Sizes, origins: Origins, *trace_fns: TraceFn
) -> Problem | None:
    """Explains why functions of a run cannot be traced, if the layout is the reason."""

    def trace(layout: Layout, sizes: Sizes) -> None:
        for trace_fn in trace_fns:
            trace_fn(run, layout, abstract_mesh(dict(sizes)))

    context = LintContext(layout, mesh_sizes, record_loss(run), with_size_origins(run, origins))
    return find_trace_problem(context, trace)


def layout_name(origins: Origins) -> str:
    """Returns the stem of the file that sets the rules, given the origin of each setting."""
    return Path(origins.get("Layout.rules", "default").partition(":")[0]).stem


def describe_layout(layout: Layout, origins: Origins) -> str:
    """Returns the name, the mesh and the rules of a layout."""
    return f"layout {layout_name(origins)} (mesh {layout.mesh!r}, rules {layout.rules!r})"


def with_size_origins(run: Run, origins: Origins) -> dict[str, str]:
    """Adds to the origins the settings that decide the sizes of batch and length."""
    batch = "Run.batch_sequences" + " / Run.microbatches" * (run.microbatches > 1)
    lengths = " or ".join(f"{type(run.task).__name__}.{name}" for name in run.task.row_lengths)
    return {"batch": batch, "length": lengths, **origins}


def check_run(run: Run) -> None:
    """Rejects settings that contradict each other under any layout."""
    check_arrays(run)
    check_sides(run)
    check_preferences(run)
    check_model_lengths(run)
    has_teacher = run.teacher is not None and ModelDir(path_of(run.teacher.model_dir)).has_run()
    if has_teacher and run.base is not None and isinstance(run.model, TransformerSpec):
        teacher = teacher_spec(*run.base, run.model)
        check_lengths(run, teacher, f"{run.base[0]} = {run.base[1]!r}", "Use another model there")
    rows = run.microbatch_rows
    for name, group in run.model.groups.items():
        length = run.task.array_lengths[name]
        if rows * length % group:  # experts serve groups of the tokens of a microbatch
            divisors = [n for n in range(1, rows * length + 1) if rows * length % n == 0]
            nearest = min(divisors, key=lambda n: abs(math.log(n / group)))
            raise UserError(
                f"Moe.group_tokens = {group}: a microbatch has {rows} rows of {length} positions "
                f"({name}), which do not divide into such groups.  Legal: a divisor of "
                f"{rows * length}, such as {nearest}, or None: a row."
            )


def check_model_lengths(run: Run) -> None:
    """Rejects rows with more tokens than the model has positions."""
    has_table = getattr(run.model, "length", None) == run.model.max_length
    remedy = "Set Transformer.length to at least that" if has_table else "Set LongRopeScaling.long"
    check_lengths(run, run.model, "the model", remedy)


def check_lengths(run: Run, model: ModelSpec, title: str, remedy: str) -> None:
    """Rejects rows with more tokens than a model has positions."""
    for name, length in run.task.row_lengths.items():
        if model.max_length is not None and length > model.max_length:
            raise UserError(
                f"{type(run.task).__name__}.{name} = {length}: {title} has positions for "
                f"{model.max_length} tokens.  {remedy}, or choose other positions."
            )


def check_arrays(run: Run) -> None:
    """Rejects a task whose batches the model cannot read."""
    task, model = (type(spec).__name__ for spec in (run.task, run.model))
    given, by_letter = run.task.array_shapes, alphabet(run.model.axes).by_letter
    for name, shape in run.model.array_shapes.items():
        if name not in given:
            raise UserError(
                f"Run.task = @{task}(): it provides {', '.join(given)}, but Run.model = @{model}() "
                f"needs {name}.  Use another task or another model."
            )
        for letter, size, legal in zip(letters_of(name)[1:], given[name], shape, strict=True):
            if legal not in (None, size):
                raise UserError(
                    f"Run.task = @{task}(): it provides {name} of {by_letter[letter].name} {size}, "
                    f"but Run.model = @{model}() needs {legal}.  Set both to the same size."
                )


def check_sides(run: Run) -> None:
    """Rejects a model with a source side for a task without one, and the reverse."""
    kind = type(run.task).__name__
    if run.model.has_encoder and not run.task.has_source:
        raise UserError(
            f"Run.task = @{kind}(): the model has an encoder (Transformer.encoder_layers), but the "
            "task has no sources.  Use @Translation(), or encoder_layers = 0."
        )
    if run.task.has_source and not run.model.has_encoder:
        raise UserError(
            f"Run.task = @{kind}(): the model has no encoder to read sources.  "
            "Set Transformer.encoder_layers."
        )


def check_preferences(run: Run) -> None:
    """Rejects preferences without `Dpo`, `Dpo` without preferences, and settings it cannot use."""
    has_rejected = run.task.has_rejected
    if not isinstance(run.teacher, Dpo):
        if has_rejected:
            raise UserError(
                "Run.task = @PreferenceTask(): half of its answers are rejected.  Set Run.teacher "
                "= @Dpo(), and Dpo.model_dir to the model that the run starts from."
            )
        return
    if not has_rejected:
        raise UserError(
            f"Run.teacher = @Dpo(): task @{type(run.task).__name__}() has no rejected answers.  "
            "Set Run.task = @PreferenceTask()."
        )
    for name in ("label_smoothing", "z_loss", "r_drop"):
        if value := getattr(run, name):
            raise UserError(f"Run.{name} = {value}: @Dpo() has no such term.  Unset it.")
    if isinstance(run.model, TransformerSpec) and run.model.router is not None:
        raise UserError("Run.teacher = @Dpo(): a model with experts cannot learn preferences yet.")
    if run.model.has_dropout:
        raise UserError(
            "Run.teacher = @Dpo(): the model has dropout, but its reference does not.  Set "
            "Transformer.dropout = 0, also in its parts."
        )
    if run.start_from is None:
        raise UserError(
            "Run.teacher = @Dpo(): the model would start with random weights.  Set Run.start_from "
            "to the model to train, such as that of Dpo.model_dir."
        )


def check_vocab_settings(run: Run) -> None:
    """Rejects a vocabulary that would have more tokens than the model has rows, before the task
    spends hours to train it and to tokenize the text."""
    if run.vocabs_from:  # their vocabularies replace those that the task would train
        return
    rows_of = {TARGET_FILE: ("vocab", run.model.vocab_rows)}
    if run.model.source_vocab is not None:
        rows_of[SOURCE_FILE] = ("source_vocab", run.model.source_vocab)
    for file, settings in run.task.vocab_settings.items():
        name, rows = rows_of.get(file, rows_of[TARGET_FILE])
        if settings.trained_size is not None and settings.trained_size > rows:
            raise UserError(_too_many_tokens(run, name, rows, settings.trained_size))


def _too_many_tokens(run: Run, name: str, rows: int, tokens: int) -> str:
    model = type(run.model).__name__
    return (
        f"{model}.{name} = {rows}: the vocabulary of task {run.task.name} has {tokens} tokens.  "
        f"Set {model}.{name} to at least that (a multiple of 128 splits well), or use a smaller "
        f"vocabulary, such as SentencePiece.size = {rows}."
    )


def check_vocabs(run: Run, vocabs: Vocabs) -> None:
    """Rejects a vocabulary with more tokens than the model has rows; warns of unused rows."""
    sides, source = [("vocab", vocabs.target, run.model.vocab_rows)], vocabs.source
    source_size, model = run.model.source_vocab, type(run.model).__name__
    if source is not None and source_size is not None:
        sides.append(("source_vocab", source, source_size))
    for name, vocab, rows in sides:
        if vocab.size > rows:
            raise UserError(_too_many_tokens(run, name, rows, vocab.size))
        if rows - vocab.size >= max(ROWS_MULTIPLE, rows // 8):  # few are padding
            logger.warning(
                "Warning: %s.%s = %d: the vocabulary of task %s has %d tokens; the other %d rows "
                "are never used.  %s.%s = None uses the size of the vocabulary.",
                model, name, rows, run.task.name, vocab.size, rows - vocab.size, model, name,
            )  # fmt: skip
    if source is not None and source.ids_hash != vocabs.target.ids_hash and source_size is None:
        raise UserError(
            f"Transformer.source_vocab = None: task {run.task.name} has a separate vocabulary "
            f"for the source.  Set Transformer.source_vocab to at least {source.size}."
        )


def step_flops(run: Run) -> float:
    """Counts the model FLOPs of one update: the products of the forward and backward pass.

    The backward pass costs twice the forward pass, or as much for products with frozen weights.
    Counts only the experts that each token chooses, half of causal attention, and nothing that
    rematerialization repeats.
    """
    recorded = record_loss(dataclasses.replace(run, model=run.model.active))
    trains, flops = run.model.model(Layout()).trains, 3.0 * recorded.flops
    frozen = {each.axes.removeprefix("N") for each in recorded.weights if not trains(each.path)}
    for product in recorded.products:
        left, right = product.equation.partition("->")[0].split(",")
        flops -= product.flops if frozen & {left, right} else 0
    return flops * run.microbatches - masked_step_flops(run)


def masked_step_flops(run: Run) -> float:
    """Counts the FLOPs of masked pairs of tokens, which older publications include."""
    length = run.task.array_lengths.get("targets_BL", 0)
    return 3.0 * run.batch_sequences * run.model.masked_flops(length)
