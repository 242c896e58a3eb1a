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

from layouts.compiled import Compiled
from layouts.cost import CPU, TPU, Cost, cost_of
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, entered, uncached
from layouts.record import Weight
from layouts.timing import PRODUCT_UTILISATION, Timing, coordinates, timing
from layouts.torus import Slice
from layouts.traffic import Collective, Surprise, surprises
from trainer.checks import record_loss
from trainer.feed import placement
from trainer.loop import program_of
from trainer.run import Run
from trainer.step import State, abstract_state, train_step

GIB = 2**30
HOUR_S = 3600


@dataclasses.dataclass(frozen=True)
class Traced:
    """A run's training step on a mesh, with its arguments, before it is compiled."""

    run: Run
    mesh: Mesh | AbstractMesh
    state: State
    batch: dict[str, jax.ShapeDtypeStruct]
    program: Any  # of jax: what `trace` returns
    cost: Cost

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)


class Counted(NamedTuple):
    """What a compiler made of a step, on one device."""

    flops: int
    cycles: Mapping[str, int]
    """Of matrix products and of all else, by the compiler's estimate; of a CPU there is none."""
    collectives: tuple[Collective, ...]
    bytes_by_cause: Mapping[str, int]
    compile_s: float


class OutOfMemory(NamedTuple):
    """A compiler that found no room, and what it says would be needed."""

    needed_bytes: int
    compile_s: float


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
    bytes_by_cause: Mapping[str, int]
    needed_bytes: int
    refused: bool
    """Whether a compiler found no room for it."""
    compiled_for: str | None
    collectives: tuple[Collective, ...]
    surprises: tuple[Surprise, ...]
    places: np.ndarray | None
    """Where each device of the mesh stands on the torus."""
    timing: Timing | None
    compile_s: float | None

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool | None:
        """Whether a device's memory holds it; unknown where the device is."""
        if self.slice is None:
            return None
        return not self.refused and self.needed_bytes <= self.slice.chip.memory_bytes

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
    return Traced(run, mesh, state, batch, found, cost)


def compiled(step: Traced) -> Counted | OutOfMemory:
    """Compiles a step for its mesh and counts what is in the program."""
    assert isinstance(step.mesh, Mesh), "there must be devices, present or absent, to compile for"
    start = time.perf_counter()
    try:
        cache = uncached() if compiles_for_tpu(step) else contextlib.nullcontext()
        with entered(step.mesh), cache:
            program = step.program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"total memory required .*?\(([\d.]+)G\)", str(error))
        if needed is None:
            raise
        held = sum(held_bytes(step).values())
        return OutOfMemory(int(float(needed[1]) * GIB) + held, time.perf_counter() - start)
    compile_s = time.perf_counter() - start
    memory = program.memory_analysis()
    text = Compiled.read(program.as_text())
    causes = held_bytes(step)
    # Arguments are padded on the device; what is over belongs to the parameters in the main.
    causes["parameters"] += max(0, memory.argument_size_in_bytes - sum(causes.values()))
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    gradients = min(gradient_bytes(step), memory.temp_size_in_bytes)
    causes |= {
        "gradients": gradients,
        "activations and temporaries": memory.temp_size_in_bytes - gradients + unaliased,
        "program": memory.generated_code_size_in_bytes,
    }
    found = tuple(text.collectives(step.sizes))
    return Counted(text.flops, text.cycles, found, causes, compile_s)


def plan(step: Traced, slice: Slice | None, counted: Counted | OutOfMemory | None = None) -> Plan:
    """Puts together what is known of a step; what was not compiled is as the trace says."""
    asked, devices = record_loss(step.run), math.prod(step.sizes.values())
    causes = {
        **held_bytes(step),
        "gradients": gradient_bytes(step),
        "activations and temporaries": max(0, step.cost.peak_bytes - gradient_bytes(step)),
    }
    flops, collectives, unexpected = step.cost.flops, step.cost.collectives, tuple[Surprise, ...]()
    products_s = other_s = None
    if slice is not None:
        products_s, other_s = flops / slice.chip.peak_flops / PRODUCT_UTILISATION, 0.0
    if isinstance(counted, Counted):
        flops, causes, collectives = (
            counted.flops,
            dict(counted.bytes_by_cause),
            counted.collectives,
        )
        unexpected = tuple(surprises(collectives, step.cost.collectives, step.sizes))
        if slice is not None and any(counted.cycles.values()):
            products_s, other_s = (
                counted.cycles[n] / slice.chip.clock_hz for n in ("products", "other")
            )
    found = places = None
    if slice is not None and products_s is not None and other_s is not None:
        mesh = step.mesh if isinstance(step.mesh, Mesh) and compiles_for_tpu(step) else None
        places = coordinates(slice, step.sizes, mesh)
        found = timing(slice, places, step.sizes, collectives, products_s, other_s)
    return Plan(
        mesh=step.sizes,
        slice=slice,
        run=step.run,
        weights=asked.weights,
        model_flops=3.0 * asked.flops * step.run.microbatches,
        executed_flops=float(flops * devices),
        bytes_by_cause=causes,
        needed_bytes=counted.needed_bytes
        if isinstance(counted, OutOfMemory)
        else sum(causes.values()),
        refused=isinstance(counted, OutOfMemory),
        compiled_for=None if counted is None else "TPU" if compiles_for_tpu(step) else "CPU",
        collectives=collectives,
        surprises=unexpected,
        places=places,
        timing=found,
        compile_s=None if counted is None else counted.compile_s,
    )


def compiles_for_tpu(step: Traced) -> bool:
    return isinstance(step.mesh, Mesh) and step.mesh.devices.flat[0].platform == "tpu"


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


def planned(run: Run, layout: Layout, sizes: dict[str, int], slice: Slice | None) -> Plan:
    """The plan from a trace alone: seconds, and no compiler."""
    return plan(traced(run, layout, abstract_mesh(sizes)), slice)
