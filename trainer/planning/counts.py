"""Counts the cost of a program on one device, from its trace or as compiled."""

import contextlib
import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from configs.errors import RunError
from layouts.cost.dataflow import KernelWork, work_by_kernel
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import WorkCounts
from layouts.cost.step_time import Timing, compute_s, coordinates, traffic_seconds
from layouts.hlo.compilation import compile_program, platform_of, text_of
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, uncached, use_mesh
from trainer.run import Run

GIB = 2**30
TEMPORARIES = "activations and temporaries"
MAX_EXCESS_FLOPS = 0.05  # as a share of the trace's
T = TypeVar("T")


class MemoryUse(NamedTuple):
    """Lists the memory that an executable needs on one device."""

    bytes_by_cause: Mapping[str, int]
    needed_bytes: int
    compiled_for: str | None = None
    """CPU, TPU or GPU; None for an estimate from the trace."""
    compile_s: float | None = None
    out_of_memory: bool = False
    """Whether the compiler ran out of memory.  Then only the total is the compiler's."""


class Counts(NamedTuple, Generic[T]):
    """Holds the cost of a program on one device: its work, in total or by phase, and its memory."""

    work: T
    memory: MemoryUse


def slice_mesh(sizes: dict[str, int], topology: Topology | None) -> AbstractMesh:
    """Makes a mesh to trace on, with the chips of a slice or with unspecified devices."""
    if topology is None:
        return abstract_mesh(sizes)
    return abstract_mesh(sizes, topology.chip.kind, topology.chip.platform)


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """Holds a traced function of a run with its mesh, before compilation."""

    run: Run
    layout: Layout
    mesh: Mesh | AbstractMesh
    traced: Any
    """The result of `trace` of a jitted function."""

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @property
    def platform(self) -> str | None:
        return platform_of(self.mesh)

    @property
    def merges(self) -> bool:
        """Returns whether the compiler merges collectives of the trace."""
        return self.platform != "CPU"

    def device_coords(self, topology: Topology | None) -> np.ndarray | None:
        """Returns the coordinates of each device of the mesh on the torus of a slice."""
        if topology is None:
            return None
        return coordinates(topology, self.sizes, self.layout.order, self.layout.slices)


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """Holds the fields that plans of training and of decoding share."""

    mesh: Mapping[str, int]
    topology: Topology | None
    """None for the devices of this machine."""
    device_coords: np.ndarray | None
    """Coordinates of each device of the mesh on the torus."""
    memory: MemoryUse

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool | None:
        """Returns whether the program fits in a device's memory; None if its size is unknown."""
        if self.topology is None:
            return None
        needed_bytes, available_bytes = self.memory.needed_bytes, self.topology.chip.memory_bytes
        return not self.memory.out_of_memory and needed_bytes <= available_bytes


class Compilation(NamedTuple):
    """Holds an executable, or the memory that the compiler would have needed."""

    executable: Any
    text: str | None
    """The compiled text; None without an executable."""
    compiled_for: str | None
    compile_s: float
    needed_bytes: int | None = None
    """Memory without the arguments, if a device has no room for the executable."""

    def memory_of_failed(self, estimate: MemoryUse, argument_bytes: int) -> MemoryUse:
        """Returns the estimate from the trace, with the temporaries that the compiler needs."""
        assert self.needed_bytes is not None
        needed_bytes = self.needed_bytes + argument_bytes
        others = {cause: size for cause, size in estimate.bytes_by_cause.items()
                  if cause != TEMPORARIES}  # fmt: skip
        causes = others | {TEMPORARIES: max(0, needed_bytes - sum(others.values()))}
        return MemoryUse(causes, needed_bytes, out_of_memory=True)

    def memory(self, bytes_by_cause: Mapping[str, int]) -> MemoryUse:
        needed_bytes = sum(bytes_by_cause.values())
        return MemoryUse(bytes_by_cause, needed_bytes, self.compiled_for, self.compile_s)


def excess_flops(executed: float, traced: float) -> str | None:
    """Describes the FLOPs that a compiled program executes beyond its trace; None if few."""
    if executed <= (1 + MAX_EXCESS_FLOPS) * traced:
        return None
    return (
        f"executes {executed / traced:.3g} times the FLOPs of its trace ({executed:.3g} instead of "
        f"{traced:.3g}): the compiler computes something twice, or redundantly on several devices"
    )


def compile_for(
    traced: Any, mesh: Mesh | AbstractMesh, compiler_options: Iterable[str] = ()
) -> Compilation:
    """Compiles a traced function for the devices of a mesh, which may be absent."""
    start, platform = time.perf_counter(), platform_of(mesh)
    may_be_absent = platform != "CPU"
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) if platform == "TPU" else None
        try:
            with use_mesh(mesh), uncached() if may_be_absent else contextlib.nullcontext():
                executable = compile_program(traced, mesh, compiler_options, dump)
        except jax.errors.JaxRuntimeError as error:
            needed = re.search(r"total memory required .*?\(([\d.]+)G\)", str(error))
            if needed is None:
                raise RunError(f"the compiler fails on this program: {error}") from error
            needed_bytes = round(float(needed[1]) * GIB)
            return Compilation(None, None, platform, time.perf_counter() - start, needed_bytes)
        compile_s = time.perf_counter() - start
        return Compilation(executable, text_of(executable, dump), platform, compile_s)


def count_compiled(step: TracedFunction, text: CompiledText, read_bytes: int = 0) -> WorkCounts:
    """Counts the work in a compiled text."""
    work = work_by_kernel(step.traced.jaxpr.jaxpr)
    kernels = [op.with_kernel(work.get(name, KernelWork(0))) for name, op in text.kernels]
    return WorkCounts(
        flops=text.flops + sum(kernel.times * kernel.flops for kernel in kernels),
        collectives=tuple(text.collectives(step.sizes)),
        ops=() if step.platform == "CPU" else (*text.ops, *kernels),
        read_bytes=read_bytes,
    )


def time_on_slice(
    topology: Topology, device_coords: np.ndarray, sizes: Mapping[str, int], counts: WorkCounts
) -> Timing:
    """Predicts seconds from the compiler's cycles or, without them, from FLOPs and bytes.

    Cycles include the time to read memory; a trace's products do not.
    """
    memory_s = 0.0
    if counts.ops:
        products_s, other_s = compute_s(topology.chip, counts.ops)
    else:
        peak_flops = topology.chip.peak_flops
        products_s, other_s = counts.flops / peak_flops / topology.chip.product_utilisation, 0.0
        memory_s = counts.read_bytes / topology.chip.memory_bandwidth
    memory_s = max(memory_s, 2 * counts.host_bytes / topology.chip.host_bandwidth)
    traffic = traffic_seconds(topology, device_coords, sizes, counts.collectives)
    return Timing(products_s, other_s, *traffic, memory_s)
