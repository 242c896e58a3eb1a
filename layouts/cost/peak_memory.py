"""The most memory that a traced step holds at once on one device, if nothing is fused."""

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from layouts.cost.dataflow import Flow, local_bytes


def peak_bytes(jaxpr: Jaxpr, mesh: Mapping[str, int]) -> int:
    """Beside the arguments: every value lives from its equation to the last that uses it."""
    flow, live, most = Flow(jaxpr), 0, 0
    ends = last_uses(jaxpr, flow)
    held = {v: held_bytes(v, flow, mesh) for dying in ends.values() for v in dying}
    for i, eqn in enumerate(jaxpr.eqns):
        inner = max((peak_bytes(own, mesh) for own in jaxprs_in_params(eqn.params)), default=0)
        live += sum(held.get(v, 0) for v in eqn.outvars)
        most = max(most, live + inner)
        live -= sum(held[v] for v in ends.get(i, ()))
    return most


def last_uses(jaxpr: Jaxpr, flow: Flow) -> dict[int, list[Any]]:
    """The values that are needed for the last time by each equation; results by none."""
    uses = [(i, v) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars]
    uses += [(len(jaxpr.eqns), v) for v in jaxpr.outvars]
    last = {v: i for i, v in uses if not isinstance(v, Literal) and v in flow.makers}
    ends: dict[int, list[Any]] = {}
    for v, i in last.items():
        ends.setdefault(i, []).append(v)
    return ends


def held_bytes(v: Any, flow: Flow, mesh: Mapping[str, int]) -> int:
    """Bytes of a value, as it is placed around a look-up."""
    own = flow.makers[v].primitive.name
    placed = flow.before(v) if own == "reshard" else flow.after(v)
    return min(local_bytes(v.aval, mesh), local_bytes(placed.aval, mesh))
