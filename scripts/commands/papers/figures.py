"""Obtains our figures: by counting weights, by plans from traces, by the cost model.

Each function of `SOURCES` takes the words of a row and returns figures by name.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.load import load
from layouts.cost.collectives import Collective
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import cost_of
from layouts.cost.step_time import compute_s, coordinates, seconds
from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.mesh import abstract_mesh
from layouts.shards import num_shards
from scripts.commands.inspect.layout import model_of
from scripts.commands.papers.items import RUNS
from scripts.commands.planning.flags import DecodePlanFlags, PlanFlags
from scripts.commands.planning.inputs import PlanInputs, best_plan
from scripts.commands.planning.plan_decode import plan_batch
from trainer.planning.breakdown import seconds_of
from trainer.planning.report import as_json, decode_as_json

MEGABYTE = 10**6

Figures = Mapping[str, Any]


def count(name: str) -> Figures:
    """Counts the weights of a run's model, and the experts of its layers."""
    spec = model_of(load(RUNS[name].files, RUNS[name].settings))
    weights = record(lambda layout: spec.model(layout).init(jax.random.key(0))).weights
    experts = (w for w in weights if w.axes == "NEDF" and w.path.endswith("wi_EDF"))
    return {
        "parameters": sum(math.prod(w.shape) for w in weights),
        "experts": sum(math.prod(w.shape[:2]) for w in experts),
    }


def inputs_of(name: str) -> PlanInputs:
    """Reads the settings of a run."""
    run = RUNS[name]
    return PlanInputs.read(load(run.files, run.settings), Topology.named(run.topology))


def plan(name: str) -> Figures:
    """Plans a run by its trace: the keys of `plan --json`, its parts by name and by collective."""
    run, inputs = RUNS[name], inputs_of(name)
    if run.decoding:
        flags = PlanFlags(analytic=True, decoding=DecodePlanFlags(**run.decoding))
        return decode_as_json(plan_batch(inputs, flags))
    figures = as_json(best_plan(inputs, analytic=True))
    parts, kinds = figures["step_time_parts_s"], Counter[str]()
    for row in figures["collectives"]:
        kinds[row["kind"]] += row["seconds"]
    by_kind = {name: parts[name] for name in ("matrix products", "other compute")} | kinds
    by_part = {row["part"]: seconds_of(row) for row in figures["step_time_by_part"]}
    fits = "yes" if figures["fits"] else "no"
    return {**figures, **by_kind, **parts, **figures["bytes_by_cause"],
            "by_part": by_part, "fits": fits}  # fmt: skip


def collective(kind: str, topology: str, megabytes: str) -> Figures:
    """Predicts a collective of all devices of a slice, with an array of this size on each."""
    target, size = Topology.named(topology), int(megabytes) * MEGABYTE
    mesh = {"all": target.devices}
    coords = coordinates(target, mesh, None, "all:-1")
    call = Collective(kind, ("all",), target.devices, size, 1, "")
    time_s = seconds(target, coords[neighbours(coords)], mesh, call)
    return {"devices": target.devices, "megabytes": int(megabytes), "seconds": time_s}


def neighbours(coords: np.ndarray) -> np.ndarray:
    """Orders devices on a torus so that each is next to the one before.

    A permutation sends along this order: with pairs that are close, its cost is constant (GShard,
    section 5.3).

    >>> neighbours(np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])).tolist()
    [0, 2, 4, 5, 3, 1]
    """
    keys, turns = [], np.zeros(len(coords), int)
    for axis in coords.T[::-1]:
        keys.append(np.where(turns % 2, -axis, axis))
        turns = turns + axis
    return np.lexsort(keys[::-1])


def operator(equation: str, split: str, grown: str, topology: str) -> Figures:
    """Costs an operator on all devices of a slice, as in GShard's Table 4.

    `split` names the axis of each operand and of the result that is split over them.  Axes of
    `grown` grow with the devices; of Algorithm 2, G and E are as large and C shrinks.
    """
    target = Topology.named(topology)
    count, mesh = target.devices, {"all": target.devices}
    sizes = {axis: 1024 * (count if axis in grown else 1) for axis in equation}
    sizes |= {"G": count, "E": count, "C": 4096 // count, "O": 3, "P": 3}
    *operands, result = equation.replace("->", ",").split(",")
    splits = zip((*operands, result), split.split(","), strict=True)
    places = [jax.P(*("all" if axis == over else None for axis in axes)) for axes, over in splits]

    def compute(*x: jax.Array) -> jax.Array:
        if "O" in equation:
            return Layout(mesh=f"all:{count}", rules="height:all").convolve(equation, *x)
        is_sum = operands == [result] * 2
        return x[0] + x[1] if is_sum else jnp.einsum(equation, *x, out_sharding=places[-1])

    with jax.sharding.use_abstract_mesh(devices := abstract_mesh(mesh)):
        arrays = []
        for axes, place in zip(operands, places[:-1], strict=True):
            shape, sharding = [sizes[axis] for axis in axes], jax.NamedSharding(devices, place)
            arrays.append(jax.ShapeDtypeStruct(shape, "float32", sharding=sharding))
        cost = cost_of(jax.jit(compute).trace(*arrays).jaxpr.jaxpr, mesh)
    coords = coordinates(target, mesh, None, "all:-1")
    coords = coords[neighbours(coords)]
    sent_s = sum(c.times * seconds(target, coords, mesh, c) for c in cost.collectives)
    kinds = ", ".join(sorted({c.kind for c in cost.collectives})) or "0"
    return {"compute_s": sum(compute_s(target.chip, cost.ops)), "traffic_s": sent_s, "kinds": kinds}


def tensor(name: str, axes: str, item_bytes: str, stored: str = "") -> Figures:
    """Counts the bytes of a tensor of a run on each device; a lowercase axis is replicated."""
    inputs = inputs_of(name)
    model: Any = inputs.run.model
    sizes = {"B": inputs.run.batch_sequences, "L": inputs.run.task.length, "D": model.d_model,
             "F": model.d_ff}  # fmt: skip
    whole = int(item_bytes) * math.prod(sizes[axis] for axis in axes.upper())
    place = inputs.layout.place(axes, stored=bool(stored))
    with jax.sharding.use_abstract_mesh(abstract_mesh(inputs.sizes)):
        return {"bytes": whole, "bytes_per_device": whole / math.prod(map(num_shards, place))}


def order(text: str, topology: str) -> Figures:
    """Predicts an all-gather along each row of 2 x 4 partitions, placed in this order."""
    target, mesh = Topology.named(topology), {"rows": 2, "cols": 4}
    coords = coordinates(target, mesh, text)
    gather = Collective("all-gather", ("cols",), 4, 8 * MEGABYTE, 1, "")
    return {"seconds": seconds(target, coords, mesh, gather), "coordinates": coords}


SOURCES: Mapping[str, Callable[..., Figures]] = {
    function.__name__: cache(function)
    for function in (count, plan, collective, operator, tensor, order)
}
