"""Checks random cases: the lint must be right, and a layout must never change a result.

If the lint accepts a case, training, evaluation, scoring and decoding must trace.  A full run must
give the numbers and texts of one device with plain settings.  If the lint refuses a case, JAX or
the axis letters of the model's tensors must confirm the reason.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import shutil
import tempfile
import traceback
import unittest.mock
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from data.vocab import EOS
from layouts.axes import SYNONYMS, alphabet, axes_of_path
from layouts.layout import Layout, pairs, parse_rules
from layouts.lint.errors import Problem
from layouts.lint.report import lint
from layouts.mesh import abstract_mesh, batch_shards, make_mesh, mesh_sizes
from models import transformer
from models.api import Decodable
from models.attention.multi_head import MultiHead, SoftmaxAttention
from models.decoding.sampling import Sampling
from models.feed_forward.moe.layer import Moe
from models.loss import LossSums
from models.parts import Part
from models.positions.absolute import Learned
from models.positions.relative import Relative
from tests.data.test_vocab import Digits
from tests.random_layouts import BFLOAT16, Case, chosen_case
from tests.toys import (
    FLOAT64,
    ROOT,
    ROUND_OFF,
    WHOLE,
    optax_promotion,
    packed_rows,
    pair_rows,
    with_parts,
)
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import StatePadding
from trainer.checks import record_loss
from trainer.decoding.decoder import SHORTEST, Decoder, Request
from trainer.feed import BatchSharding, whole_batch
from trainer.planning.decoding import trace_decode
from trainer.run import Run
from trainer.serving import slot_engine
from trainer.serving.continuous import ContinuousService
from trainer.serving.service import Job
from trainer.serving.slot_engine import SlotEngine
from trainer.step import (
    State,
    TrainStepSpec,
    abstract_params,
    add_microbatches,
    token_losses,
    train_step_spec,
)
from trainer.traces import DecodeShape, trace_evaluate_step, trace_score_step, trace_train_step

FLOAT32_ROUND_OFF = 1e-5
"""Largest relative difference in float32, for models with a kernel."""
BFLOAT16_LOSS = 2.0**-8
"""Largest relative difference of a loss in bfloat16: the round-off of a single number."""
# Axis letters of activations: axes that share a tensor cannot share a mesh axis.
ACTIVATIONS = ("BLD", "BLF", "BLV", "BLJQK", "BMJK", "BJQLM")
SOURCE_ACTIVATIONS = ("BMD",)
EXPERT_ACTIVATIONS = ("GSD", "GSIC", "EGCD", "EGCF")


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describes one way in which a case fails."""

    kind: str
    """"accepted", "refused" (without a reason) or "differs"."""
    phase: str
    error: str
    """The error of JAX or of the lint, or what differs and by how much."""
    line: str = ""
    """The deepest line of Meshloom in the traceback."""

    @property
    def runs(self) -> bool:
        """Returns whether only a full run shows the failure."""
        return self.kind == "differs" or self.phase == "run"

    @property
    def signature(self) -> tuple[str, ...]:
        """Returns what failures with one cause share, as far as their errors show it."""
        words = re.sub(r"\[.*?\]|'.*?'|\d[\d.e+-]*", "#", self.error.splitlines()[0])[:60]
        return self.kind, self.phase, self.line.partition(":")[0], words


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Holds the result of checking a case."""

    codes: tuple[str, ...]
    """Codes of the lint's errors; empty if it accepts the layout."""
    ran: bool
    failures: tuple[Failure, ...]


Judge = Callable[..., Verdict]


def judge(case: Case, *, runs: bool, compiles: bool = False) -> Verdict:
    """Judges a case.  If it is legal, runs it, or compiles its stages, as the flags say."""
    with jax.enable_x64(case.spec.precision == FLOAT64):
        return _judge(case, runs=runs, compiles=compiles)


def _judge(case: Case, *, runs: bool, compiles: bool) -> Verdict:
    sizes = mesh_sizes(case.layout.mesh, None)
    problems = lint(case.layout, sizes, record_loss(case.run), {})
    errors = [problem for problem in problems if problem.severity == "error"]
    codes = tuple(problem.code for problem in errors)
    if errors:
        return Verdict(codes, False, tuple(without_reason(case, errors)))
    failures = tuple(untraceable(case, "accepted"))
    if not failures and runs:
        return Verdict(codes, True, tuple(different(case)))
    if not failures and compiles and "layers:" in case.layout.rules:
        failures = tuple(uncompilable(case))
    return Verdict(codes, False, failures)


# Accepted: it must trace.


def untraceable(case: Case, kind: str) -> Iterator[Failure]:
    """Traces every program of a case; yields the errors of JAX, equal ones once."""
    errors = set()
    for phase, trace in programs(case).items():
        try:
            trace()
        except Exception as error:
            if str(error) not in errors:
                yield failed(kind, phase, error)
            errors.add(str(error))


def programs(case: Case) -> dict[str, Callable[[], object]]:
    """Returns functions that trace the programs of a run, by name."""
    run, layout = case.run, case.layout
    mesh = abstract_mesh(mesh_sizes(layout.mesh, None))
    sources = SHORTEST if run.model.has_encoder else 0
    # Commands round the rows of a scored batch in this way; each row is a group there.
    rows = whole_batch(run, layout, dict(mesh.shape), run.batch_sequences)
    scored = dataclasses.replace(run, batch_sequences=rows, microbatches=1)
    shape = DecodeShape(
        case.search, decoded_rows(run, layout), sources, case.prompt_tokens, SHORTEST
    )

    def trains() -> object:
        with optax_promotion():
            return trace_train_step(run, layout, mesh)

    return {
        "train": trains,
        "evaluate": lambda: trace_evaluate_step(run, layout, mesh),
        "score": lambda: trace_score_step(scored, layout, mesh),
        "decode": lambda: trace_decode(run, layout, mesh, shape),
    }


def uncompilable(case: Case) -> Iterator[Failure]:
    """Compiles the programs that run in stages."""
    mesh = make_mesh(case.layout)
    for trace in (lambda *of: trace_train_step(*of)[0], trace_evaluate_step):
        try:
            with optax_promotion():
                trace(case.run, case.layout, mesh).lower().compile()
        except Exception as error:
            yield failed("accepted", "compile", error)


def decoded_rows(run: Run, layout: Layout) -> int:
    """Returns the rows of a decoded or scored batch, rounded up as in commands to be divisible."""
    shards = batch_shards(layout, mesh_sizes(layout.mesh, None), rows_are_groups=True)
    return -(-run.batch_sequences // run.microbatches // shards) * shards


def failed(kind: str, phase: str, error: Exception) -> Failure:
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename.removeprefix(f"{ROOT}/")
        if not path.startswith(("/", "tests/")):
            line = f"{path}:{frame.name}, line {frame.lineno}"
    return Failure(kind, phase, f"{type(error).__name__}: {error}"[:600], line)


# Refused: there must be a reason.


def without_reason(case: Case, errors: Sequence[Problem]) -> Iterator[Failure]:
    """Yields the errors that only the lint reports."""
    for problem in errors:
        if not has_reason(case, problem):
            yield Failure("refused", problem.code, str(problem))


def has_reason(case: Case, problem: Problem) -> bool:
    """Confirms an error by the letters and sizes of the model, or because JAX refuses the rules."""
    layout = case.layout
    texts = re.sub(r" \(Layout[^)]*\)", "", problem.rule).split(" and ")
    cited = [str(rule) for text in texts for rule in parse_rules(text)]
    written = {
        field: [str(rule) for rule in parse_rules(getattr(layout, field))]
        for field in ("rules", "param_rules")
    }
    if not {*cited} <= {*written["rules"], *written["param_rules"]}:
        return False
    rules = [pairs(rule.rstrip("?+"))[0] for rule in cited]
    if problem.code == "duplicate-rule":
        each = [Counter(rule.rstrip("?+") for rule in of_field) for of_field in written.values()]
        return any(counts[cited[0].rstrip("?+")] > 1 for counts in each)
    if problem.code == "conflict":
        return "?" not in problem.rule and meet(case, *rules)
    if problem.code == "unmatched-rule":
        return not any(letter in axes for letter in letters(case, rules[0][0])
                       for axes in weights(case.run))  # fmt: skip
    if problem.code == "indivisible":
        shards = math.prod(mesh_sizes(layout.mesh, None)[mesh_axis] for _, mesh_axis in rules)
        groups = {"layers": layout.pipeline_repeats}
        return any(
            size % (shards * groups.get(axis, 1))
            for axis, _ in rules
            for size in sizes_of(case, axis)
        )
    fields = {
        field: ";".join(rule for rule in of_field if rule in cited)
        for field, of_field in written.items()
        if f"Layout.{field}" in problem.rule
    }
    alone = dataclasses.replace(layout, **{"rules": "", "param_rules": "", **fields})
    return any(True for _ in untraceable(dataclasses.replace(case, layout=alone), "refused"))


def sizes_of(case: Case, axis: str) -> set[int]:
    """Returns the sizes of an axis in the tensors of a microbatch."""
    spec, run = case.spec, case.run
    lengths, rows = run.task.array_lengths, run.batch_sequences // run.microbatches
    sides = {lengths["targets_BL"], *([lengths["inputs_BM"]] if spec.has_encoder else [])}
    first = len(spec.first_blocks)
    sizes = {letter: {size} for letter, size in spec.sizes.items() if letter not in "LN"} | {
        "B": {rows}, "L": {*sides}, "M": {*sides}, "H": {spec.heads},
        "N": {(spec.layers - first) // (len(spec.blocks) - first)},
    }  # fmt: skip
    if isinstance(spec.positions, Learned):
        sizes["L"].add(spec.length + spec.positions.first)
    positions = [block.positions for block in (*spec.blocks, *spec.encoder_blocks)]
    sizes["R"] = {each.buckets for each in positions if isinstance(each, Relative)}
    if spec.source_vocab is not None:
        sizes["V"].add(spec.source_vocab)
    if spec.has_encoder:
        sizes["N"].add(spec.encoder_layers // len(spec.encoder_blocks))
    for moe in spec.moes:
        sizes["E"] = {moe.experts}
        sizes["F"].add(moe.d_ff or spec.d_ff)
        tokens = [rows * length for length in sides]
        grouped = [moe.group_tokens] * len(sides) if moe.group_tokens else sides
        sizes["G"] = {a // b for a, b in zip(tokens, grouped, strict=True)}
        sizes["S"] = set(grouped)
        sizes["I"] = {moe.router.choices}
    return set().union(*(sizes.get(letter, set()) for letter in letters(case, axis)))


def meet(case: Case, first: tuple[str, str], second: tuple[str, str]) -> bool:
    """Returns whether two firm rules need one mesh axis in one tensor, and neither may give way."""
    by_letter = alphabet(case.spec.declared_axes).by_letter
    return first[1] == second[1] and any(
        a != b and a in tensor and b in tensor and b not in by_letter[a].meets
        for a, b in itertools.product(letters(case, first[0]), letters(case, second[0]))
        for tensor in tensors(case.run)
    )


def letters(case: Case, axis: str) -> str:
    """Returns the letters that an axis in a rule may stand for."""
    name = SYNONYMS.get(axis, axis)
    letter = alphabet(case.spec.declared_axes).by_name[name].letter
    return letter + {"heads": "J", "batch": "G"}.get(name, "")


@functools.lru_cache
def weights(run: Run) -> tuple[str, ...]:
    """Returns the axis letters of weights, from their paths."""
    params = abstract_params(run.model.model(WHOLE), abstract_mesh({"data": 1}))
    return tuple(axes_of_path(path) for path in by_path(params))


def tensors(run: Run) -> tuple[str, ...]:
    """Returns the axis letters of weights and of activations."""
    sources = SOURCE_ACTIVATIONS if run.model.has_encoder else ()
    experts = EXPERT_ACTIVATIONS if any("E" in axes for axes in weights(run)) else ()
    return (*weights(run), *ACTIVATIONS, *sources, *experts)


# Run: numbers and texts must be those of one device.


@dataclasses.dataclass(frozen=True)
class Result:
    """Holds the result of a run."""

    numbers: dict[str, np.ndarray]
    texts: list[Any]
    folder: str | None = None
    """Where the run on one device saved its state after the first step."""


def plain(case: Case) -> Case:
    """Returns the same run on one device, with plain values for settings that only affect speed.

    Random bits depend on the microbatch, and dropped tokens on the dispatch: if there are any,
    these two settings stay.
    """
    spec, run = case.spec, case.run
    routers = [moe.router for moe in spec.moes]
    is_random = spec.has_dropout or any(
        router.jitter or getattr(router, "random_second", False) for router in routers
    )

    def plain_part(part: Part) -> Part:
        if isinstance(part, SoftmaxAttention):
            part = dataclasses.replace(part, chunks=1, implementation="plain")
        if isinstance(part, MultiHead):
            return dataclasses.replace(part, combined_qkv=False)
        if isinstance(part, Moe):
            router = part.router
            drops_none = router.capacity_factor * router.choices >= part.experts
            if part.dispatch == "einsum" or (drops_none and not is_random):
                return dataclasses.replace(part, dispatch="gather")
        return part

    spec = with_parts(spec, plain_part)
    spec = dataclasses.replace(spec, scan=True, remat="none", loss_chunks=1)
    microbatches = run.microbatches if is_random else 1
    run = dataclasses.replace(run, model=spec, microbatches=microbatches)
    return dataclasses.replace(case, run=run, layout=WHOLE)


def different(case: Case) -> Iterator[Failure]:
    """Runs a case and its plain version; yields differences above round-off."""
    rows = decoded_rows(case.run, case.layout)
    try:
        on_one_device = plain_result(plain(case), rows)
        under_layout = result(case, rows, on_one_device.folder)
    except Exception as error:
        yield failed("accepted", "run", error)
        return
    if case.spec.precision == BFLOAT16:
        yield from different_loss(under_layout, on_one_device)
        return
    bound = FLOAT32_ROUND_OFF if case.has_kernel else ROUND_OFF
    for name, number in on_one_device.numbers.items():
        share = distance(under_layout.numbers[name], number)
        if case.has_kernel and name.startswith("gradients/") and not share <= bound:
            wide = wide_gradient(plain(case), rows, name)
            share = min(share, distance(under_layout.numbers[name], wide))
        if not share <= bound:
            yield Failure("differs", name, f"{share:.2g} of the largest, at most {bound}")
    for row, (text, one) in enumerate(zip(under_layout.texts, on_one_device.texts, strict=True)):
        if text != one:
            yield Failure("differs", "texts", f"row {row}: {text} is not {one}")
            return


def different_loss(under_layout: Result, on_one_device: Result) -> Iterator[Failure]:
    """Compares losses only: in bfloat16, one token that changes its expert changes the rest."""
    share = distance(under_layout.numbers["sums/loss"], on_one_device.numbers["sums/loss"])
    if not share <= BFLOAT16_LOSS:
        yield Failure("differs", "sums/loss", f"{share:.2g} of it, at most {BFLOAT16_LOSS}")


def wide_gradient(case: Case, rows: int, name: str) -> np.ndarray:
    """Returns a gradient in float64, in which a router's jitter draws other random numbers.

    In float32, plain attention on one device sums the gradient of a table of relative positions one
    pair of tokens after another, which is less exact than a kernel.
    """
    spec = dataclasses.replace(case.spec, precision=FLOAT64)
    wide = dataclasses.replace(case, run=dataclasses.replace(case.run, model=spec))
    with jax.enable_x64(True):
        return plain_result(wide, rows).numbers[name]


def distance(numbers: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference, relative to the largest number."""
    largest, difference = np.abs(expected).max(), np.abs(numbers - expected).max()
    return float(difference / largest) if difference else 0.0


@functools.lru_cache(maxsize=4)
def plain_result(case: Case, rows: int) -> Result:
    on_one_device = result(case, rows, None)
    if on_one_device.folder:
        weakref.finalize(on_one_device, shutil.rmtree, on_one_device.folder)
    return on_one_device


def result(case: Case, rows: int, folder: str | None) -> Result:
    """Updates, saves, resumes, scores, computes the gradients of a training step and decodes.

    folder: of the run on one device, from whose checkpoint this one resumes.  Then one device
    restores what this one saves.
    """
    run = case.run
    padding = StatePadding(train_step_spec(run, case.layout), make_mesh(case.layout))
    model, mesh = padding.step_spec.model, padding.mesh
    resumes, folder = folder is not None, folder or tempfile.mkdtemp()
    with Checkpoints(folder) as checkpoints, optax_promotion():
        state = updated(padding, first_state(padding), seed=1)
        numbers = by_path({"first": jax.device_get(padding.unpad(state))})
        if resumes:
            state = padding.pad(checkpoints.restore(padding.unpadded)[0])
        else:
            checkpoints.save(1, padding.unpad(state))
        state = updated(padding, state, seed=2)
        second = padding.unpad(state)
        if resumes:
            one_device = StatePadding(train_step_spec(run, WHOLE), make_mesh(WHOLE))
            with tempfile.TemporaryDirectory() as saved, Checkpoints(saved) as here:
                here.save(2, second)
                second = here.restore(one_device.unpadded)[0]
    numbers |= by_path({"second": jax.device_get(second)})
    params = state["params"]
    with jax.set_mesh(mesh):
        batch = BatchSharding(model.layout, mesh, rows).to_global_arrays(rows_of(run, rows))
        numbers["score"] = np.asarray(token_losses(model, params, batch).loss_BL)
        sharding = BatchSharding.of(run, model.layout, mesh)
        host_batch = rows_of(run, run.batch_sequences)
        batch = sharding.to_global_arrays(host_batch)
        gradients, sums = step_gradients(padding.step_spec, params, batch)
    for name in ("objective", "loss", "correct", "tokens"):
        numbers[f"sums/{name}"] = np.asarray(getattr(sums, name))
    numbers |= {f"routers/{stack}": np.asarray(x) for stack, x in sums.router_objectives.items()}
    gradients = padding.unpad({"params": gradients})["params"]
    numbers |= by_path({"gradients": jax.device_get(gradients)})
    decoder = Decoder(model, params, mesh, case.search, rows)
    answers = sorted(itertools.chain(*decoder.decode(requests(case))))
    hypotheses = [by_rank for _, by_rank in answers]
    texts = [[one.tokens for one in by_rank] for by_rank in hypotheses]
    scores = [(one.score, one.log_probability) for by_rank in hypotheses for one in by_rank]
    numbers["decode"] = np.array(scores)
    if not case.spec.has_encoder and isinstance(case.search, Sampling) and case.search.width == 1:
        jobs = served(case, model, params, mesh, rows)
        numbers["serve"] = np.concatenate([job.log_probabilities for job in jobs])
        texts += [job.tokens for job in jobs]
    return Result(numbers, texts, folder)


def served(case: Case, model: Decodable, params: Any, mesh: Mesh, slots: int) -> list[Job]:
    """Answers the requests like `meshloom serve`, each with its number of new tokens.

    Then answers a longer prompt, and one with the same beginning, of which only the rest is read.
    With rules for stored weights, the layers are scanned as on accelerators.
    """
    vocab = Digits(case.spec.vocab or 0, begin_id=0, end_id=EOS)
    assert isinstance(case.search, Sampling)
    jobs = [Job(request, case.search) for request in requests(case)]
    rounds, first = [jobs], jobs[0].request
    if case.spec.max_length is None or case.spec.max_length >= 2 * SHORTEST:
        long = [*first.prompt, *[EOS + 1] * SHORTEST]
        turns = (first._replace(prompt=[*long[: SHORTEST + 2], *more]) for more in ([], [EOS + 2]))
        rounds += [[Job(turn, case.search)] for turn in turns]
    scans = unittest.mock.patch.object(transformer, "platform", lambda: "tpu")
    short = unittest.mock.patch.object(slot_engine, "SHORTEST_CACHED", SHORTEST)
    with jax.set_mesh(mesh), short, scans if case.layout.param_rules else contextlib.nullcontext():
        params = jax.tree.map(jnp.copy, params)  # the engine frees its weights
        engine = SlotEngine(model, params, mesh, vocab, slots, 2 * SHORTEST, cached_prompts=1)
        service = ContinuousService(engine, step=0, queue=len(jobs))
        service.warm_up()
        for each in rounds:
            service.submit(each)
            while not all(job.is_done for job in each):
                service.advance(service.next_jobs())
    return [*itertools.chain(*rounds)]


@functools.partial(jax.jit, static_argnums=0)
def step_gradients(program: TrainStepSpec, params: Any, batch: Any) -> tuple[Any, LossSums]:
    """Returns the gradients and sums of a training step before its update."""
    return add_microbatches(program, params, batch, jax.random.key(5))


def random_params(padding: StatePadding, seed: int, mean: float = 0.0) -> Any:
    """Returns the same random weights under every layout.

    mean: the mean of scales; other weights have mean 0.
    """
    rng, shapes = np.random.default_rng(seed), padding.unpadded["params"]

    def number(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = rng.normal(mean * ("scale" in path), 0.25, leaf.shape)
        return jax.device_put(np.asarray(drawn, leaf.dtype), leaf.sharding)

    leaves = [number(path, leaf) for path, leaf in by_path(shapes).items()]
    params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return padding.pad({"params": params})["params"]


def first_state(padding: StatePadding) -> State:
    params = random_params(padding, seed=0, mean=1.0)
    with jax.set_mesh(padding.mesh):
        opt_state = jax.jit(padding.step_spec.transform().init)(params)
    return {"params": params, "opt_state": opt_state, "step": jnp.zeros((), jnp.int32)}


def updated(padding: StatePadding, state: State, seed: int) -> State:
    """Updates with random gradients, as from a batch with another seed."""
    with jax.set_mesh(padding.mesh):
        return update(padding.step_spec, state, random_params(padding, seed))


@functools.partial(jax.jit, static_argnums=0)
def update(program: TrainStepSpec, state: State, gradients: Any) -> State:
    return program.update(state, gradients)


def rows_of(run: Run, rows: int) -> dict[str, np.ndarray]:
    """Returns rows with two segments and padding."""
    rng = np.random.default_rng(3)
    lengths = run.task.array_lengths
    length, vocab = lengths["targets_BL"], run.model.vocab
    targets = rng.integers(2, length // 2 + 1, (rows, 2)).tolist()
    if not run.model.has_encoder:
        return packed_rows(targets, length, vocab)
    source_length = lengths["inputs_BM"]
    sources = rng.integers(1, source_length // 2 + 1, (rows, 2)).tolist()
    return pair_rows(targets, sources, length, vocab, source_length=source_length)


def requests(case: Case) -> list[Request]:
    """Returns a few requests of different lengths."""
    rng, vocab = np.random.default_rng(7), case.spec.vocab

    def tokens(count: int) -> list[int]:
        return rng.integers(EOS + 1, vocab, max(count, 0)).tolist()

    return [
        Request(
            prompt=tokens(case.prompt_tokens - row % 2),
            max_new_tokens=4 + row % 3,
            seed=row,
            source=[*tokens(3 + row), EOS] if case.spec.has_encoder else None,
        )
        for row in range(3)
    ]


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


# Reduce a failure to few settings.


def simplest(
    options: Sequence[int], failure: Failure, tries: int, judge: Judge
) -> tuple[Case, Failure]:
    """Tries simpler options, many at a time and then few, while the case fails in the same way."""

    def same_failure(tried: Sequence[int]) -> Failure | None:
        try:
            failures = judge(chosen_case(tried), runs=failure.runs).failures
        except Exception:  # no spec allows these options together
            return None
        return next((one for one in failures if one.signature == failure.signature), None)

    best, kept, size = list(options), failure, len(options) // 2
    while size and tries:
        for start in range(0, len(best), size):
            tried = [*best[:start], *[0] * len(best[start : start + size]), *best[start + size :]]
            if tried != best and tries:
                tries -= 1
                if (new := same_failure(tried)) is not None:
                    best, kept = tried, new
        size //= 2
    return chosen_case(best), kept
