"""Estimates the peak memory of a traced function on one device, after compilers fuse it."""

import collections
from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from layouts.cost.dataflow import KERNELS, VIEWS, Flow, local_bytes
from layouts.cost.jaxpr_cost import GROWING, MEMORY_OPS, REDUCTIONS, Counter

FUSED_INTO = (*REDUCTIONS, *VIEWS)
"""Operations, besides elementwise ones, that compute their operands while they read them."""
COPIES = ("reshard", "device_put", "dynamic_update_slice")  # not elementwise
IN_PLACE = ("scan", "while", "dynamic_update_slice", "scatter-add")
"""Operations, besides elementwise ones, whose results reuse the memory of operands."""


def peak_bytes(jaxpr: Jaxpr, mesh: Mapping[str, int]) -> int:
    """Estimates the peak memory on one device without the arguments and the results.

    Results of elementwise operations are stored only if a product, a kernel, a loop or the like
    reads them, in the memory of an operand if that is free by then.  Others are computed where they
    are used, so their inputs live until then.  What a product gathers, or computes before a
    scatter, lives until the next product ends, as exchanges overlap with products.
    """
    return _Memory(jaxpr, mesh).peak()


class _Memory:
    """Tracks which values of one jaxpr are stored, and until when."""

    def __init__(self, jaxpr: Jaxpr, mesh: Mapping[str, int]) -> None:
        self._jaxpr, self._mesh, self._flow = jaxpr, mesh, Flow(jaxpr)
        self._counter = Counter(mesh)
        self._results = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        self._stored = {v: self._stores(v) for v in self._flow.makers}
        self._sources: dict[Any, frozenset[Any]] = {}
        for eqn in jaxpr.eqns:  # in order, so that the sources of operands are known
            for v in eqn.outvars:
                self._sources[v] = frozenset({v}) if self._stored[v] else self._read_by(eqn)

    def peak(self) -> int:
        """Returns the largest number of bytes that are live at the same time."""
        eqns = self._jaxpr.eqns
        last_use = {v: i for i, eqn in enumerate(eqns) for v in self._read_by(eqn)}
        freed = collections.Counter[int]()
        for v, i in last_use.items():
            freed[i] += self._bytes(v)
        live, peak, exchanged = 0, 0, 0
        for i, eqn in enumerate(eqns):
            made = sum(self._bytes(v) for v in eqn.outvars)
            in_place = is_elementwise(eqn) or eqn.primitive.name in IN_PLACE
            reused = min(made, freed[i]) if in_place else 0
            inner = self._inner(eqn)
            peak = max(peak, live + made - reused + inner + exchanged)
            if eqn.primitive.name == "dot_general":
                exchanged = inner
            unused = sum(self._bytes(v) for v in eqn.outvars if v not in last_use)
            live += made - freed[i] - unused
        return peak

    def _stores(self, v: Any) -> bool:
        """Returns whether a value needs memory of its own."""
        eqn = self._flow.makers[v]
        if not is_elementwise(eqn):
            return True
        readers = (u for u in self._flow.users.get(v, ()) if not is_elementwise(u))
        return any(reader.primitive.name not in FUSED_INTO for reader in readers)

    def _read_by(self, eqn: Any) -> frozenset[Any]:
        """Returns the stored values that an equation reads, also through fused operations."""
        operands = (v for v in eqn.invars if not isinstance(v, Literal))
        return frozenset().union(*(self._sources.get(v, frozenset()) for v in operands))

    def _bytes(self, v: Any) -> int:
        """Counts the bytes of a stored value, in its smallest form around a lookup or a cast."""
        if not self._stored.get(v) or v in self._results:
            return 0
        eqn = self._flow.makers[v]
        placed = self._flow.before(v) if eqn.primitive.name == "reshard" else self._flow.after(v)
        sizes = [local_bytes(v.aval, self._mesh), local_bytes(placed.aval, self._mesh)]
        users = self._flow.users.get(v, [])
        if len(users) == 1 and users[0].primitive.name == "convert_element_type":
            sizes.append(local_bytes(users[0].outvars[0].aval, self._mesh))
        return min(sizes)

    def _inner(self, eqn: Any) -> int:
        """Counts the bytes that an equation needs besides its operands and results."""
        if eqn.primitive.name == "dot_general":
            sent = (t for t in self._counter.product(eqn, self._flow) if t.kind in GROWING)
            return sum(t.tensor.bytes * self._mesh[t.mesh_axis] for t in sent)
        inner = [] if eqn.primitive.name in KERNELS else [*jaxprs_in_params(eqn.params)]
        if eqn.params.get("branches_platforms"):
            inner = inner[-1:]
        return max((peak_bytes(body, self._mesh) for body in inner), default=0)


def is_elementwise(eqn: Any) -> bool:
    """Returns whether an equation is elementwise, so that compilers fuse it."""
    name = eqn.primitive.name
    is_call = name in KERNELS or any(jaxprs_in_params(eqn.params))
    return not is_call and name not in (*MEMORY_OPS, *COPIES)
