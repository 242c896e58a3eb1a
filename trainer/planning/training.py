"""Plans a training run from its real step: traced, or compiled for absent devices."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from layouts.absent_devices import topology_mesh
from layouts.cost.calibration import HostRates, estimate_host_timing
from layouts.cost.collectives import unexpected_traffic
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import WorkCounts, cost_of
from layouts.cost.peak_memory import peak_bytes
from layouts.cost.step_time import Timing, coordinates, traffic_seconds
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.lint.recorder import Weight
from layouts.mesh import make_mesh, use_mesh
from layouts.shards import mesh_axes
from models.layers.pipeline import Schedule
from trainer import checks
from trainer.memory import shard_bytes
from trainer.planning import counts
from trainer.run import Run
from trainer.step import State, train_step_spec, with_deferred_sums
from trainer.traces import trace_train_step


@dataclasses.dataclass(frozen=True)
class TracedStep(counts.TracedFunction):
    """Holds a run's training step, traced, with its arguments."""

    state: State
    batch: dict[str, jax.ShapeDtypeStruct]

    @functools.cached_property
    def cost(self) -> WorkCounts:
        """Counts the work in the trace."""
        return cost_of(self.traced.jaxpr.jaxpr, self.sizes, merges=self.merges)

    @property
    def argument_bytes(self) -> dict[str, int]:
        """Sums the bytes of the arguments on one device, without padding."""
        return {
            "parameters": shard_bytes(self.state["params"]),
            "optimizer state": shard_bytes(self.state["opt_state"]),
            "inputs": shard_bytes(self.batch) + shard_bytes(self.state["step"]),
        }

    @property
    def replay_bytes(self) -> dict[str, int]:
        """Returns the bytes of the copy of the state from which steps are replayed."""
        if self.run.replay_every is None:
            return {}
        causes = self.argument_bytes
        return {"state of replays": causes["parameters"] + causes["optimizer state"]}

    @property
    def trained(self) -> Any:
        """Returns the parameters that have a gradient."""
        return train_step_spec(self.run, self.layout).trained(self.state["params"])

    @property
    def checkpoint_bytes(self) -> int:
        """Returns the bytes of a checkpoint."""
        saved = train_step_spec(self.run, self.layout).saved(self.state)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved))

    @property
    def adds_microbatches(self) -> bool:
        """Returns whether gradients of microbatches are summed; stages have a single gradient."""
        with use_mesh(self.mesh):
            return self.run.microbatches > 1 and not self.run.model.model(self.layout).runs_stages

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of the gradients on one device; they are sharded like the weights.

        Gradients that are summed over microbatches have JAX's default float type.
        """
        params = self.trained
        if self.adds_microbatches:
            params = jax.tree.map(lambda x: x.update(dtype=jnp.result_type(float)), params)
        return shard_bytes(params)

    @property
    def gradient_sums(self) -> dict[str, int] | None:
        """Counts parameters whose gradients are reduced once per step, and once per microbatch.

        None with one microbatch, with pipeline stages, or if one device has all tokens.
        """
        model = self.run.model.model(self.layout)
        tokens = itertools.chain(*map(mesh_axes, self.layout.place("BL")))
        shards = math.prod(self.sizes[name] for name in tokens)
        if not self.adds_microbatches or shards == 1:
            return None
        with use_mesh(self.mesh):
            deferred = jax.eval_shape(functools.partial(with_deferred_sums, model), self.trained)
        weights = jax.tree.leaves(deferred)
        once = sum(weight.size for weight in weights if weight.sharding.spec.reduced)
        return {"step": once, "microbatch": sum(weight.size for weight in weights) - once}


StepCounts = counts.Counts[WorkCounts]


@dataclasses.dataclass(frozen=True)
class StepPlan(counts.ProgramPlan):
    """Holds the cost of a run under a layout, as far as it is known."""

    run: Run
    layout: Layout
    weights: tuple[Weight, ...]
    schedule: Schedule
    """How microbatches go through stages of layers; with one stage, each device has all layers."""
    attention: Mapping[str, str]
    """The attention implementation of each part of the model and, if it is plain, the reason."""
    gradient_sums: Mapping[str, int] | None
    """Parameters whose gradients are reduced once per step, and once per microbatch."""
    checkpoint_bytes: int
    model_flops: float
    """FLOPs that the model needs in a step on all devices, without computing anything twice.
    Counts only the experts that tokens choose, and half of causal attention."""
    masked_flops: float
    """FLOPs of the other half, which older publications also count."""
    executed_flops: float
    """FLOPs including recomputation, and redundant computation on several devices."""
    traced_flops: float
    """The executed FLOPs of the trace."""
    work: WorkCounts
    unexpected_collectives: tuple[str, ...]
    """Traffic of the executable that differs from what the layout implies."""
    timing: Timing | None

    @property
    def step_s(self) -> float | None:
        return None if self.timing is None else self.timing.step_s

    @property
    def idle_s(self) -> float | None:
        """Returns the longest time that stages can idle in a step, if all compute is in stages."""
        if self.timing is None:
            return None
        return self.schedule.bubble * (self.timing.products_s + self.timing.other_s)

    @property
    def parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def tokens_per_step(self) -> int:
        return self.run.batch_sequences * self.run.task.length

    @property
    def utilisation(self) -> float | None:
        """Returns the model FLOPs as a share of the matrix units' peak."""
        return self._share_of_peak(self.model_flops)

    @property
    def utilisation_full_attention(self) -> float | None:
        """Returns the same with full causal attention, as publications counted until 2025."""
        return self._share_of_peak(self.model_flops + self.masked_flops)

    def _share_of_peak(self, flops: float) -> float | None:
        if self.step_s is None or self.topology is None:
            return None
        return flops / (self.step_s * self.topology.devices * self.topology.chip.peak_flops)


def trace_step(run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> TracedStep:
    """Traces the step that `train` runs, allocating nothing."""
    return TracedStep(run, layout, mesh, *trace_train_step(run, layout, mesh))


def estimate_step(step: TracedStep) -> StepCounts:
    """Counts a step from its trace alone."""
    gradients = step.gradient_bytes
    temporaries = max(0, peak_bytes(step.traced.jaxpr.jaxpr, step.sizes) - gradients)
    causes = {**step.argument_bytes, "gradients": gradients, counts.TEMPORARIES: temporaries}
    causes |= step.replay_bytes
    *ops, arguments = step.cost.ops  # weights and moments, which the optimizer reads and writes
    arguments = arguments._replace(source="weights and optimizer state", scopes="optimizer")
    work = step.cost._replace(ops=(*ops, arguments))
    return StepCounts(work, counts.MemoryUse(causes, sum(causes.values())))


def compile_step(step: TracedStep) -> StepCounts:
    """Compiles a step for its mesh, whose devices may be absent, and counts its cost."""
    compilation = counts.compile_for(step.traced, step.mesh, step.run.compiler_options)
    if compilation.needed_bytes is None:
        return count_step(step, compilation)
    work, memory = estimate_step(step)
    argument_bytes = sum(step.argument_bytes.values())
    return StepCounts(work, compilation.memory_of_failed(memory, argument_bytes))


def count_step(step: TracedStep, compilation: counts.Compilation) -> StepCounts:
    """Counts the cost of a compiled step."""
    memory, causes = compilation.executable.memory_analysis(), step.argument_bytes
    # Arguments are padded on the device; most of the padding belongs to the parameters.
    causes["parameters"] += max(0, memory.argument_size_in_bytes - sum(causes.values()))
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    gradients = min(step.gradient_bytes, memory.temp_size_in_bytes)
    causes |= {
        "gradients": gradients,
        counts.TEMPORARIES: memory.temp_size_in_bytes - gradients + unaliased,
        "program": memory.generated_code_size_in_bytes,
        **step.replay_bytes,
    }
    assert compilation.text is not None
    work = counts.count_compiled(step, CompiledText.read(compilation.text))
    work = work._replace(host_bytes=memory.host_temp_size_in_bytes)
    return StepCounts(work, compilation.memory(causes))


def plan_step(
    step: TracedStep, topology: Topology | None, counted: StepCounts, timing: Timing | None = None
) -> StepPlan:
    """Makes a plan; predicts the time on a slice, else uses the given one."""
    device_coords = step.device_coords(topology)
    if topology is not None and device_coords is not None:
        timing = counts.time_on_slice(topology, device_coords, step.sizes, counted.work)
    devices = math.prod(step.sizes.values())
    expected = step.cost.collectives if devices > 1 else ()
    unexpected = unexpected_traffic(counted.work.collectives, expected, step.sizes)
    return StepPlan(
        mesh=step.sizes,
        topology=topology,
        device_coords=device_coords,
        memory=counted.memory,
        run=step.run,
        layout=step.layout,
        weights=checks.record_loss(step.run).weights,
        schedule=checks.pipeline_schedule(step.run, step.layout, step.sizes),
        attention=checks.attention_choices(step.run, step.layout, step.mesh),
        gradient_sums=step.gradient_sums,
        checkpoint_bytes=step.checkpoint_bytes,
        model_flops=checks.step_flops(step.run),
        masked_flops=checks.masked_step_flops(step.run),
        executed_flops=float(counted.work.flops * devices),
        traced_flops=float(step.cost.flops * devices),
        work=counted.work,
        unexpected_collectives=tuple(unexpected),
        timing=timing,
    )


def with_device_order(plan: StepPlan, order: str | None) -> StepPlan:
    """Returns the same plan with the devices in another order."""
    assert plan.topology is not None and plan.timing is not None
    coords = coordinates(plan.topology, plan.mesh, order, plan.layout.slices)
    waits, overlapped = traffic_seconds(plan.topology, coords, plan.mesh, plan.work.collectives)
    timing = dataclasses.replace(plan.timing, traffic_s=waits, overlapped_s=overlapped)
    layout = dataclasses.replace(plan.layout, order=order)
    return dataclasses.replace(plan, layout=layout, device_coords=coords, timing=timing)


def plan_compiled(run: Run, layout: Layout, sizes: dict[str, int], topology: Topology) -> StepPlan:
    """Plans a step as compiled for a slice, which may be absent.  Call it in a child process."""
    step = trace_step(run, layout, topology_mesh(topology.name, sizes, layout.order))
    return plan_step(step, topology, compile_step(step))


def plan_from_trace(
    run: Run, layout: Layout, sizes: dict[str, int], hardware: Topology | HostRates | None
) -> StepPlan:
    """Plans from a trace alone, which takes seconds and needs no compiler.

    The memory of devices that share this machine is unknown.
    """
    if not isinstance(hardware, HostRates):
        step = trace_step(run, layout, counts.slice_mesh(sizes, hardware))
        return plan_step(step, hardware, estimate_step(step))
    step = trace_step(run, layout, make_mesh(layout))
    counted = estimate_step(step)
    return plan_step(step, None, counted, estimate_host_timing(hardware, sizes, counted.work))
