"""What a run will cost, from its real training step: traced, or compiled for absent devices."""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from configs.errors import RunError
from layouts.cost.calibration import HostRates, estimate_host_timing
from layouts.cost.collectives import Collective, UnexpectedTraffic, unexpected_traffic
from layouts.cost.interconnect import Slice
from layouts.cost.jaxpr_cost import CPU, TPU, CompilerTraits, Cost, OpCost, cost_of
from layouts.cost.step_time import Timing, add_up, compute_s, coordinates, cycles_s
from layouts.hlo.program import CompiledProgram
from layouts.layout import Layout
from layouts.lint.recorder import Weight
from layouts.mesh import abstract_mesh, uncached, use_mesh
from trainer.checks import record_loss, step_flops
from trainer.feed import placement
from trainer.run import Run, program_of
from trainer.step import State, abstract_state, train_step

GIB = 2**30
TEMPORARIES = "activations and temporaries"


@dataclasses.dataclass(frozen=True)
class Traced:
    """A run's training step on a mesh, with its arguments, before it is compiled."""

    run: Run
    layout: Layout
    mesh: Mesh | AbstractMesh
    state: State
    batch: dict[str, jax.ShapeDtypeStruct]
    program: Any  # of jax: what `trace` returns

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @functools.cached_property
    def cost(self) -> Cost:
        """What the trace says of it."""
        return cost_of(self.program.jaxpr.jaxpr, self.sizes, traits(self.mesh))


class Counted(NamedTuple):
    """What a step does on one device, by its trace or as a compiler made it."""

    flops: int
    collectives: tuple[Collective, ...]
    bytes_by_cause: Mapping[str, int]
    needed_bytes: int
    ops: tuple[OpCost, ...] = ()
    """By the trace, where that is all that is known."""
    cycles: Mapping[str, int] | None = None
    """Of products and of other work, as a compiler for TPUs estimates them."""
    compiled_for: str | None = None
    compile_s: float | None = None
    refused: bool = False
    """Whether the compiler found no room for it; all but what is needed is then by the trace."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a run under a layout, as far as it is known.  Bytes and FLOPs are a device's."""

    mesh: Mapping[str, int]
    slice: Slice | None
    run: Run
    weights: tuple[Weight, ...]
    model_flops: float
    """Of a step on all devices: what the model asks for, nothing computed twice."""
    executed_flops: float
    """Of a step on all devices, with what is computed again and on several devices alike."""
    counted: Counted
    unexpected_collectives: tuple[UnexpectedTraffic, ...]
    places: np.ndarray | None
    """Where each device of the mesh stands on the torus."""
    timing: Timing | None

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool | None:
        """Whether a device's memory holds it; unknown where the device is."""
        if self.slice is None:
            return None
        needed_bytes, own = self.counted.needed_bytes, self.slice.chip.memory_bytes
        return not self.counted.refused and needed_bytes <= own

    @property
    def step_s(self) -> float | None:
        return None if self.timing is None else self.timing.step_s

    @property
    def parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def tokens_per_step(self) -> int:
        return self.run.batch_sequences * self.run.task.length

    @property
    def utilisation(self) -> float | None:
        """The share of the matrix units' peak that the model's own FLOPs take."""
        if self.step_s is None or self.slice is None:
            return None
        return self.model_flops / (self.step_s * self.slice.peak_flops)


def traced(
    run: Run, layout: Layout, mesh: Mesh | AbstractMesh, state: State | None = None
) -> Traced:
    """Traces the step that `train` runs, for its state where that is there; allocates nothing."""
    program = program_of(run, layout)
    state = abstract_state(program, mesh) if state is None else jax.tree.map(shape_of, state)
    where = placement(layout, mesh, run.microbatches)
    batch = {}
    for name, length in run.task.array_lengths.items():
        shape: tuple[int, ...] = (run.batch_sequences, length)
        if run.microbatches > 1:
            shape = (run.microbatches, run.batch_sequences // run.microbatches, length)
        batch[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=where.of(name, shape[-2]))
    with use_mesh(mesh):
        found = train_step.trace(program, state, batch)
    return Traced(run, layout, mesh, state, batch, found)


def shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def traits(mesh: Mesh | AbstractMesh) -> CompilerTraits:
    return CPU if target(mesh) == "CPU" else TPU


def estimated(step: Traced) -> Counted:
    """What the trace alone says."""
    gradients = gradient_bytes(step)
    temporaries = max(0, step.cost.peak_bytes - gradients)
    causes = {**held_bytes(step), "gradients": gradients, TEMPORARIES: temporaries}
    needed_bytes, ops = sum(causes.values()), step.cost.ops
    return Counted(step.cost.flops, step.cost.collectives, causes, needed_bytes, ops)


def compiled(step: Traced) -> Counted:
    """Compiles a step for its mesh, of absent TPUs or of devices, and counts what is in it."""
    found = compile_for(step.program, step.mesh)
    if found.refused_bytes is None:
        return read(step, found.program, found.compile_s)
    return estimated(step)._replace(
        needed_bytes=found.refused_bytes + sum(held_bytes(step).values()),
        compiled_for=target(step.mesh),
        compile_s=found.compile_s,
        refused=True,
    )


class Compilation(NamedTuple):
    """What came of a compilation: a program, or how much memory one would need."""

    program: Any
    compile_s: float
    refused_bytes: int | None = None
    """Beside the arguments, where a device has no room for them."""


def compile_for(program: Any, mesh: Mesh | AbstractMesh) -> Compilation:
    """Compiles what was traced, for absent TPUs or for devices."""
    start = time.perf_counter()
    try:
        cache = uncached() if target(mesh) == "TPU" else contextlib.nullcontext()
        with use_mesh(mesh), cache:
            done = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"total memory required .*?\(([\d.]+)G\)", str(error))
        if needed is None:
            raise RunError(f"the compiler fails on this program: {error}") from error
        return Compilation(None, time.perf_counter() - start, round(float(needed[1]) * GIB))
    return Compilation(done, time.perf_counter() - start)


def read(step: Traced, program: Any, compile_s: float) -> Counted:
    """Counts what is in a compiled step; of other texts than a CPU's or TPU's, the memory alone."""
    causes = causes_of(step, program.memory_analysis())
    known: dict[str, Any] = {
        "bytes_by_cause": causes,
        "needed_bytes": sum(causes.values()),
        "compiled_for": target(step.mesh),
        "compile_s": compile_s,
    }
    if known["compiled_for"] not in ("CPU", "TPU"):
        return estimated(step)._replace(**known)
    text = CompiledProgram.read(program.as_text())
    return Counted(
        flops=text.flops,
        collectives=tuple(text.collectives(step.sizes)),
        cycles=text.cycles if known["compiled_for"] == "TPU" else None,
        **known,
    )


def target(mesh: Mesh | AbstractMesh) -> str | None:
    """What a program for a mesh is compiled for: CPU, TPU or GPU; nothing where no devices are."""
    return mesh.devices.flat[0].platform.upper() if isinstance(mesh, Mesh) else None


def causes_of(step: Traced, memory: Any) -> dict[str, int]:
    """A compiled program's memory on one device by cause."""
    causes = held_bytes(step)
    # Arguments are padded on the device; most of what that adds belongs to the parameters.
    causes["parameters"] += max(0, memory.argument_size_in_bytes - sum(causes.values()))
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    gradients = min(gradient_bytes(step), memory.temp_size_in_bytes)
    return causes | {
        "gradients": gradients,
        TEMPORARIES: memory.temp_size_in_bytes - gradients + unaliased,
        "program": memory.generated_code_size_in_bytes,
    }


def plan(step: Traced, slice: Slice | None, counted: Counted, timing: Timing | None = None) -> Plan:
    """Puts together what is known of a step; without a slice its time, where that is known."""
    places, devices = None, math.prod(step.sizes.values())
    if slice is not None:
        places = coordinates(slice, step.sizes, step.layout.order)
        timing = timed(slice, places, step.sizes, counted)
    expected = step.cost.collectives if devices > 1 else ()
    return Plan(
        mesh=step.sizes,
        slice=slice,
        run=step.run,
        weights=record_loss(step.run).weights,
        model_flops=step_flops(step.run),
        executed_flops=float(counted.flops * devices),
        counted=counted,
        unexpected_collectives=tuple(unexpected_traffic(counted.collectives, expected, step.sizes)),
        places=places,
        timing=timing,
    )


def timed(slice: Slice, places: np.ndarray, sizes: Mapping[str, int], counted: Counted) -> Timing:
    """How long a step takes: by the compiler's cycles, or by what its work usually takes."""
    if counted.cycles is None:
        products_s, other_s = compute_s(slice.chip, counted.ops)
    else:
        products_s, other_s = cycles_s(slice.chip, counted.cycles)
    return add_up(slice, places, sizes, counted.collectives, products_s, other_s)


def reordered(found: Plan, order: str | None) -> Plan:
    """The same plan with the devices in another order."""
    assert found.slice is not None and found.timing is not None
    places = coordinates(found.slice, found.mesh, order)
    own = add_up(
        found.slice,
        places,
        found.mesh,
        found.counted.collectives,
        found.timing.products_s,
        found.timing.other_s,
    )
    return dataclasses.replace(found, places=places, timing=own)


def held_bytes(step: Traced) -> dict[str, int]:
    """Bytes of a step's arguments on one device, without padding."""
    return {
        "parameters": shard_bytes(step.state["params"]),
        "optimizer slots": shard_bytes(step.state["slots"]),
        "inputs": shard_bytes(step.batch) + shard_bytes(step.state["step"]),
    }


def gradient_bytes(step: Traced) -> int:
    """Gradients are placed like the weights."""
    return shard_bytes(step.state["params"])


def shard_bytes(tree: Any) -> int:
    """Bytes of arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def planned_here(run: Run, layout: Layout, mesh: Mesh, host: HostRates) -> Plan:
    """The plan from a trace for devices that share this machine; what fits is not known."""
    step = traced(run, layout, mesh)
    counted = estimated(step)
    own = estimate_host_timing(host, step.sizes, counted.ops, counted.collectives)
    return dataclasses.replace(plan(step, None, counted), timing=own)


def planned(run: Run, layout: Layout, sizes: dict[str, int], slice: Slice | None) -> Plan:
    """The plan from a trace alone: seconds, and no compiler."""
    step = traced(run, layout, abstract_mesh(sizes))
    return plan(step, slice, estimated(step))
