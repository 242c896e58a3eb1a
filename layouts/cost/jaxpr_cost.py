"""Counts FLOPs and traffic of a traced step on one device, from the shardings in its types.

With explicit mesh axes, the type of every tensor in a trace contains its sharding.  The collectives
follow from the trace, so nothing needs to be compiled.  These are the costs of Table 1 of Shazeer
et al. 2018 (Mesh-TensorFlow), for any layout and model.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import Jaxpr

from layouts.cost import dataflow
from layouts.cost.collectives import Collective
from layouts.cost.dataflow import KERNELS, PRODUCTS, VIEWS, Flow, KernelWork, local_bytes, places
from layouts.shards import Entry, mesh_axes

Item = TypeVar("Item", Collective, "OpCost")
Letters = tuple[int, ...]


def product_letters(numbers: Any, left_rank: int, right_rank: int) -> tuple[Letters, ...]:
    """Numbers the axes of a product's operands and result; equal axes have equal numbers.

    `numbers` holds pairs of summed axes, then pairs of batch axes, which come first in the result.
    """
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    pairs = list(zip((*left_batch, *left_sum), (*right_batch, *right_sum), strict=True))
    left = [len(pairs) + axis for axis in range(left_rank)]
    right = [len(pairs) + left_rank + axis for axis in range(right_rank)]
    for letter, (a, b) in enumerate(pairs):
        left[a] = right[b] = letter
    kept = [letter for letter in (*left, *right) if letter >= len(pairs)]
    return tuple(left), tuple(right), (*range(len(left_batch)), *kept)


REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax")
MANUAL = {"psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce",
          "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
          "all_to_all": "all-to-all", "ragged_all_to_all": "all-to-all",
          "ppermute": "collective-permute"}  # fmt: skip
GROWING = ("all-gather", "reduce-scatter")  # the full tensor is larger than a device's part

# Operations that read operands from memory and write results; others are fused into these.
MEMORY_OPS = (
    *PRODUCTS, "gather", "scatter-add", *REDUCTIONS, "cumsum", "sort", "top_k", "concatenate"
)  # fmt: skip


class OpCost(NamedTuple):
    """Holds the cost of one operation on one device."""

    flops: int  # of a matrix product, else 0
    bytes: int  # read and written
    elements: int  # of results of elementwise operations, which are fused into others
    times: int
    dtype: str = ""
    """Of the operands of a product."""
    source: str = ""
    """Line of the model, and the operation."""
    scopes: str = ""
    """The named scopes in which it was traced."""
    cycles: int | None = None
    """The estimate of the TPU compiler; None if there is none."""
    kernel: KernelWork | None = None

    def with_kernel(self, work: KernelWork) -> "OpCost":
        """Returns this cost with the work of a kernel."""
        return self._replace(flops=round(work.flops), kernel=work)


class WorkCounts(NamedTuple):
    """Holds counts of one device's work in an executable or a trace, or in a part of one."""

    flops: int
    """Of matrix products."""
    collectives: tuple[Collective, ...]
    ops: tuple[OpCost, ...] = ()
    """Operations of the trace (the last one stands for arguments and results) or of the executable,
    where Pallas calls have FLOPs from the trace."""
    read_bytes: int = 0
    """The least number of bytes read: the weights and, to decode a token, the cache."""
    host_bytes: int = 0
    """Bytes that offloading keeps in host memory: each is written once and read once."""

    def without(self, part: "WorkCounts") -> "WorkCounts":
        """Subtracts a part, except from the bytes that are read."""
        return self._replace(
            flops=self.flops - part.flops,
            collectives=subtract(self.collectives, part.collectives),
            ops=subtract(self.ops, part.ops),
        )


def subtract(items: Iterable[Item], removed: Iterable[Item]) -> tuple[Item, ...]:
    """Removes one item per equal removed item, ignoring scopes: a part has only inner scopes."""
    left, rest = collections.Counter(item._replace(scopes="") for item in removed), []
    for item in items:
        if left[item._replace(scopes="")]:
            left[item._replace(scopes="")] -= 1
        else:
            rest.append(item)
    return tuple(rest)


class LocalTensor(NamedTuple):
    """Describes one device's shard of an operand or a result."""

    value: Any
    bytes: int
    places: tuple[Entry, ...]

    def splits(self, mesh_axis: str) -> int | None:
        """Returns the axis of the tensor that a mesh axis splits, if any."""
        axes = (i for i, entry in enumerate(self.places) if mesh_axis in mesh_axes(entry))
        return next(axes, None)

    @property
    def unreduced(self) -> frozenset[str]:
        """Returns the mesh axes over which devices hold partial sums."""
        sharding = getattr(self.value.aval, "sharding", None)
        return frozenset() if sharding is None else sharding.spec.unreduced


class Transfer(NamedTuple):
    """Describes what one operand or result sends along one mesh axis."""

    kind: str
    mesh_axis: str
    tensor: LocalTensor
    """The shard on one device: before a gather, or after a scatter."""

    def received_bytes(self, group: int) -> float:
        full_bytes = self.tensor.bytes * (group if self.kind in GROWING else 1)
        return Collective(self.kind, (), group, full_bytes, 1, "").received_bytes


def cost_of(jaxpr: Jaxpr, mesh: Mapping[str, int], *, merges: bool = True) -> WorkCounts:
    """Counts the cost of a traced function on a mesh.

    A loop without a known trip count counts as one iteration.  `merges` is whether the compiler
    optimizes collectives, which the CPU compiler does not: it merges equal gathers, even of
    reshaped views, adds up sums before a single reduction, and replaces an all-reduce with a
    reduce-scatter where each device needs a shard.
    """
    counter = Counter(mesh, merges=merges)
    counter.walk(jaxpr, 1, backward=False)
    argument_bytes = sum(local_bytes(v.aval, mesh) for v in (*jaxpr.invars, *jaxpr.outvars))
    ops = (*counter.ops, OpCost(0, argument_bytes, 0, 1))
    flops, collectives = sum(op.flops * op.times for op in ops), tuple(counter.collectives)
    return WorkCounts(flops, collectives, ops, host_bytes=counter.host_bytes)


class Counter:
    """Adds up FLOPs and traffic of equations."""

    def __init__(self, mesh: Mapping[str, int], *, merges: bool = True) -> None:
        self.sizes, self.merges = mesh, merges
        self.mesh = {name: size for name, size in mesh.items() if size > 1}
        self.ops: list[OpCost] = []
        self.collectives: list[Collective] = []
        self.host_bytes = 0
        self.rules: dict[str, Callable[[Any, Flow], Iterator[Transfer]]] = {
            "dot_general": self.product,
            "reshard": self.move,
            "reshape": self.move,
            "gather": self.lookup,
            "scatter-add": self.lookup_backward,
            **dict.fromkeys(REDUCTIONS, self.reduction),
            **dict.fromkeys(MANUAL, self.manual),
        }

    def walk(
        self, jaxpr: Jaxpr, times: int, *, backward: bool, line: str = "", scopes: str = ""
    ) -> None:
        """Counts equations; `line` is the line of the model for equations that have none."""
        flow, gathered = Flow(jaxpr), set[tuple[Any, str]]()
        for eqn in jaxpr.eqns:
            name, line_of_eqn = eqn.primitive.name, dataflow.line_of(eqn) or line
            inner_scopes = f"{scopes}/{eqn.source_info.name_stack}"
            is_backward = backward or "transpose(" in str(eqn.source_info.name_stack)
            source = f"{line_of_eqn} {name}".strip() + " (backward)" * is_backward
            if name in KERNELS:
                size = sum(self.local(v).bytes for v in (*eqn.invars, *eqn.outvars))
                op = OpCost(0, size, 0, times, "", source, inner_scopes)
                self.ops.append(op.with_kernel(dataflow.kernel_work(eqn)))
                continue
            inner, trip_count = dataflow.bodies(eqn)
            if name in MEMORY_OPS:
                flops = self.flops_of(eqn) if name in PRODUCTS else 0
                given, made = map(flow.before, eqn.invars), [*map(flow.after, eqn.outvars)]
                # A lookup reads only the selected rows of its table.
                read = made if name == "gather" else given
                size = sum(self.local(v).bytes for v in (*read, *made))
                dtype = str(getattr(eqn.invars[0].aval, "dtype", ""))
                self.ops.append(OpCost(flops, size, 0, times, dtype, source, inner_scopes))
            elif name not in (*VIEWS, "reshard") and not inner:
                elements = sum(dataflow.local_size(v.aval, self.sizes) for v in eqn.outvars)
                self.ops.append(OpCost(0, 0, elements, times, "", source, inner_scopes))
            if name == "device_put":
                there = [v.aval for v in eqn.outvars if dataflow.is_on_host(v.aval)]
                size = sum(dataflow.stored_bytes(aval, self.sizes) for aval in there)
                self.host_bytes += times * size
            if name in self.rules:
                transfers = self.rules[name](eqn, flow)
                needed = [t for t in transfers if self.is_needed(t, eqn, flow, gathered)]
                self.emit(needed, source, inner_scopes, times)
                continue
            for body in inner:
                self.walk(
                    body, times * trip_count,
                    backward=is_backward, line=line_of_eqn, scopes=inner_scopes,
                )  # fmt: skip

    def emit(self, transfers: Iterable[Transfer], source: str, scopes: str, times: int) -> None:
        """Records collectives; a tensor's transfers over several mesh axes are one collective."""
        joined: dict[tuple[str, int], list[Transfer]] = {}
        for transfer in transfers:
            if transfer.tensor.bytes:
                key = (transfer.kind, id(transfer.tensor.value))
                joined.setdefault(key, []).append(transfer)
        for (kind, _), same in joined.items():
            names = [transfer.mesh_axis for transfer in same]
            group = math.prod(self.mesh[name] for name in names)
            size = same[0].tensor.bytes * (group if kind in GROWING else 1)
            if kind == "reduce-scatter" and not self.merges:
                kind = "all-reduce"
            made = Collective(kind, tuple(names), group, size, times, source, scopes=scopes)
            self.collectives.append(made)

    def is_needed(
        self, transfer: Transfer, eqn: Any, flow: Flow, gathered: set[tuple[Any, str]]
    ) -> bool:
        """Returns whether a transfer is not merged with an earlier or a later one."""
        if transfer.kind == "all-gather":
            value = transfer.tensor.value
            key = (flow.root(value) if self.merges else value, transfer.mesh_axis)
            is_first = key not in gathered
            gathered.add(key)
            return is_first
        if self.merges and transfer.kind in ("all-reduce", "reduce-scatter"):
            return flow.last_summand(eqn) in (None, eqn)
        return True

    def local(self, v: Any) -> LocalTensor:
        return LocalTensor(v, local_bytes(v.aval, self.sizes), places(v.aval))

    def flops_of(self, eqn: Any) -> int:
        """Counts the FLOPs of a product on one device; mesh axes that do not split it repeat it."""
        operands = [self.local(v) for v in (*eqn.invars, *eqn.outvars)]
        split = [n for n in self.mesh if any(p.splits(n) is not None for p in operands)]
        return dataflow.product_flops(eqn) // math.prod(self.mesh[name] for name in split)

    def product(self, eqn: Any, flow: Flow) -> Iterator[Transfer]:
        """Yields the transfers of a product; each mesh axis splits it along the cheapest letter."""
        tensors = [self.local(v) for v in (*eqn.invars, *eqn.outvars)]
        ranks = (len(operand.places) for operand in tensors[:2])
        letters = product_letters(eqn.params["dimension_numbers"], *ranks)
        for mesh_axis, size in self.mesh.items():
            axes = [tensor.splits(mesh_axis) for tensor in tensors]
            pairs = zip(letters, axes, strict=True)
            split = [None if axis is None else numbers[axis] for numbers, axis in pairs]
            choices = [
                list(exchange(letter, mesh_axis, zip(tensors, letters, split, strict=True)))
                for letter in dict.fromkeys(split)
                if letter is not None
            ]
            costs = [sum(t.received_bytes(size) for t in choice) for choice in choices]
            if choices:
                yield from choices[costs.index(min(costs))]

    def reduction(self, eqn: Any, flow: Flow) -> Iterator[Transfer]:
        """Yields the transfers that add up partial sums over a split axis."""
        given, out = self.local(eqn.invars[0]), self.local(eqn.outvars[0])
        for mesh_axis in self.mesh:
            if given.splits(mesh_axis) in eqn.params["axes"]:
                yield sum_over(mesh_axis, out)

    def move(self, eqn: Any, flow: Flow) -> Iterator[Transfer]:
        """Yields the transfers of a reshard or a reshape; slicing a replicated axis needs none.

        A mesh axis that moves to another axis of the tensor needs an all-to-all.
        """
        if flow.frames(eqn):
            return
        old, new = self.local(eqn.invars[0]), self.local(eqn.outvars[0])
        shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        for mesh_axis in self.mesh:
            before, after = old.splits(mesh_axis), new.splits(mesh_axis)
            is_moved = before != after
            if eqn.primitive.name == "reshape":
                is_moved = math.prod(shapes[0][:before]) != math.prod(shapes[1][:after])
            if mesh_axis in old.unreduced - new.unreduced:
                yield sum_over(mesh_axis, new)
            elif before is not None and after is None:
                yield Transfer("all-gather", mesh_axis, old)
            elif before is not None and is_moved:
                yield Transfer("all-to-all", mesh_axis, old)

    def lookup(self, eqn: Any, flow: Flow) -> Iterator[Transfer]:
        """Yields the transfers of a lookup; rows of a split table are added up between devices."""
        table = self.local(flow.before(eqn.invars[0]))
        out = self.local(flow.after(eqn.outvars[0]))
        numbers = eqn.params["dimension_numbers"]
        for mesh_axis in self.mesh:
            axis, placed = table.splits(mesh_axis), out.splits(mesh_axis)
            if axis is None or axis in numbers.operand_batching_dims:
                continue
            if axis in numbers.start_index_map:
                yield sum_over(mesh_axis, out)
            elif placed is None or placed not in numbers.offset_dims:
                yield Transfer("all-gather", mesh_axis, table)

    def lookup_backward(self, eqn: Any, flow: Flow) -> Iterator[Transfer]:
        """Yields the transfers that sum a table's gradients over the tokens of all devices."""
        table = self.local(flow.after(eqn.outvars[0]))
        updates = self.local(flow.before(eqn.invars[2]))
        numbers = eqn.params["dimension_numbers"]
        if numbers.operand_batching_dims:
            return  # each row has its own table
        for mesh_axis in self.mesh:
            if mesh_axis in table.unreduced:
                continue
            if updates.splits(mesh_axis) not in (None, *numbers.update_window_dims):
                yield sum_over(mesh_axis, table)

    def manual(self, eqn: Any, flow: Flow) -> Iterator[Transfer]:
        """Yields the transfers of a collective inside a `shard_map`."""
        names = eqn.params.get("axes") or eqn.params["axis_name"]
        kind = MANUAL[eqn.primitive.name]
        tensors = [self.local(v) for v in (eqn.outvars if kind == "reduce-scatter" else eqn.invars)]
        if eqn.primitive.name == "ragged_all_to_all":
            # Of the rows before and after, the smaller array has no space for rows of all devices.
            tensors = [min(tensors[:2], key=lambda tensor: tensor.bytes)]
        for mesh_axis in (names,) if isinstance(names, str) else names:
            for tensor in tensors if mesh_axis in self.mesh else ():
                yield Transfer(kind, mesh_axis, tensor)


def exchange(
    letter: int, mesh_axis: str, tensors: Iterable[tuple[LocalTensor, Letters, int | None]]
) -> Iterator[Transfer]:
    """Yields the transfers if a mesh axis splits a product along one letter.

    `tensors` are the operands and the result, each with its letters and the letter split now.
    """
    *operands, (out, out_letters, out_letter) = tensors
    for operand, operand_letters, split_letter in operands:
        if split_letter is not None and split_letter != letter:
            kind = "all-to-all" if letter in operand_letters else "all-gather"
            yield Transfer(kind, mesh_axis, operand)
    if letter not in out_letters:
        if mesh_axis not in out.unreduced:
            yield sum_over(mesh_axis, out)
    elif out_letter != letter:
        yield Transfer("all-gather" if out_letter is None else "all-to-all", mesh_axis, out)


def sum_over(mesh_axis: str, out: LocalTensor) -> Transfer:
    """Returns the sum over a mesh axis: scattered if the axis splits the result, else to all."""
    kind = "all-reduce" if out.splits(mesh_axis) is None else "reduce-scatter"
    return Transfer(kind, mesh_axis, out)
