"""Plans decoding from its real function: traced, or compiled for absent devices."""

import dataclasses
import functools
import math
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh

from layouts.absent_devices import topology_mesh
from layouts.cost.collectives import unexpected_traffic
from layouts.cost.dataflow import bytes_read, local_bytes
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import WorkCounts, cost_of
from layouts.cost.peak_memory import peak_bytes
from layouts.cost.step_time import Timing
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import use_mesh
from models.decoding.generate import NEW_TOKENS, SUFFIX, DecodeInputs, generate_together
from models.precision import is_rounded
from trainer.decoding.decoder import trace_cache
from trainer.memory import shard_bytes
from trainer.planning import counts
from trainer.run import Run
from trainer.traces import DecodeShape, trace_generate

T = TypeVar("T")
trace_together = jax.jit(generate_together, static_argnums=(0, 1, 2))


class Phases(NamedTuple, Generic[T]):
    """Holds a value for each phase: before the first token, for each token, and for a suffix."""

    prefill: T
    """For sources and prompts."""
    token: T
    suffix: T | None = None
    """For the suffix after all samples, if one ranks them."""


DecodeWork = Phases[WorkCounts]
DecodeTimings = Phases[Timing]
DecodeCounts = counts.Counts[DecodeWork]


@dataclasses.dataclass(frozen=True)
class TracedDecode(counts.TracedFunction):
    """Holds the decoding of one batch, traced, with its arguments."""

    shape: DecodeShape
    params: Any
    inputs: DecodeInputs
    """Sources and requests."""
    cache: Any
    jaxpr: Jaxpr
    """The trace of one loop for the entire mesh, even if each device runs a separate loop.

    Computations that no token needs, such as a prompt's logits, are removed."""

    @property
    def loop(self) -> Any:
        """Returns the loop over new tokens."""
        loops = (eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "while")
        return next(eqn for eqn in loops if NEW_TOKENS in str(eqn.source_info.name_stack))

    @functools.cached_property
    def peak_bytes(self) -> int:
        return peak_bytes(self.jaxpr, self.sizes)

    @property
    def array_bytes(self) -> dict[str, int]:
        """Returns the bytes of the arguments and of the cache on one device, without padding."""
        trees = {"parameters": self.params, "inputs": self.inputs, "cache": self.cache}
        return {name: shard_bytes(tree) for name, tree in trees.items()}

    @functools.cached_property
    def work(self) -> DecodeWork:
        """Counts the work in the trace."""
        loop, sizes = self.loop.params, self.sizes
        jaxprs = (self.jaxpr, loop["cond_jaxpr"].jaxpr, loop["body_jaxpr"].jaxpr)
        whole, condition, body = (cost_of(jaxpr, sizes, merges=self.merges) for jaxpr in jaxprs)
        weight_bytes = sum(local_bytes(variable.aval, sizes) for variable in self.jaxpr.invars)
        inputs, constants = jaxprs[2].invars, loop["body_nconsts"]
        loop_bytes = sum(bytes_read(jaxprs[2], x, sizes) for x in inputs[:constants])
        loop_bytes += sum(local_bytes(x.aval, sizes) for x in inputs[constants:])
        token = WorkCounts(
            flops=condition.flops + body.flops,
            collectives=condition.collectives + body.collectives,
            read_bytes=loop_bytes,
        )
        both = whole._replace(ops=(), read_bytes=weight_bytes)
        suffix = None
        if self.shape.suffix_tokens:  # reads weights and cache once
            scopes = [str(eqn.source_info.name_stack).split("/") for eqn in self.jaxpr.eqns]
            of_suffix = zip(self.jaxpr.eqns, scopes, strict=True)
            eqns = [eqn for eqn, scope in of_suffix if SUFFIX in scope]
            cost = cost_of(self.jaxpr.replace(eqns=eqns), sizes, merges=self.merges)
            suffix = cost._replace(ops=(), read_bytes=loop_bytes)
        return work_of_parts(both, token, suffix)

    def output_flops(self, work: DecodeWork) -> int:
        suffix_flops = 0 if work.suffix is None else work.suffix.flops
        return work.prefill.flops + self.shape.new_tokens * work.token.flops + suffix_flops


def work_of_parts(whole: WorkCounts, token: WorkCounts, suffix: WorkCounts | None) -> DecodeWork:
    """Splits the work of a program that counts a single iteration of its loop."""
    prefill = whole.without(token)
    return DecodeWork(prefill if suffix is None else prefill.without(suffix), token, suffix)


def trace_decode(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, shape: DecodeShape
) -> TracedDecode:
    """Traces the decoding that `decode` runs; allocates nothing."""
    trace, arguments = trace_generate(run, layout, mesh, shape)
    with use_mesh(mesh):
        cache = trace_cache.eval_shape(*arguments)
        jaxpr = trace_together.trace(*arguments).jaxpr.jaxpr
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    *_, params, inputs = arguments
    return TracedDecode(run, layout, mesh, trace, shape, params, inputs, cache, needed)


def estimate_decode(step: TracedDecode) -> DecodeCounts:
    """Counts decoding from its trace alone."""
    sizes = step.array_bytes
    causes = {**sizes, counts.TEMPORARIES: max(0, step.peak_bytes - sizes["cache"])}
    return DecodeCounts(step.work, counts.MemoryUse(causes, sum(causes.values())))


def compile_decode(step: TracedDecode) -> DecodeCounts:
    """Compiles decoding for its mesh, whose devices may be absent, and counts its cost."""
    compilation, sizes = counts.compile_for(step.traced, step.mesh), step.array_bytes
    if compilation.needed_bytes is not None:
        argument_bytes = sizes["parameters"] + sizes["inputs"]
        work, estimate = estimate_decode(step)
        return DecodeCounts(work, compilation.memory_of_failed(estimate, argument_bytes))
    memory = compilation.executable.memory_analysis()
    cache = min(sizes["cache"], memory.temp_size_in_bytes)
    by_cause = {
        "parameters": memory.argument_size_in_bytes - sizes["inputs"],
        "inputs": sizes["inputs"],
        "cache": cache,
        counts.TEMPORARIES: memory.temp_size_in_bytes - cache + memory.output_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    assert compilation.text is not None
    text = CompiledText.read(compilation.text, NEW_TOKENS)
    token = counts.count_compiled(step, text.iteration, step.work.token.read_bytes)
    both, suffix = counts.count_compiled(step, text, step.work.prefill.read_bytes), None
    if step.work.suffix is not None:
        of_suffix = dataclasses.replace(text, scope=SUFFIX)
        suffix = counts.count_compiled(step, of_suffix, step.work.suffix.read_bytes)
    return DecodeCounts(work_of_parts(both, token, suffix), compilation.memory(by_cause))


@dataclasses.dataclass(frozen=True)
class DecodePlan(counts.ProgramPlan):
    """Holds the cost of decoding under a layout, as far as it is known."""

    step: TracedDecode
    work: DecodeWork
    timings: DecodeTimings | None

    @property
    def parameters(self) -> int:
        weights = jax.tree.leaves(self.step.params, is_leaf=is_rounded)
        return sum(math.prod(weight.shape) for weight in weights)

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of one copy of the weights."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.step.params))

    @property
    def cache_bytes(self) -> int:
        """Returns the bytes of the cache on all devices."""
        return self.devices * self.step.array_bytes["cache"]

    @functools.cached_property
    def model_flops(self) -> int:
        """Counts the FLOPs that the model needs for all outputs, without computing anything twice.

        Traces on one device: on several, exchanged experts would give the trace per-device shapes.
        """
        run = dataclasses.replace(self.step.run, model=self.step.run.model.active)
        layout = Layout(mesh="one:1", rules="")
        mesh = counts.slice_mesh({"one": 1}, self.topology)
        step = trace_decode(run, layout, mesh, self.step.shape)
        return step.output_flops(step.work)

    @property
    def executed_flops(self) -> int:
        """Counts the executed FLOPs, including those that several devices compute redundantly."""
        return self.devices * self.step.output_flops(self.work)

    @property
    def traced_flops(self) -> int:
        """Counts the executed FLOPs of the trace."""
        return self.devices * self.step.output_flops(self.step.work)

    @property
    def output_s(self) -> float | None:
        """Predicts the seconds from the prompts to the ranked texts, if no text ends sooner."""
        if self.timings is None:
            return None
        prefill, token, suffix = self.timings
        suffix_s = 0.0 if suffix is None else suffix.step_s
        return prefill.step_s + self.step.shape.new_tokens * token.step_s + suffix_s

    @property
    def tokens_per_s(self) -> float | None:
        """Predicts the new tokens per second, with one text per row."""
        if self.output_s is None:
            return None
        return self.step.shape.rows * self.step.shape.new_tokens / self.output_s

    @property
    def unexpected_collectives(self) -> tuple[str, ...]:
        """Returns the traffic of a token that differs from what the layout implies."""
        expected = self.step.work.token.collectives
        return tuple(unexpected_traffic(self.work.token.collectives, expected, self.mesh))


def plan_decode(step: TracedDecode, topology: Topology | None, counted: DecodeCounts) -> DecodePlan:
    """Makes a plan, with predicted times if it is for a slice."""
    device_coords, timings = step.device_coords(topology), None
    if topology is not None and device_coords is not None:
        time_of = functools.partial(counts.time_on_slice, topology, device_coords, step.sizes)
        timings = DecodeTimings(*map(time_of, filter(None, counted.work)))
    work, memory = counted
    return DecodePlan(step.sizes, topology, device_coords, memory, step, work, timings)


def count_compiled_decode(
    run: Run, layout: Layout, sizes: dict[str, int], topology: Topology, shape: DecodeShape
) -> DecodeCounts:
    """Counts decoding as compiled for a slice, which may be absent.  Call it in a child process."""
    mesh = topology_mesh(topology.name, sizes, layout.order)
    return compile_decode(trace_decode(run, layout, mesh, shape))
