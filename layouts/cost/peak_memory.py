"""Estimates the peak memory of a traced step on one device, if nothing is fused."""

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from layouts.cost.dataflow import KERNEL, Flow, local_bytes


def peak_bytes(jaxpr: Jaxpr, mesh: Mapping[str, int]) -> int:
    """Returns the peak without the arguments; a value lives from its equation to its last use."""
    flow, live, peak = Flow(jaxpr), 0, 0
    ends = last_uses(jaxpr, flow)
    sizes = {v: value_bytes(v, flow, mesh) for dying in ends.values() for v in dying}
    for i, eqn in enumerate(jaxpr.eqns):
        bodies = () if eqn.primitive.name == KERNEL else jaxprs_in_params(eqn.params)
        inner = max((peak_bytes(body, mesh) for body in bodies), default=0)
        live += sum(sizes.get(v, 0) for v in eqn.outvars)
        peak = max(peak, live + inner)
        live -= sum(sizes[v] for v in ends.get(i, ()))
    return peak


def last_uses(jaxpr: Jaxpr, flow: Flow) -> dict[int, list[Any]]:
    """Returns the values that each equation is the last to use; results are never among them."""
    uses = [(i, v) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars]
    uses += [(len(jaxpr.eqns), v) for v in jaxpr.outvars]
    last = {v: i for i, v in uses if not isinstance(v, Literal) and v in flow.makers}
    ends: dict[int, list[Any]] = {}
    for v, i in last.items():
        ends.setdefault(i, []).append(v)
    return ends


def value_bytes(v: Any, flow: Flow, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a value, sharded as it is around a look-up."""
    maker = flow.makers[v].primitive.name
    placed = flow.before(v) if maker == "reshard" else flow.after(v)
    return min(local_bytes(v.aval, mesh), local_bytes(placed.aval, mesh))
