"""FLOPs, traffic and memory of a traced step on one device, from the placements in its types.

Under explicit axes every tensor of a trace says how it is split.  What must be exchanged follows
from that alone, so nothing needs to be compiled: the costs of Table 1 of Shazeer et al. 2018
(Mesh-TensorFlow), for any layout and model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, jaxprs_in_params

from layouts.cost.collectives import Collective, checkout_file
from layouts.cost.dataflow import VIEWS, Flow, local_bytes, local_size, places
from layouts.cost.dot_axes import Letters
from layouts.cost.peak_memory import peak_bytes
from layouts.layout import Entry, mesh_axes

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax")
MANUAL = {"psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce",
          "all_gather": "all-gather", "all_to_all": "all-to-all"}  # fmt: skip
GROWS = ("all-gather", "reduce-scatter")  # the whole tensor is more than what a device keeps


# What reads its operands from memory and writes its results there; all else is fused into these.
WORKS = (
    "dot_general", "gather", "scatter-add", *REDUCTIONS, "cumsum", "sort", "top_k", "concatenate"
)  # fmt: skip


class OpCost(NamedTuple):
    """A computation on one device."""

    flops: int  # 0 where it is no matrix product
    bytes: int  # read and written
    elements: int  # of results of elementwise operations, which are fused into others
    times: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device does in a step."""

    flops: int
    """Of matrix products."""
    ops: tuple[OpCost, ...]
    """Products and what else must go through memory, arguments and results at last."""
    collectives: tuple[Collective, ...]
    peak_bytes: int
    """The most that is held at once beside the arguments, if nothing is fused."""


class Part(NamedTuple):
    """An operand or a result of an operation, on one device."""

    value: Any
    bytes: int
    places: tuple[Entry, ...]

    def splits(self, mesh_axis: str) -> int | None:
        """Which axis of the tensor a mesh axis splits."""
        found = (i for i, entry in enumerate(self.places) if mesh_axis in mesh_axes(entry))
        return next(found, None)


class Sent(NamedTuple):
    """What one mesh axis carries for one operand or result."""

    kind: str
    mesh_axis: str
    part: Part
    """On one device: before it is gathered, after it is scattered."""

    def received_bytes(self, group: int) -> float:
        whole = self.part.bytes * (group if self.kind in GROWS else 1)
        return Collective(self.kind, (), group, whole, 1, "").received_bytes


class CompilerTraits(NamedTuple):
    """What a compiler makes of the exchanges that a trace asks for."""

    joins: bool
    """What several products gather is gathered once even if each looks at it another way, and sums
    that are added go round as one."""
    scatters: bool
    """A sum of which each device needs a part is scattered, not sent to all and cut there."""


TPU = CompilerTraits(joins=True, scatters=True)
CPU = CompilerTraits(joins=False, scatters=False)


def cost_of(jaxpr: Jaxpr, mesh: Mapping[str, int], traits: CompilerTraits = TPU) -> Cost:
    """The cost of a traced function on a mesh.  Of a loop without a known end, of one turn."""
    counter = Counter(mesh, traits)
    counter.walk(jaxpr, 1, backward=False)
    held = sum(local_bytes(v.aval, mesh) for v in (*jaxpr.invars, *jaxpr.outvars))
    work = (*counter.ops, OpCost(0, held, 0, 1))
    flops = sum(own.flops * own.times for own in work)
    return Cost(flops, work, tuple(counter.collectives), peak_bytes(jaxpr, mesh))


class Counter:
    """Adds up FLOPs and traffic of equations."""

    def __init__(self, mesh: Mapping[str, int], traits: CompilerTraits) -> None:
        self.sizes, self.traits = mesh, traits
        self.mesh = {name: size for name, size in mesh.items() if size > 1}
        self.ops: list[OpCost] = []
        self.collectives: list[Collective] = []
        self.rules: dict[str, Callable[[Any, Flow], Iterator[Sent]]] = {
            "dot_general": self.product,
            "reshard": self.move,
            "reshape": self.regroup,
            "gather": self.lookup,
            "scatter-add": self.lookup_backward,
            **dict.fromkeys(REDUCTIONS, self.reduction),
            **dict.fromkeys(MANUAL, self.manual),
        }

    def walk(self, jaxpr: Jaxpr, times: int, *, backward: bool) -> None:
        flow, gathered = Flow(jaxpr), set[tuple[Any, str]]()
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            behind = backward or "transpose(" in str(eqn.source_info.name_stack)
            inner = list(jaxprs_in_params(eqn.params))
            if name in WORKS:
                flops = self.flops_of(eqn) if name == "dot_general" else 0
                # Of a table only those rows are read that are looked up.
                read = eqn.outvars if name == "gather" else eqn.invars
                size = sum(self.part(v).bytes for v in (*read, *eqn.outvars))
                self.ops.append(OpCost(flops, size, 0, times))
            elif name not in (*VIEWS, "reshard") and not inner:
                elements = sum(local_size(v.aval, self.sizes) for v in eqn.outvars)
                self.ops.append(OpCost(0, 0, elements, times))
            if name in self.rules:
                found = self.rules[name](eqn, flow)
                sent = [own for own in found if self.is_sent(own, eqn, flow, gathered)]
                self.emit(sent, origin(eqn) + " (backward)" * behind, times)
                continue
            turns = eqn.params["length"] if name == "scan" else 1
            for own in inner[: 1 if name == "cond" else None]:
                self.walk(own, times * turns, backward=behind)

    def emit(self, sent: Iterable[Sent], source: str, times: int) -> None:
        """Joins what goes over several mesh axes at once."""
        joined: dict[tuple[str, int], list[Sent]] = {}
        for own in sent:
            if own.part.bytes:
                joined.setdefault((own.kind, id(own.part.value)), []).append(own)
        for (kind, _), same in joined.items():
            names = [own.mesh_axis for own in same]
            group = math.prod(self.mesh[name] for name in names)
            whole = same[0].part.bytes * (group if kind in GROWS else 1)
            if kind == "reduce-scatter" and not self.traits.scatters:
                kind = "all-reduce"
            self.collectives.append(Collective(kind, tuple(names), group, whole, times, source))

    def is_sent(self, sent: Sent, eqn: Any, flow: Flow, gathered: set[tuple[Any, str]]) -> bool:
        """Whether it is sent here, and not joined with what is sent before or after."""
        if sent.kind == "all-gather":
            value = sent.part.value
            key = (flow.root(value) if self.traits.joins else value, sent.mesh_axis)
            is_first = key not in gathered
            gathered.add(key)
            return is_first
        if self.traits.joins and sent.kind in ("all-reduce", "reduce-scatter"):
            return flow.last_summand(eqn) in (None, eqn)
        return True

    def part(self, v: Any) -> Part:
        return Part(v, local_bytes(v.aval, self.sizes), places(v.aval))

    def flops_of(self, eqn: Any) -> int:
        """FLOPs of a product on one device; a mesh axis that splits nothing of it repeats it."""
        operands = [self.part(v) for v in (*eqn.invars, *eqn.outvars)]
        split = [n for n in self.mesh if any(p.splits(n) is not None for p in operands)]
        (summed, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
        whole = 2 * inner * math.prod(eqn.outvars[0].aval.shape)
        return whole // math.prod(self.mesh[name] for name in split)

    def product(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """Each mesh axis splits a product along one letter: the one that sends the least."""
        left, right, out = (self.part(v) for v in (*eqn.invars, *eqn.outvars))
        numbers = eqn.params["dimension_numbers"]
        letters = Letters.of(numbers, len(left.places), len(right.places))
        for mesh_axis, size in self.mesh.items():
            axes = (left.splits(mesh_axis), right.splits(mesh_axis), out.splits(mesh_axis))
            held = letters.at(*axes)
            choices = [
                list(exchange(letter, mesh_axis, (left, right, out), letters, held))
                for letter in dict.fromkeys(held)
                if letter is not None
            ]
            costs = [sum(own.received_bytes(size) for own in choice) for choice in choices]
            if choices:
                yield from choices[costs.index(min(costs))]

    def reduction(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """Sums over a split axis are added up between devices."""
        given, out = self.part(eqn.invars[0]), self.part(eqn.outvars[0])
        for mesh_axis in self.mesh:
            if given.splits(mesh_axis) in eqn.params["axes"]:
                yield sum_over(mesh_axis, out)

    def move(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """A tensor that is placed anew; cutting what is whole sends nothing."""
        if flow.frames(eqn):
            return
        old, new = self.part(eqn.invars[0]), self.part(eqn.outvars[0])
        for mesh_axis in self.mesh:
            before, after = old.splits(mesh_axis), new.splits(mesh_axis)
            if before is not None and before != after:
                yield Sent("all-gather" if after is None else "all-to-all", mesh_axis, old)

    def regroup(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """A reshape moves what is then split at another place."""
        old, new = self.part(eqn.invars[0]), self.part(eqn.outvars[0])
        shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        for mesh_axis in self.mesh:
            before, after = old.splits(mesh_axis), new.splits(mesh_axis)
            if before is None:
                continue
            if after is None:
                yield Sent("all-gather", mesh_axis, old)
            elif math.prod(shapes[0][:before]) != math.prod(shapes[1][:after]):
                yield Sent("all-to-all", mesh_axis, old)

    def lookup(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """Rows of a table: of a split table each device finds its own, and they are added up."""
        table = self.part(flow.before(eqn.invars[0]))
        out = self.part(flow.after(eqn.outvars[0]))
        numbers = eqn.params["dimension_numbers"]
        for mesh_axis in self.mesh:
            axis, placed = table.splits(mesh_axis), out.splits(mesh_axis)
            if axis is None or axis in numbers.operand_batching_dims:
                continue
            if axis in numbers.start_index_map:
                yield sum_over(mesh_axis, out)
            elif placed is None or placed not in numbers.offset_dims:
                yield Sent("all-gather", mesh_axis, table)

    def lookup_backward(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """Gradients of a table: sums over the tokens of all devices."""
        table = self.part(flow.after(eqn.outvars[0]))
        updates = self.part(flow.before(eqn.invars[2]))
        numbers = eqn.params["dimension_numbers"]
        if numbers.operand_batching_dims:
            return  # each row has a table of its own
        for mesh_axis in self.mesh:
            if updates.splits(mesh_axis) not in (None, *numbers.update_window_dims):
                yield sum_over(mesh_axis, table)

    def manual(self, eqn: Any, flow: Flow) -> Iterator[Sent]:
        """What code inside a shard_map sends itself."""
        names = eqn.params.get("axes") or eqn.params["axis_name"]
        for mesh_axis in (names,) if isinstance(names, str) else names:
            for v in eqn.invars if mesh_axis in self.mesh else ():
                yield Sent(MANUAL[eqn.primitive.name], mesh_axis, self.part(v))


def exchange(
    letter: int,
    mesh_axis: str,
    parts: tuple[Part, Part, Part],
    letters: Letters,
    held: tuple[int | None, ...],
) -> Iterator[Sent]:
    """What is sent where a mesh axis splits a product along one letter."""
    left, right, out = parts
    for part, own_letters, own in ((left, letters.left, held[0]), (right, letters.right, held[1])):
        if own is not None and own != letter:
            kind = "all-to-all" if letter in own_letters else "all-gather"
            yield Sent(kind, mesh_axis, part)
    if letter not in letters.out:  # each device has a part of the sum
        yield sum_over(mesh_axis, out)
    elif held[2] is None:
        yield Sent("all-gather", mesh_axis, out)
    elif held[2] != letter:
        yield Sent("all-to-all", mesh_axis, out)


def sum_over(mesh_axis: str, out: Part) -> Sent:
    """A sum of parts: whole on every device, or scattered where the mesh axis splits it."""
    kind = "all-reduce" if out.splits(mesh_axis) is None else "reduce-scatter"
    return Sent(kind, mesh_axis, out)


def origin(eqn: Any) -> str:
    """The line of the model that an equation stands for, and what it does."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    lines = (f"{checkout_file(frame.file_name)}:{frame.line_num}" for frame in frames)
    line = next((line for line in lines if not line.startswith(":")), "")
    return f"{line} {eqn.primitive.name}".strip()
