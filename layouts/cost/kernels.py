"""Counts the FLOPs of kernels: Pallas calls, whose trace has one block of the grid."""

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from layouts.cost.dataflow import KERNEL, bodies, executed_equations, product_flops, total_flops

# What kernels compute the bounds of their loops by, from the place of a block in the grid.
INDEX_OPS: Mapping[str, Callable[..., "Index"]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.floordiv,
}
Index = np.ndarray | int


def kernel_flops(eqn: Any) -> int:
    """Counts the FLOPs of a kernel: as its author estimates them, or of the blocks that run."""
    estimate = eqn.params["cost_estimate"]
    if estimate is not None:
        return estimate.flops
    (body,), blocks = bodies(eqn)
    flops = block_flops(body, eqn.params["grid_mapping"].grid)
    return round(blocks * causal_share(eqn) * flops)


def flops_by_kernel(jaxpr: Jaxpr) -> dict[str, float]:
    """Returns the FLOPs of one call of each kernel of a trace, of calls of a name the mean."""
    flops, calls = Counter[str](), Counter[str]()
    for eqn, times in executed_equations(jaxpr):
        if eqn.primitive.name == KERNEL:
            flops[eqn.params["name"]] += times * kernel_flops(eqn)
            calls[eqn.params["name"]] += times
    return {name: flops[name] / calls[name] for name in calls}


def causal_share(eqn: Any) -> float:
    """Returns the share of its blocks that splash attention computes under a causal mask.

    It reads from an array whether a block is masked, and a trace has no values.  With such a mask
    alone it reads the positions of queries.  Blocks of queries and keys are equal, and devices that
    share the queries of a row compute as many.  The grid is as wide as the longest row or, for
    gradients of keys, column: a window makes it narrow.
    """
    body = eqn.params["jaxpr"]
    refs = dict(zip(body.debug_info.arg_names or (), range(len(body.invars)), strict=False))
    is_splash = eqn.params["name"].startswith("splash")
    if not is_splash or "q_sequence_ref" not in refs:
        return 1.0
    queries, keys = (
        eqn.invars[refs[name]].aval.shape[-2] // body.invars[refs[name]].aval.shape[-2]
        for name in ("q_ref", "k_ref")
    )
    window, share = eqn.params["grid_mapping"].grid[-1], 1.0
    if "_dkv_" in eqn.params["name"]:  # the grid has a device's queries of each column
        window, share = (keys, 1.0) if window == queries else (window, queries / keys)
    return share * (1 - (window - 1) / (2 * keys))


def block_flops(body: Jaxpr, grid: tuple[int, ...]) -> float:
    """Counts the FLOPs of a block: the mean over the grid, where loops are of different length."""
    indices: dict[Any, Index] = {}
    flops = 0.0
    for eqn in body.eqns:
        name = eqn.primitive.name
        known = [index_of(v, indices) for v in eqn.invars]
        operands = [index for index in known if index is not None]
        if name == "program_id":
            axis = eqn.params["axis"]
            shape = [size if i == axis else 1 for i, size in enumerate(grid)]
            indices[eqn.outvars[0]] = np.arange(grid[axis]).reshape(shape)
        elif name in INDEX_OPS and len(operands) == 2:
            indices[eqn.outvars[0]] = INDEX_OPS[name](*operands)
        elif name == "dot_general":
            flops += product_flops(eqn)
        else:
            inner, trip_count = bodies(eqn)
            times = mean_trip_count(eqn, known) if name == "while" else trip_count
            flops += times * math.fsum(total_flops(jaxpr) for jaxpr in inner)
    return flops


def index_of(v: Any, indices: dict[Any, Index]) -> Index | None:
    """Returns a whole number that follows from the place in the grid; None for all else."""
    if isinstance(v, Literal):
        value = np.asarray(v.val)
        return int(value) if value.dtype.kind == "i" else None
    return indices.get(v)


def mean_trip_count(loop: Any, operands: list[Index | None]) -> float:
    """Returns how often a loop from one index up to another runs; 1 where they are not known."""
    condition = loop.params["cond_jaxpr"].jaxpr
    first_carry = loop.params["cond_nconsts"] + loop.params["body_nconsts"]
    variables = condition.invars[loop.params["cond_nconsts"] :]
    carried = dict(zip(variables, operands[first_carry:], strict=True))
    first, last = (carried.get(v) for v in compared_variables(condition))
    if first is None or last is None:
        return 1.0
    return float(np.mean(np.maximum(np.subtract(last, first), 0)))


def compared_variables(condition: Jaxpr) -> tuple[Any, Any]:
    """Returns the index and the bound of a loop's condition "index < bound"; else two Nones."""
    last = condition.eqns[-1]
    if last.primitive.name != "lt" or any(isinstance(v, Literal) for v in last.invars):
        return None, None
    index, bound = last.invars
    return index, bound
