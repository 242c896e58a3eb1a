"""What a run will cost, from its real training step: traced, or compiled for absent devices."""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from configs.errors import RunError
from layouts.compiled import Compiled
from layouts.cost import CPU, TPU, Cost, Work, cost_of
from layouts.host import Host, host_timing
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, entered, uncached
from layouts.record import Weight
from layouts.timing import Timing, compute_s, coordinates, timing
from layouts.torus import Slice
from layouts.traffic import Collective, Surprise, surprises
from trainer.checks import record_loss, step_flops
from trainer.feed import placement
from trainer.loop import program_of
from trainer.run import Run
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
    cost: Cost

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)


class Counted(NamedTuple):
    """What a step does on one device, by its trace or as a compiler made it."""

    flops: int
    collectives: tuple[Collective, ...]
    bytes_by_cause: Mapping[str, int]
    needed_bytes: int
    cycles: Mapping[str, int] | None = None
    """Of products and of other work, as a compiler for TPUs estimates them."""
    compiled_for: str | None = None
    compile_s: float | None = None
    refused: bool = False
    """Whether the compiler found no room for it; all but what is needed is then by the trace."""
    work: tuple[Work, ...] = ()
    """By the trace, where that is all that is known."""


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
    surprises: tuple[Surprise, ...]
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


def traced(run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> Traced:
    """Traces the step that `train` would run; allocates nothing."""
    program = program_of(run, layout)
    state = abstract_state(program, mesh)
    where = placement(layout, mesh, run.microbatches)
    batch = {}
    for name, length in run.task.array_lengths.items():
        shape: tuple[int, ...] = (run.batch_sequences, length)
        if run.microbatches > 1:
            shape = (run.microbatches, run.batch_sequences // run.microbatches, length)
        batch[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=where.of(name))
    with entered(mesh):
        found = train_step.trace(program, state, batch)
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    cost = cost_of(found.jaxpr, dict(mesh.shape), CPU if on_cpu else TPU)
    return Traced(run, layout, mesh, state, batch, found, cost)


def estimated(step: Traced) -> Counted:
    """What the trace alone says."""
    gradients = gradient_bytes(step)
    temporaries = max(0, step.cost.peak_bytes - gradients)
    causes = {**held_bytes(step), "gradients": gradients, TEMPORARIES: temporaries}
    own = step.cost
    return Counted(own.flops, own.collectives, causes, sum(causes.values()), work=own.work)


def compiled(step: Traced) -> Counted:
    """Compiles a step for its mesh and counts what is in the program."""
    target = "CPU" if tpus(step) is None else "TPU"
    start = time.perf_counter()
    try:
        cache = uncached() if target == "TPU" else contextlib.nullcontext()
        with entered(step.mesh), cache:
            program = step.program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"total memory required .*?\(([\d.]+)G\)", str(error))
        if needed is None:
            raise RunError(f"the compiler fails on this step: {error}") from error
        return estimated(step)._replace(
            needed_bytes=round(float(needed[1]) * GIB) + sum(held_bytes(step).values()),
            compiled_for=target,
            compile_s=time.perf_counter() - start,
            refused=True,
        )
    compile_s = time.perf_counter() - start
    text, causes = Compiled.read(program.as_text()), causes_of(step, program.memory_analysis())
    found = tuple(text.collectives(step.sizes))
    cycles = text.cycles if target == "TPU" else None
    needed_bytes = sum(causes.values())
    return Counted(text.flops, found, causes, needed_bytes, cycles, target, compile_s)


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


def plan(step: Traced, slice: Slice | None, counted: Counted) -> Plan:
    """Puts together what is known of a step."""
    asked, expected = record_loss(step.run), step.cost.collectives
    places = None
    if slice is not None:
        places = coordinates(slice, step.sizes, step.layout.order)
    return Plan(
        mesh=step.sizes,
        slice=slice,
        run=step.run,
        weights=asked.weights,
        model_flops=step_flops(step.run),
        executed_flops=float(counted.flops * math.prod(step.sizes.values())),
        counted=counted,
        surprises=tuple(surprises(counted.collectives, expected, step.sizes)),
        places=places,
        timing=None if slice is None or places is None else timed(step, slice, places, counted),
    )


def timed(step: Traced, slice: Slice, places: np.ndarray, counted: Counted) -> Timing:
    """How long a step takes: by the compiler's cycles, or by what its work usually takes."""
    if counted.cycles is None:
        products_s, other_s = compute_s(slice.chip, counted.work)
    else:
        clock_hz = slice.chip.clock_hz
        products_s, other_s = (counted.cycles[kind] / clock_hz for kind in ("products", "other"))
    return timing(slice, places, step.sizes, counted.collectives, products_s, other_s)


def reordered(found: Plan, order: str | None) -> Plan:
    """The same plan with the devices in another order."""
    assert found.slice is not None and found.timing is not None
    places = coordinates(found.slice, found.mesh, order)
    own = timing(
        found.slice,
        places,
        found.mesh,
        found.counted.collectives,
        found.timing.products_s,
        found.timing.other_s,
    )
    return dataclasses.replace(found, places=places, timing=own)


def tpus(step: Traced) -> Mesh | None:
    """The step's mesh, if it is one of TPUs, present or absent."""
    if not isinstance(step.mesh, Mesh) or step.mesh.devices.flat[0].platform != "tpu":
        return None
    return step.mesh


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


def planned_here(run: Run, layout: Layout, mesh: Mesh, host: Host) -> Plan:
    """The plan from a trace for devices that share this machine; what fits is not known."""
    step = traced(run, layout, mesh)
    counted = estimated(step)
    own = host_timing(host, step.sizes, counted.work, counted.collectives)
    return dataclasses.replace(plan(step, None, counted), timing=own)


def planned(run: Run, layout: Layout, sizes: dict[str, int], slice: Slice | None) -> Plan:
    """The plan from a trace alone: seconds, and no compiler."""
    step = traced(run, layout, abstract_mesh(sizes))
    return plan(step, slice, estimated(step))
