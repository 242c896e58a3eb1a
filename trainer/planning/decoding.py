"""What decoding will cost, from the real program: traced, or compiled for absent devices."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from layouts.cost.collectives import Collective, UnexpectedTraffic, unexpected_traffic
from layouts.cost.dataflow import local_bytes
from layouts.cost.interconnect import Slice
from layouts.cost.jaxpr_cost import cost_of
from layouts.cost.peak_memory import peak_bytes
from layouts.cost.step_time import PRODUCT_UTILISATION, Timing, add_up, coordinates, cycles_s
from layouts.hlo.program import CompiledProgram
from layouts.layout import Layout
from layouts.mesh import abstract_mesh, use_mesh
from models.decoding.generate import NEW_TOKENS, Asked, Search, cache_of, generate
from trainer.planning.training import (
    TEMPORARIES,
    compile_for,
    shard_bytes,
    target,
    traits,
)
from trainer.run import Run
from trainer.step import abstract_params


class Wanted(NamedTuple):
    """What is decoded at a time."""

    search: Search
    rows: int
    source_tokens: int
    """Of each source; 0 where there is none."""
    prompt_tokens: int
    """What each text begins with."""
    new_tokens: int
    """So many steps; texts that end sooner save the rest."""


class Part(NamedTuple):
    """What one device does before the first token, or for each."""

    flops: int
    collectives: tuple[Collective, ...]
    read_bytes: int
    """What it reads at the least: weights, and for a token the cache."""
    cycles: Mapping[str, int] | None = None

    def without(self, part: "Part", read_bytes: int) -> "Part":
        """What is left of a whole."""
        left = tuple((Counter(self.collectives) - Counter(part.collectives)).elements())
        cycles = None
        if self.cycles is not None and part.cycles is not None:
            cycles = {kind: count - part.cycles[kind] for kind, count in self.cycles.items()}
        return Part(self.flops - part.flops, left, read_bytes, cycles)


class Counted(NamedTuple):
    """What decoding does on one device, by its trace or as a compiler made it."""

    start: Part
    """Sources and prompts, once."""
    token: Part
    bytes_by_cause: Mapping[str, int]
    needed_bytes: int
    compiled_for: str | None = None
    compile_s: float | None = None
    refused: bool = False
    """Whether the compiler found no room for it; all but what is needed is then by the trace."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """Decoding on a mesh, with its arguments, before it is compiled."""

    run: Run
    layout: Layout
    wanted: Wanted
    mesh: Mesh | AbstractMesh
    params: Any
    others: Any
    """Sources and what is asked for."""
    cache: Any
    program: Any  # of jax: what `trace` returns
    jaxpr: Jaxpr
    """Of the program, without what no token needs, such as the logits of a prompt."""

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @property
    def loop(self) -> Any:
        """The loop over new tokens."""
        return next(
            eqn
            for eqn in self.jaxpr.eqns
            if eqn.primitive.name == "while" and NEW_TOKENS in str(eqn.source_info.name_stack)
        )

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of the arguments and of the cache on one device, without padding."""
        return {
            "parameters": shard_bytes(self.params),
            "inputs": shard_bytes(self.others),
            "cache": shard_bytes(self.cache),
        }

    @functools.cached_property
    def parts(self) -> tuple[Part, Part]:
        """What the trace says of the start and of a token."""
        return self.on(self.sizes)

    @functools.cached_property
    def peak_bytes(self) -> int:
        return peak_bytes(self.jaxpr, self.sizes)

    def on(self, sizes: Mapping[str, int]) -> tuple[Part, Part]:
        """The same for mesh axes of other sizes."""
        turn = self.loop.params
        jaxprs = (self.jaxpr, turn["cond_jaxpr"].jaxpr, turn["body_jaxpr"].jaxpr)
        whole, ends, body = (cost_of(own, sizes, traits(self.mesh)) for own in jaxprs)
        weights, read = (
            sum(local_bytes(v.aval, sizes) for v in own)
            for own in (self.jaxpr.invars, self.loop.invars)
        )
        token = Part(ends.flops + body.flops, ends.collectives + body.collectives, read)
        return Part(whole.flops, whole.collectives, 0).without(token, weights), token

    def output_flops(self, parts: tuple[Part, Part]) -> int:
        start, token = parts
        return start.flops + self.wanted.new_tokens * token.flops


def traced(run: Run, layout: Layout, mesh: Mesh | AbstractMesh, wanted: Wanted) -> Traced:
    """Traces the decoding that `decode` runs; allocates nothing."""
    model, rows = run.model.model(layout), wanted.rows

    def array(axes: str, *shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.place(axes)))

    source = None
    if wanted.source_tokens:
        names = ("inputs_BM", "segments_BM", "positions_BM")
        source = {name: array("BM", rows, wanted.source_tokens) for name in names}
    asked = Asked(
        prompts_BL=array("Bl", rows, wanted.prompt_tokens),
        lengths_B=array("B", rows),
        seeds_B=array("B", rows, dtype=np.uint32),
        most_B=array("B", rows),
    )
    params = abstract_params(model, mesh)
    static = (model, wanted.search, wanted.new_tokens)
    with use_mesh(mesh):
        cache = jax.eval_shape(functools.partial(cache_of, *static), params, source, asked)
        program = generate.trace(*static, params, source, asked)
    whole = program.jaxpr.jaxpr
    needed, _ = dce_jaxpr(whole, [True] * len(whole.outvars))
    return Traced(run, layout, wanted, mesh, params, (source, asked), cache, program, needed)


def estimated(step: Traced) -> Counted:
    """What the trace alone says."""
    held = step.held_bytes
    causes = {**held, TEMPORARIES: max(0, step.peak_bytes - held["cache"])}
    return Counted(*step.parts, causes, sum(causes.values()))


def compiled(step: Traced) -> Counted:
    """Compiles decoding for its mesh, of absent TPUs or of devices, and counts what is in it."""
    found, held = compile_for(step.program, step.mesh), step.held_bytes
    made: dict[str, Any] = {"compiled_for": target(step.mesh), "compile_s": found.compile_s}
    if found.refused_bytes is not None:
        needed_bytes = found.refused_bytes + held["parameters"] + held["inputs"]
        return estimated(step)._replace(needed_bytes=needed_bytes, refused=True, **made)
    memory = found.program.memory_analysis()
    cache = min(held["cache"], memory.temp_size_in_bytes)
    causes = {
        "parameters": memory.argument_size_in_bytes - held["inputs"],
        "inputs": held["inputs"],
        "cache": cache,
        TEMPORARIES: memory.temp_size_in_bytes - cache + memory.output_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    start, token = step.parts
    if made["compiled_for"] in ("CPU", "TPU"):
        text = CompiledProgram.read(found.program.as_text(), NEW_TOKENS)
        start, token = in_text(step, text, start), in_text(step, text.iteration, token)
        start = start.without(token, start.read_bytes)
    return Counted(start, token, causes, sum(causes.values()), **made)


def in_text(step: Traced, text: CompiledProgram, expected: Part) -> Part:
    cycles = text.cycles if target(step.mesh) == "TPU" else None
    sent = tuple(text.collectives(step.sizes))
    return Part(text.flops, sent, expected.read_bytes, cycles)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The cost of decoding under a layout, as far as it is known."""

    step: Traced
    slice: Slice | None
    counted: Counted
    places: np.ndarray | None
    timings: tuple[Timing, Timing] | None
    """Of the start and of a token."""

    @property
    def devices(self) -> int:
        return math.prod(self.step.sizes.values())

    @property
    def fits(self) -> bool | None:
        """Whether a device's memory holds it; unknown where the device is."""
        if self.slice is None:
            return None
        return not self.counted.refused and (
            self.counted.needed_bytes <= self.slice.chip.memory_bytes
        )

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.step.params))

    @property
    def cache_bytes(self) -> int:
        """On all devices."""
        return self.devices * self.step.held_bytes["cache"]

    @property
    def model_flops(self) -> int:
        """Of all outputs, on all devices: what the model asks for, nothing computed twice."""
        alone = dict.fromkeys(self.step.sizes, 1)
        return self.step.output_flops(self.step.on(alone))

    @property
    def executed_flops(self) -> int:
        return self.devices * self.step.output_flops((self.counted.start, self.counted.token))

    @property
    def token_s(self) -> float | None:
        return None if self.timings is None else self.timings[1].step_s

    @property
    def output_s(self) -> float | None:
        """From the prompts to the last token, no text ending sooner."""
        if self.timings is None:
            return None
        start, token = self.timings
        return start.step_s + self.step.wanted.new_tokens * token.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens of one text a row."""
        if self.output_s is None:
            return None
        return self.step.wanted.rows * self.step.wanted.new_tokens / self.output_s

    @property
    def unexpected_collectives(self) -> list[UnexpectedTraffic]:
        """Traffic of a token that is unlike what the layout asks for."""
        expected = self.step.parts[1].collectives
        return unexpected_traffic(self.counted.token.collectives, expected, self.step.sizes)


def plan(step: Traced, slice: Slice | None, counted: Counted) -> DecodePlan:
    """Puts together what is known of decoding."""
    places, timings = None, None
    if slice is not None:
        places = coordinates(slice, step.sizes, step.layout.order)
        start, token = (part_s(slice, places, step.sizes, part) for part in counted[:2])
        timings = (start, token)
    return DecodePlan(step, slice, counted, places, timings)


def part_s(slice: Slice, places: np.ndarray, sizes: Mapping[str, int], part: Part) -> Timing:
    """How long a part takes; a compiler's cycles know of the memory, a trace's products do not."""
    products_s, other_s = part.flops / slice.chip.peak_flops / PRODUCT_UTILISATION, 0.0
    memory_s = part.read_bytes / slice.chip.memory_bandwidth
    if part.cycles is not None:
        (products_s, other_s), memory_s = cycles_s(slice.chip, part.cycles), 0.0
    found = add_up(slice, places, sizes, part.collectives, products_s, other_s)
    return dataclasses.replace(found, memory_s=memory_s)


def planned(
    run: Run, layout: Layout, sizes: dict[str, int], slice: Slice | None, wanted: Wanted
) -> DecodePlan:
    """The plan from a trace alone: seconds, and no compiler."""
    step = traced(run, layout, abstract_mesh(sizes), wanted)
    return plan(step, slice, estimated(step))
